"""The tuned constants of the ensemble, each with its reason.

All were chosen on the tuning sets and confirmed on other ones; docs/research-log.md has the
measurements. What is here changes accuracy or calibration. Constants that only bound memory or
rounding stand beside their use.
"""

# Descriptors and ridge experts
COMPONENTS = 128  # principal components of patches, at most: more add time, not accuracy
SIDE = 7  # of a layout, at most: finer grids tell where an object is, not what it is
LAYOUTS = 2  # how many of the deepest maps have an expert on their layout
ALPHA = 0.1  # penalty of the ridge regressions, for vectors of length 1

# Weights before stacking. With one shot per class they are final, and the second-order experts,
# which generalise best from a single image, get most of the weight.
BLOCK, DEEPEST_BLOCK = 0.5, 1.0  # of the blocks of the head
LAYOUT = 1.0
MEAN, ONE_SHOT_MEAN = 3.0, 2.5
# Of the second-order expert of the deepest block, in thirds: each block above has one third less
SECOND_ORDER, ONE_SHOT_SECOND_ORDER = 1.0, 2.5
ONE_SHOT_BLOCKS = 0.4  # factor of BLOCK and DEEPEST_BLOCK: a head learns little from one shot
# Scale of the logits with one shot per class, when nothing can be left out to calibrate them:
# SCALE * distance ** POWER, for the mean distance of a shot to the nearest one of another class
ONE_SHOT_SCALE, ONE_SHOT_POWER = 1.34, 0.41

# Stacking
FOLDS = 2  # of the head: out-of-fold predictions by more folds take longer and are no better
# Strength of the prior weights against m out-of-fold predictions: (ENOUGH / m)^2, at least WEAK.
# With two shots per class, members are judged by what one shot taught them.
WEAK, ENOUGH = 0.1, 15
# By how much logits shrink with the mean of 1 / shots over the classes: what was calibrated on the
# shots of a task is too bold on new images if they are few
FEW_SHOTS = 0.2
SMALLEST = 0.001  # part of its prior weight that a member keeps, even if all members seem to harm

# Unequal shots
SLOPE_PENALTY = 1.0  # on the slope of a line in log n, in units of (log n)^2 summed over classes
# By how much the log scale of logits falls with the fraction of one-shot classes, which are harder
# than the classes that the logits were calibrated on
UNTESTED = 0.5
SHOTS_SCALE = 0.25  # of the member -log n; the smaller, the closer it stays to the textbook

# Class names
CENTRED = 0.5  # part of a name's mean cosine that is subtracted: some names are close to all images
SPREADS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # of logits over the classes, all equally likely before
NAMES_WEIGHT = 0.4  # part of the scale that names have with one shot per class
UNIT = 0.25  # spread of the scores of a usual member, which those of names get for stacking
EVIDENCE = 1.0  # log-odds that names help, from which on they are used with one shot per class

# Unlabelled images
MASS = 4.0  # total weight of the unlabelled images per class, in shots, at most
TAKEN = 0.5  # of the images that a class would have if all were equally frequent
LIMIT = 500  # images that are used, at most: more take much time and gain little
TOLERANCE = 1.0  # standard errors that the log-loss of left-out shots may grow by
