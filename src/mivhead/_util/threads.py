"""Threads that compute: how many there are, how they share work, and how they wait.

NumPy's linear algebra has threads of its own, which wait in a busy loop after each product:
`shared_cores` gives it one, as the products of a head are small. The threads of `run_parts` sleep
while there is nothing to do; NumPy and the compiled kernels release Python's lock.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
POLICY = "OMP_WAIT_POLICY"  # of OpenMP, with which PyTorch computes

_wanted: int | None = None  # set by the user; None: all cores
_pool: ThreadPoolExecutor | None = None
_here = threading.local()  # `inside`: whether this thread is working on a part
_limits = threading.RLock()
_limited, _limiter = 0, None  # how many contexts limit NumPy at the moment, and what undoes it

if "torch" not in sys.modules:
    # By default PyTorch's threads wait for each other in a busy loop. If another process holds the
    # core of one of them, all others spin. OpenMP reads this once, when PyTorch is loaded.
    os.environ.setdefault(POLICY, "passive")


def set_threads(threads: int | None) -> None:
    """Set how many threads compute; None uses all cores that the process may use."""
    global _wanted, _pool
    if threads != _wanted:
        _wanted, _pool = threads, None


def wanted_threads() -> int | None:
    """Return the number that was set; None: all cores."""
    return _wanted


def thread_count() -> int:
    """Return how many threads compute: as set, or by `OMP_NUM_THREADS`, at most one per core."""
    wanted = os.environ.get("OMP_NUM_THREADS", "") if _wanted is None else str(_wanted)
    cores = available_cores()
    return max(1, min(int(wanted), cores)) if wanted.isdigit() else cores


def run_parts(work: Callable[[int], object], parts: int) -> None:
    """Call `work(0)` to `work(parts - 1)`, on several threads; within a part, one after the other.

    An exception in a part is raised here, after the other parts have ended.
    """
    helpers = min(parts, thread_count()) - 1
    if helpers < 1 or getattr(_here, "inside", False):
        for part in range(parts):
            work(part)
        return
    numbers = count()

    def take() -> None:
        _here.inside = True
        try:
            while (part := next(numbers)) < parts:
                work(part)
        finally:
            _here.inside = False

    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, thread_count() - 1), thread_name_prefix="mivhead")
    others = [_pool.submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        errors = [other.exception() for other in others]  # waits for them, too
    for error in errors:
        if error is not None:
            raise error


@contextmanager
def shared_cores() -> Iterator[None]:
    """Run heavy work whose threads do not get in each other's way."""
    global _limited, _limiter
    torch: Any = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    with _limits:
        _limited += 1
        if _limited == 1:
            _limiter = _controller().limit(limits=1, user_api="blas")
    try:
        if torch:
            torch.set_num_threads(min(threads, thread_count()))
        yield
    finally:
        if torch:
            torch.set_num_threads(threads)
        with _limits:
            _limited -= 1
            if _limited == 0:
                _limiter.restore_original_limits()


@cache
def _controller() -> Any:
    import numpy as np  # noqa: F401  # so that its library is found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _forget_threads() -> None:
    """Forget threads, which a forked process does not have."""
    global _pool, _limits, _limited
    _pool, _limits, _limited = None, threading.RLock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@cache
def available_cores() -> int:
    """Count the cores that this process may use: its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores: float = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, float(quota) / float(period))
    except (OSError, ValueError):  # no limit: "max 100000"
        pass
    return max(1, math.ceil(cores))
