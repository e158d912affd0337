"""The end of the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end(code: int) -> NoReturn:
    """End the process with this exit code, without taking Python's memory apart first.

    With PyTorch and SciPy loaded that takes a second, and the system does it anyhow. What was
    registered for the end still runs. If a thread is still at work, the process ends as usual.
    """
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    if any(not thread.daemon for thread in others):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
