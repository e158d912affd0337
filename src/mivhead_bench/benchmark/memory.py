"""Memory: how much a task needs, how many tasks fit at a time, and what a fit really took.

The estimate counts what grows with a task: its features, and the candidates of the images that a
head trains on. It is meant to tell two workers of 12 GB from 24 GB of memory, not to be exact.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mivhead.backbones.preset import Preset
from mivhead.features import Features
from mivhead.head.recipe import resolve_blocks

PROCESS = 800_000_000  # a worker with PyTorch and a backbone
TUNING = 3_000_000_000  # activations and gradients of one batch on a CPU
_TOTAL = Path("/proc/meminfo")
_PROCESS = Path("/proc/self")
_GROUP = Path("/sys/fs/cgroup")


def image_bytes(features: Features, preset: Preset) -> tuple[int, int]:
    """Return the bytes of one image's features, and of its candidates that training keeps."""
    blocks = resolve_blocks(features, preset)
    stored = sum(part[0].nbytes for part in features.tensors.values())
    patches = [sum(h * w for h, w in block.candidate_sizes) + block.token for block in blocks]
    return stored, 4 * sum(n * b.channels for n, b in zip(patches, blocks, strict=True))


def available_memory() -> int | None:
    """Return the bytes that processes may still take; None if the system does not say."""
    limits: list[int] = []
    with suppress(OSError):
        limits.append(_read("MemAvailable", _TOTAL))
    with suppress(OSError, ValueError):  # a container's own limit
        limit, used = ((_GROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        limits.append(max(0, int(limit) - int(used)))
    if not limits and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def fitting_workers(workers: int, need: int, available: int | None) -> int:
    """Return how many tasks of this size run at a time: at least one.

    >>> fitting_workers(8, 12_000_000_000, 24_000_000_000)
    2
    """
    if available is None or need <= 0:
        return workers
    return max(1, min(workers, available // need))


class PeakMemory:
    """Peak of the memory taken since this object was created, in bytes.

    On a GPU it is the device's memory. On a CPU it is that of the process: memory that was freed
    but kept for reuse is first returned to the system, so that code that reuses it does not look
    cheap. Only Linux lets a process reset its high-water mark; on other systems the result is 0.

    >>> import gc
    >>> _ = gc.collect()  # what it frees in between would be subtracted
    >>> peak = PeakMemory()
    >>> block = bytearray(50_000_000)
    >>> peak.bytes() == 0 or peak.bytes() > 40_000_000
    True
    """

    def __init__(self, device: str | None = None) -> None:
        self._before: int | None = None
        self._device = device_module(device)
        if hasattr(self._device, "max_memory_allocated"):
            self._device.reset_peak_memory_stats()
            self._before = self._device.memory_allocated()
        elif self._device is None and sys.platform == "linux":
            with suppress(OSError, AttributeError):  # C libraries other than glibc lack it
                ctypes.CDLL(None).malloc_trim(0)
            with suppress(OSError):
                (_PROCESS / "clear_refs").write_text("5")  # resets the peak; see proc(5)
                self._before = _read("VmRSS", _PROCESS / "status")

    def bytes(self) -> int:
        """Return the peak so far."""
        if self._before is None:
            return 0
        if self._device is not None:
            return max(0, int(self._device.max_memory_allocated()) - self._before)
        return max(0, _read("VmHWM", _PROCESS / "status") - self._before)


def device_module(device: str | None) -> Any:
    """Return PyTorch's module for a device, such as `torch.cuda`; None for a CPU."""
    kind = "cpu" if device is None else torch.device(device).type
    return None if kind == "cpu" else torch.get_device_module(kind)


def _read(name: str, path: Path) -> int:
    """Return the bytes of a line such as `VmRSS:  100 kB`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
