"""All tests, and the examples in docstrings, leave the user's feature cache alone."""

import os

os.environ["MIV_CACHE"] = "off"

# They hold no examples, and several files of one name cannot all be searched for them.
collect_ignore_glob = ["*/conftest.py"]
