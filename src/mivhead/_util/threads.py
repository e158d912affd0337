"""How many threads PyTorch should use, and how they wait.

PyTorch's OpenMP threads wait for each other in a busy loop. If another process holds the core of
one of them, all others spin until it gets its core back: a fit that takes 3 seconds with one thread
can take minutes with two. Threads that sleep while they wait are not slower on an idle machine and
harmless on a busy one (`benchmarks/busy.py`). OpenMP reads its policy once, when PyTorch is loaded:

- `import mivhead` asks for the passive policy, unless the environment already names one or PyTorch
  was imported before. The latter is too late, so that the rule below applies instead.
- `shared_cores` is a context for heavy work. It uses no more threads than the process has cores,
  by its affinity and by the quota of its container. If the threads spin, it first measures whether
  several are faster than one at the moment, and uses one otherwise.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLICY = "OMP_WAIT_POLICY"
PASSIVE = "passive"
CGROUP = Path("/sys/fs/cgroup")

_TRIAL_SIZE = 192  # rows of a matrix product that takes about as long as one of the head's
_TRIALS = 7


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, if PyTorch has not been loaded yet."""
    if "torch" not in sys.modules:
        os.environ.setdefault(POLICY, PASSIVE)


@contextmanager
def shared_cores() -> Iterator[None]:
    """Run heavy work with as many threads as are of use."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(useful_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def useful_threads() -> int:
    """Return how many threads to use: PyTorch's number, or less if they would hinder each other.

    Where PyTorch is not in use, `OMP_NUM_THREADS` sets the number, or else there are as many
    threads as cores.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdigit() and int(given) else available_cores()
    threads: int = min(torch.get_num_threads(), available_cores())
    if threads == 1 or os.environ.get(POLICY, "").lower() == PASSIVE:
        return threads
    return threads if _faster_than_one(threads) else 1


def _faster_than_one(threads: int) -> bool:
    """Measure for some milliseconds whether several spinning threads are faster than one."""
    import torch

    matrix = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE)
    before, seconds = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            torch.mm(matrix, matrix)  # starts the threads
            start = time.perf_counter()
            for _ in range(_TRIALS):
                torch.mm(matrix, matrix)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return seconds[1] < seconds[0]


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
