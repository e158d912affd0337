"""The engine: the MIV-head on NumPy and C, with its gradients written out.

It computes what the formulas of `mivhead.head` say, without PyTorch. Read `head` (the three
components of the paper, each followed by its gradient) and `training`. What they call are seven
functions on arrays, in two versions: `compiled` (C, fast) and `plain` (NumPy, for machines without
the compiled library). `library` loads it, if its `fingerprint` is that of the C files.
"""
