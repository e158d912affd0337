"""Compiled kernels: work that PyTorch has no single operation for."""
