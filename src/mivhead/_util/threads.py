"""Threads that compute: how many there are, how they share work, and how they wait.

`run_parts` runs the parts of some work on a few threads of our own, which sleep while there is
nothing to do. NumPy and the compiled kernels release Python's lock while they compute, so that the
threads really run side by side. Inside a part, `run_parts` runs one after the other: work is shared
out once, at the outermost level that has enough parts.

NumPy's linear algebra has threads of its own, which wait in a busy loop for a while after each
product. `shared_cores` is a context for heavy work that gives NumPy one thread, as the products of
a head are small, and PyTorch (if it is loaded) as many as `thread_count` says.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
_limited = 0  # how many contexts limit NumPy at the moment
_limiter: Any = None


def set_threads(threads: int | None) -> None:
    """Set how many threads compute; None uses all cores that the process may use."""
    global _wanted, _pool
    if threads != _wanted:
        _wanted, _pool = threads, None


def wanted_threads() -> int | None:
    """Return the number that was set; None: all cores."""
    return _wanted


def thread_count() -> int:
    """Return how many threads compute: the number that was set, but no more than there are cores.

    Where nothing was set, the variable `OMP_NUM_THREADS` counts, or else there is one per core.

    >>> thread_count() >= 1
    True
    """
    given = os.environ.get("OMP_NUM_THREADS", "") if _wanted is None else str(_wanted)
    cores = available_cores()
    return max(1, min(int(given), cores)) if given.isdigit() else cores


def run_parts(work: Callable[[int], object], parts: int) -> None:
    """Call `work(0)` to `work(parts - 1)`, on several threads if that many are to compute.

    An exception in a part is raised here, after the other parts have ended.

    >>> squares = [0] * 5
    >>> run_parts(lambda i: squares.__setitem__(i, i * i), 5)
    >>> squares
    [0, 1, 4, 9, 16]
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

    others = [_threads().submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        errors = [other.exception() for other in others]  # waits for them, too
    for error in errors:
        if error is not None:
            raise error


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, thread_count() - 1), thread_name_prefix="mivhead")
    return _pool


def _forget_threads() -> None:
    """Forget threads, which a forked process does not have."""
    global _pool, _limits, _limited
    _pool, _limits, _limited = None, threading.RLock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@contextmanager
def shared_cores() -> Iterator[None]:
    """Run heavy work whose threads do not get in each other's way."""
    with ExitStack() as stack:
        stack.enter_context(_one_blas_thread())
        if torch := sys.modules.get("torch"):
            before = torch.get_num_threads()
            torch.set_num_threads(min(before, thread_count()))
            stack.callback(torch.set_num_threads, before)
        yield


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let NumPy's linear algebra compute in the thread that calls it."""
    global _limited, _limiter
    with _limits:
        _limited += 1
        if _limited == 1:
            _limiter = _controller().limit(limits=1, user_api="blas")
    try:
        yield
    finally:
        with _limits:
            _limited -= 1
            if _limited == 0:
                _limiter.restore_original_limits()


@cache
def _controller() -> Any:
    import numpy as np  # noqa: F401  # so that its library is found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def wait_passively() -> None:
    """Let PyTorch's threads sleep while they wait, if it has not been loaded yet.

    By default, they wait for each other in a busy loop. If another process holds the core of one of
    them, all others spin until it gets its core back (`benchmarks/busy.py`).
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(POLICY, "passive")


wait_passively()  # OpenMP reads its settings once, when PyTorch is loaded


@cache
def available_cores() -> int:
    """Count the cores that this process may use: its affinity and its container's quota.

    >>> available_cores() >= 1
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(CGROUP))))


def _quota(root: Path) -> float:
    """Cores' worth of processor time that the control group grants; infinite without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # v2, v1
        try:
            quota, period = " ".join((root / file).read_text() for file in files).split()[:2]
            if quota not in ("max", "-1"):
                return float(quota) / float(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return math.inf
