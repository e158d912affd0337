"""The ensemble: the blocks of the head and ridge experts, with weights fitted by stacking.

The blocks of the head learn where to look; a ridge expert learns only a linear map of a fixed
descriptor of the image. They make different mistakes, so that together they are more accurate than
either. The weights are fitted to images that no member has seen, so the probabilities are
calibrated too. Read `descriptors`, `ridge` and `stacking`, then `balance` (classes with unequal
shots), `names` (class names as a member) and `unlabelled` (images without labels). `constants`
holds all that was tuned.
"""
