"""Calls that worker processes can import."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from mivhead.errors import InputError


@dataclass(frozen=True)
class Square:
    value: int

    def __call__(self):
        return self.value**2


@dataclass(frozen=True)
class KillWorker:
    """Kills its process, or only the first time if a path for a note is given."""

    note: str | None = None

    def __call__(self):
        if self.note is not None:
            try:
                os.close(os.open(self.note, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return "survived"
        return os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Fail:
    def __call__(self):
        raise InputError("this call fails.")


@dataclass(frozen=True)
class CountThreads:
    def __call__(self):
        from mivhead._util.threads import thread_count

        return thread_count(), os.environ["OMP_NUM_THREADS"]


@dataclass(frozen=True)
class ReadVariable:
    """Return a variable of the worker's environment; two calls meet at a pipe."""

    name: str
    pipe: Path
    mode: str

    def __call__(self) -> str | None:
        signal.alarm(60)
        with self.pipe.open(self.mode):
            signal.alarm(0)
        return os.environ.get(self.name)
