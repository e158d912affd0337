"""A fitted model: how it is fitted, what it keeps, how it decides, and its file."""
