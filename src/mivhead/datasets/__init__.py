"""The benchmark's image sets: catalogue and preparation."""
