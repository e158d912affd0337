"""All tests, and the examples in docstrings, leave the user's feature cache alone."""

import os
import signal

os.environ["MIV_CACHE"] = "off"

# A run in the background may start with Ctrl-C ignored, which children inherit: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They hold no examples, and several files of one name cannot all be searched for them.
collect_ignore_glob = ["*/conftest.py"]
