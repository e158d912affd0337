"""`FeatureCache`: a folder with one small file per entry.

One file per entry needs no index that could disagree with the data, lets old entries go one by one,
and reads about 1 GB/s; large segments would be half as fast again (see `benchmarks/cache.py`). A
file is written under a temporary name and then renamed, so a reader sees all of it or nothing,
whoever else writes or is killed; what a power cut leaves behind is found by the checksum. Files are
never changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import re
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import uuid4

import numpy as np
from PIL import Image

from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.images.augmentation import Augmentation


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


# What an entry is called: a hash of everything that its features depend on.


# Raise it when decoding, resizing or augmentation gives other pixels than before, or when the
# layout of an entry changes: older entries are then never found, and removed in time.
VERSION = 1
DEFAULT_TYPE = "float16"


def content_hash(image: bytes | Image.Image) -> str:
    """Hash an image file, or the pixels of a picture that is in memory.

    >>> red = Image.new("RGB", (2, 3), "red")
    >>> content_hash(red) == content_hash(red.copy()) != content_hash(red.rotate(90, expand=True))
    True
    """
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    head = f"{image.mode} {image.width} {image.height}:".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


class Keys:
    """Keys of the features that one backbone gives.

    Parameters
    ----------
    backbone
        Its identity and the type that it rounds features to (an attribute `dtype`, if it has one;
        two types must not share an entry) are part of every key.
    how
        How views are made; part of the key of a view.
    """

    def __init__(self, backbone: Backbone, how: Augmentation) -> None:
        kind = str(getattr(backbone, "dtype", DEFAULT_TYPE)).removeprefix("torch.")
        self._common = [VERSION, backbone.identity.key, kind]
        self._how = asdict(how)

    def key(self, content: str, seed: int | None) -> str:
        """Name the features of an image (`content_hash`), or of its view with this seed."""
        view = "original" if seed is None else [seed, self._how]
        text = json.dumps([*self._common, content, view], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


# One entry of the cache as bytes: the features of one image behind a checksum.
#
# Layout: `mivcache`, CRC-32 of all that follows, length of the header, the header (JSON: name,
# type and shape of every part, padded so that the values are aligned), the values. The checksum
# begins with the entry's key, so that an entry under a wrong name is damaged too.


Parts: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"

_MAGIC = b"mivcache"
_PREFIX = struct.Struct("<8sI")  # magic, checksum
_LENGTH = struct.Struct("<I")  # of the header
_ALIGN = 64


def encode(key: str, parts: Parts) -> bytes:
    """Pack the parts of one image, such as `block0.map`, under a key.

    >>> data = encode("ab", {"block0.token": np.ones(3, np.float16)})
    >>> decode("ab", data)
    {'block0.token': array([1., 1., 1.], dtype=float16)}
    >>> decode("other", data) is None
    True
    """
    arrays = {
        name: np.ascontiguousarray(part, part.dtype.newbyteorder("<")).reshape(part.shape)
        for name, part in parts.items()
    }
    described = [[name, part.dtype.str, list(part.shape)] for name, part in arrays.items()]
    header = json.dumps(described).encode()
    header += b" " * (-(_PREFIX.size + _LENGTH.size + len(header)) % _ALIGN)
    body: list[Any] = [_LENGTH.pack(len(header)), header, *arrays.values()]
    return b"".join([_PREFIX.pack(_MAGIC, _checksum(key, *body)), *body])  # the only copy


def decode(key: str, data: Any) -> dict[str, np.ndarray[Any, Any]] | None:
    """Unpack an entry as views of `data` (bytes or a memory map); None if it is damaged."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        return None
    magic, checksum = _PREFIX.unpack_from(view)
    body = view[_PREFIX.size :]
    if magic != _MAGIC or checksum != _checksum(key, body):
        return None
    # What has this checksum was written by `encode`: it needs no further check.
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    values = np.frombuffer(body[start:], np.uint8)
    return {
        name: values[place].view(kind).reshape(shape)
        for name, place, kind, shape in _read_header(bytes(body[_LENGTH.size : start]))
    }


@lru_cache(maxsize=64)  # all entries of a backbone have the same header
def _read_header(header: bytes) -> list[tuple[str, slice, str, tuple[int, ...]]]:
    """Name, place among the values, type and shape of every part."""
    parts = []
    start = 0
    for name, kind, shape in json.loads(header):
        end = start + math.prod(shape) * np.dtype(kind).itemsize
        parts.append((name, slice(start, end), kind, tuple(shape)))
        start = end
    return parts


def _checksum(key: str, *body: Any) -> int:
    checksum = zlib.crc32(key.encode())
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    return checksum


# Where the cache is and how large it may grow: parameters and environment variables.


FOLDER = "MIV_CACHE"
LIMIT = "MIV_CACHE_GB"
OFF = "off"


def open_cache(folder: str | Path | None = None) -> FeatureCache | None:
    """Open the cache in a folder, or in the usual one; None if the user has switched it off.

    >>> open_cache("features").folder.name
    'features'
    """
    if folder is None:
        folder = os.environ.get(FOLDER) or _platform_folder() / "mivhead"
        if str(folder).lower() == OFF:
            return None
    return FeatureCache(Path(folder).expanduser(), _limit())


def _platform_folder() -> Path:
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def _limit() -> int:
    text = os.environ.get(LIMIT)
    if not text:
        return DEFAULT_LIMIT
    try:
        limit = float(text) * 1e9
        if not 0 < limit < float("inf"):
            raise ValueError
    except ValueError:
        raise InputError(f"{LIMIT} is {text!r}; expected a number of gigabytes, like 10.") from None
    return int(limit)


# The feature cache: what a backbone once said of an image is kept on disk.
#
# The folder is the platform's cache folder (`~/.cache/mivhead`), or the one that the
# environment variable `MIV_CACHE` names; `MIV_CACHE=off` switches the cache off. `MIV_CACHE_GB`
# is the size above which the entries that were not used for the longest time are removed.


__all__ = ["CacheInfo", "FeatureCache", "open_cache"]
