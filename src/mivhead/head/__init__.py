"""The MIV-head that runs, on NumPy and C.

Read `formulas` beside the paper: each formula is followed by its gradient. `components` holds the
parameters and the way from features to cosines and back, `train` fits them. `kernels` has the five
slow formulas in C and chooses. `recipe` says how a head is trained, and what it sees of a backbone.
"""
