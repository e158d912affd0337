"""The one clock of the benchmark.

Durations that are added or compared come from the same clock. On a CPU this is processor time: in
one thread it equals the wall time of an idle machine, no matter what else runs. On other devices,
where the processor only waits, it is wall time. The wall clock is recorded as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple, Self

import torch

from mivhead.backbones.base import default_device


class Seconds(NamedTuple):
    """A duration by the benchmark's clock, and by the wall clock."""

    spent: float
    wall: float

    @classmethod
    def median(cls, many: Iterable[Seconds]) -> Self:
        """Return the median of each clock.

        >>> Seconds.median([Seconds(1.0, 5.0), Seconds(2.0, 2.0), Seconds(9.0, 3.0)])
        Seconds(spent=2.0, wall=3.0)
        """
        spent, wall = zip(*many, strict=True)
        return cls(median(spent), median(wall))

    def times(self, factor: float) -> Seconds:
        """Return a multiple of the duration."""
        return Seconds(factor * self.spent, factor * self.wall)


class Clock:
    """Measures the time between laps, starting now.

    Without a device the work runs on a GPU if there is one, as for backbones and methods. With
    `this_thread` only the processor time of the calling thread counts, where others do unrelated
    work such as decoding images.

    >>> clock = Clock("cpu")
    >>> clock.lap().spent >= 0.0
    True
    """

    def __init__(self, device: str | None = None, *, this_thread: bool = False) -> None:
        self._device = default_device(device)
        processor = time.thread_time if this_thread else time.process_time
        self._now = processor if self._device.type == "cpu" else time.perf_counter
        self._last = self._read()

    def lap(self) -> Seconds:
        """Return the time since the last lap."""
        before, self._last = self._last, self._read()
        return Seconds(self._last.spent - before.spent, self._last.wall - before.wall)

    def _read(self) -> Seconds:
        if self._device.type != "cpu":
            wait = getattr(torch.get_device_module(self._device), "synchronize", None)
            if wait is not None:
                wait()  # calls return before their work is done
        return Seconds(self._now(), time.perf_counter())
