"""For all tests, and the examples in docstrings: the user's feature cache is not touched."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

os.environ["MIV_CACHE"] = "off"
WEIGHTS = tempfile.TemporaryDirectory(prefix="mivhead-weights-")  # not the user's; removed at exit
os.environ["MIV_WEIGHTS"] = WEIGHTS.name

# A background process may ignore Ctrl-C, and its children inherit that: some tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They contain no examples. pytest cannot search several files of the same name, and importing the
# simulated accelerator changes PyTorch for all tests of a process.
collect_ignore_glob = ["*/conftest.py", "*/helpers/*accelerator.py"]


@pytest.fixture(autouse=True)
def forget_registered_methods() -> Iterator[None]:
    """Forget the methods that a test or an example registers."""
    yield
    registry = sys.modules.get("mivhead.methods.registry")
    if registry is not None and registry._REGISTERED:
        registry._REGISTERED.clear()
        registry._homes.cache_clear()
