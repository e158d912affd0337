"""The command `miv`: a thin front door, one module per command.

Nothing here imports PyTorch, NumPy or Pillow before a command runs, so that help is instant.
"""
