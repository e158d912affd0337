"""How much memory a task needs, and how many tasks fit into this machine at a time.

The estimate counts what grows with a task: its features, and the candidates of the images that a
head trains on. It is meant to tell two workers of 12 GB from 24 GB of memory, not to be exact.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mivhead.features import Features
from mivhead.head.blocks import BlockConfig

PROCESS = 800_000_000  # a worker with PyTorch and a backbone
PIXELS = 3 * 224 * 224  # bytes of an image for a method that tunes the backbone
TUNING = 3_000_000_000  # activations and gradients of one batch on a CPU
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that processes may still take; None if the system does not say."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        lines = _MEMORY.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # a container's own limit
        limit, used = ((_GROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(max(0, int(limit) - int(used)))
    if not found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found) if found else None


def feature_bytes(features: Features) -> int:
    """Return the bytes of the features of one image, of which these are an example."""
    return sum(_size(part[0]) for part in features.tensors.values())


def candidate_bytes(blocks: Sequence[BlockConfig]) -> int:
    """Return the bytes of one image's candidates in float32, which training keeps."""
    values = 0
    for block in blocks:
        values += sum(h * w for h, w in block.candidate_sizes) * block.channels
        values += block.token * block.channels
    return 4 * values


def _size(part: object) -> int:
    array = part if isinstance(part, np.ndarray) else np.asarray(part)
    return int(array.nbytes)


def fitting_workers(workers: int, need: int, available: int | None) -> int:
    """Return how many tasks of this size run at a time: at least one.

    >>> fitting_workers(8, 12_000_000_000, 24_000_000_000)
    2
    >>> fitting_workers(8, 12_000_000_000, None)
    8
    """
    if available is None or need <= 0:
        return workers
    return max(1, min(workers, available // need))
