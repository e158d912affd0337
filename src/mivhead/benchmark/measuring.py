"""How long a piece of work takes, and how much memory at most."""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


class Clock:
    """Seconds between laps, starting now.

    On a CPU these are seconds of the processor: in one thread the same as what passes on a machine
    with nothing else to do, whatever else runs. Of other devices they are what passes.

    Examples
    --------
    >>> clock = Clock()
    >>> clock.lap() < 1.0
    True
    """

    def __init__(self, device: str | None = None) -> None:
        self._now = time.process_time if device in (None, "cpu") else time.perf_counter
        self._last = self._now()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        before, self._last = self._last, self._now()
        return self._last - before


class PeakMemory:
    """Bytes of memory taken beyond what was taken when this was made.

    Memory that was freed but kept for later use is given back to the system first, so that work
    which reuses it does not look cheap. Only Linux lets a process reset its high-water mark; on
    other systems the answer is 0.

    Examples
    --------
    >>> peak = PeakMemory()
    >>> block = bytearray(50_000_000)
    >>> peak.bytes() == 0 or peak.bytes() > 40_000_000
    True
    """

    def __init__(self) -> None:
        _give_back()
        self._before: int | None = None
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self._before = _read("VmRSS")

    def bytes(self) -> int:
        """Return the most that was taken since."""
        return 0 if self._before is None else max(0, _read("VmHWM") - self._before)


def _read(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _give_back() -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # other C libraries than glibc lack it
            ctypes.CDLL(None).malloc_trim(0)
