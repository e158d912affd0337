"""All tests, and the examples in docstrings, leave the user's feature cache alone."""

import os

os.environ["MIV_CACHE"] = "off"
