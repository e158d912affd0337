"""One process at a time: a lock that the system takes back when its process dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

from mivhead.errors import NotAvailableError

_FAR = 2**30  # Windows locks bytes of the file: one that nobody reads


def lock_file(path: Path) -> IO[str]:
    """Take the lock of a file, or refuse at once; it lasts until the file is closed.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> held = lock_file(Path(folder.name, "lock"))
    >>> lock_file(Path(folder.name, "lock"))
    Traceback (most recent call last):
        ...
    mivhead.errors.NotAvailableError: Another run writes into ... (process ...); wait for it, or \
choose another folder.
    >>> held.close()
    >>> folder.cleanup()
    """
    file = path.open("a+", encoding="utf-8")
    try:
        _lock(file)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise NotAvailableError(
            f"Another run writes into {path.parent} (process {owner}); wait for it, or choose "
            "another folder."
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _lock(file: IO[str]) -> None:
    """Raise OSError if another process has it."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(_FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
