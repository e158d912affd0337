"""Compiled kernels, and the seam where the fast path is chosen: start with `backend`."""
