"""`FeatureCache`: a folder with one small file per entry.

One file per entry needs no index that could disagree with the data, lets old entries go one by one,
and reads about 1 GB/s; large segments would be half as fast again (see `benchmarks/cache.py`). A
file is written under a temporary name and then renamed, so a reader sees all of it or nothing,
whoever else writes or is killed; what a power cut leaves behind is found by the checksum. Files are
never changed.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from mivhead.cache.entry import Parts, decode, encode
from mivhead.errors import NotAvailableError

DEFAULT_LIMIT = 10 * 10**9  # bytes: about 60,000 images of the default backbone
KEEP = 0.9  # share of the limit that is left after old entries were removed
LOOK = 0.05  # share of the limit after which a writer looks what others have written
FRESH = 60.0  # seconds within which a second use of an entry is not noted again
ABANDONED = 3600.0  # seconds after which a temporary file belongs to nobody
DISK_BLOCK = 4096  # a file takes whole blocks

_NEW = "new"  # folder of temporary files
_FOLDER_NAME = re.compile("[0-9a-f]{2}")
_FILE_NAME = re.compile("[0-9a-f]{62}")
# All pages at once where the system can do that: the checksum touches every one of them.
_READ_ONLY: dict[str, int] = (
    {"flags": mmap.MAP_SHARED | mmap.MAP_POPULATE, "prot": mmap.PROT_READ}
    if hasattr(mmap, "MAP_POPULATE")
    else {"access": mmap.ACCESS_READ}
)
_log = logging.getLogger(__name__)
_told: set[Path] = set()  # folders whose trouble was reported


@dataclass(frozen=True)
class CacheInfo:
    """What is in a cache."""

    folder: Path
    entries: int
    bytes: int
    limit: int


class _File(NamedTuple):
    used: float  # time of the last use
    bytes: int
    path: str


class FeatureCache:
    """Features of single images by key, shared by all processes that use the same folder.

    It never fails because of its folder: what cannot be read is a miss, and if the disk is full or
    read-only, nothing is stored any more, which is said once.

    Parameters
    ----------
    folder
        Where the entries are; it is made when the first is stored.
    limit
        Bytes on disk above which the entries that were not used for the longest time are removed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = FeatureCache(folder)
    ...     cache.put("0" * 64, {"block0.token": np.ones(2, np.float16)})
    ...     print(cache.get("0" * 64), cache.get("1" * 64), cache.info().entries)
    {'block0.token': array([1., 1.], dtype=float16)} None 1
    """

    def __init__(self, folder: str | Path, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self._root = str(self.folder)
        self._writable = True
        self._unseen = limit * LOOK  # bytes written since the last look: the first write looks

    def get(self, key: str) -> dict[str, np.ndarray[Any, Any]] | None:
        """Read the parts of an entry as read-only views of the mapped file; None on a miss.

        A damaged entry is removed, so that it is computed and stored again.
        """
        path = self._path(key)
        try:
            parts = decode(key, _mapped(path))
        except FileNotFoundError:
            return None
        except ValueError:  # an empty file cannot be mapped
            parts = None
        except OSError as error:
            self._tell("read", error)
            return None
        if parts is None:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        return parts

    def put(self, key: str, parts: Parts) -> None:
        """Store an entry; afterwards, remove old ones if there are too many."""
        if not self._writable:
            return
        data = encode(key, parts)
        path = Path(self._path(key))
        temporary = self.folder / _NEW / uuid4().hex
        try:
            self._make_folders(path.parent, temporary.parent)
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            self._unseen += _on_disk(len(data))
            if self._unseen > self.limit * LOOK:
                self._remove_old()
        except OSError as error:
            self._writable = False
            self._tell("write to", error)

    def info(self) -> CacheInfo:
        """Count the entries and their bytes on disk."""
        files = list(self._files())
        return CacheInfo(self.folder, len(files), sum(file.bytes for file in files), self.limit)

    def clear(self) -> CacheInfo:
        """Remove all entries, and nothing else that may be in the folder; return what there was."""
        before = self.info()
        try:
            for file in self._files():
                Path(file.path).unlink(missing_ok=True)
            self._remove_abandoned()
        except OSError as error:
            raise NotAvailableError(f"Cannot clear {self.folder}: {error.strerror}.") from error
        return before  # the empty folders stay: another process may be about to write into them

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key[2:]}"  # a text: `Path` would take longer than reading

    def _make_folders(self, *folders: Path) -> None:
        if not self.folder.is_dir():
            # What is in here tells something of the user's images.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in folders:
            if not folder.is_dir():  # quicker than an error
                folder.mkdir(exist_ok=True)

    def _folders(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from (f for f in self.folder.iterdir() if _FOLDER_NAME.fullmatch(f.name))

    def _files(self) -> Iterator[_File]:
        """List the entries; some may vanish while this goes on."""
        for folder in self._folders():
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
                for file in files:
                    if _FILE_NAME.fullmatch(file.name):
                        with suppress(FileNotFoundError):
                            found = file.stat()
                            yield _File(found.st_mtime, _on_disk(found.st_size), file.path)

    def _remove_old(self) -> None:
        """Look what is there; above the limit, remove what was not used for the longest time."""
        self._unseen = 0
        self._remove_abandoned()
        files = sorted(self._files())
        left = sum(file.bytes for file in files)
        if left <= self.limit:
            return
        for file in files:
            if left <= self.limit * KEEP:
                break
            Path(file.path).unlink(missing_ok=True)
            left -= file.bytes

    def _remove_abandoned(self) -> None:
        """Remove temporary files that a killed process left behind."""
        with suppress(FileNotFoundError):
            for path in (self.folder / _NEW).iterdir():
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > ABANDONED:
                        path.unlink()

    def _tell(self, what: str, error: OSError) -> None:
        if self.folder not in _told:
            _told.add(self.folder)
            _log.warning(
                "Cannot %s the feature cache %s (%s); going on without it. "
                "The variable MIV_CACHE names another folder, or `off`.",
                what,
                self.folder,
                error.strerror or error,
            )


def _mapped(path: str) -> mmap.mmap:
    """Map a file into memory, and note that it was used."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        if time.time() - os.fstat(file).st_mtime > FRESH:
            with suppress(OSError):  # a read-only folder still gives what it has
                os.utime(path)
        return mmap.mmap(file, 0, **_READ_ONLY)
    finally:
        os.close(file)


def _on_disk(size: int) -> int:
    return -(-size // DISK_BLOCK) * DISK_BLOCK
