"""`miv demo`: the main job from end to end, on real images that pip carries."""
