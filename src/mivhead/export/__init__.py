"""Backbones and models in formats that need no PyTorch."""
