"""Export to formats that run without PyTorch."""
