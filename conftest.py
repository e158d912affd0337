"""For all tests and docstrings: they neither touch nor follow the settings of the user."""

import os
import random
import signal
import sys
import tempfile

import pytest

os.environ["MIV_CACHE"] = "off"
WEIGHTS = tempfile.TemporaryDirectory(prefix="mivhead-weights-")  # not the user's; removed at exit
os.environ["MIV_WEIGHTS"] = WEIGHTS.name
for name in ("MIV_CACHE_GB", "MIV_KEY", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(name, None)
os.environ.pop("PYTHONUNBUFFERED", None)  # most users do not have it
for name in ("no_proxy", "NO_PROXY"):  # servers of the tests are asked directly
    os.environ[name] = f"127.0.0.1,localhost,{os.environ.get(name, '')}".rstrip(",")

# A background process may ignore Ctrl-C, and its children inherit that: some tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They contain no examples. pytest cannot search several files of the same name, and importing the
# simulated accelerator changes PyTorch for all tests of a process.
collect_ignore_glob = ["*/conftest.py", "*/bench/accelerator.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test, with its fixtures, from the same seed, whatever ran before."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
