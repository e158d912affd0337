"""For all tests, and the examples in docstrings: the user's feature cache is not touched."""

import os
import signal
import tempfile

os.environ["MIV_CACHE"] = "off"
os.environ["MIV_WEIGHTS"] = tempfile.mkdtemp(prefix="mivhead-weights-")  # not the user's

# A background process may ignore Ctrl-C, and its children inherit that: some tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They contain no examples, and pytest cannot search several files of the same name.
collect_ignore_glob = ["*/conftest.py"]
