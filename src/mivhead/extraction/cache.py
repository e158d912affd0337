"""The feature cache: features of images and views on disk, each computed once.

The cache is a folder with one small file per entry. An entry holds the features of one image, or
of one augmented view, and its name is a hash of everything that these features depend on: the
content of the image, the backbone and the augmentation. Nothing in a cache is ever stale. Entries
of labelled images also contain a small picture of the image (`PICTURE`).

One file per entry needs no index that could disagree with the data, allows old entries to be
removed one by one, and reads about 1 GB/s; large segments would be 50 % faster (see
`benchmarks/cache.py`). A file is written under a temporary name and then renamed, so readers see
either all of it or nothing, no matter which other process writes or is killed. A checksum detects
what a power failure leaves behind. Files are never modified.

The folder is the platform's cache folder (`~/.cache/mivhead` on Linux) or the one that the
environment variable `MIV_CACHE` names; `MIV_CACHE=off` disables the cache. `MIV_CACHE_GB` sets
the size above which the least recently used entries are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import uuid4

import numpy as np
from PIL import Image

from mivhead._util.kept import cache_folder
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.images.augmentation import Augmentation

Parts: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"  # such as `block0.map` and `block0.token`

PICTURE = "picture"  # name of the part that is not a feature: an encoded picture of the image

DEFAULT_LIMIT = 10 * 10**9  # bytes: about 45,000 images with the default backbone
KEEP = 0.9  # fraction of the limit that remains after old entries have been removed
LOOK = 0.05  # fraction of the limit after which a writer checks what other processes have written
FRESH = 60.0  # seconds during which a repeated use of an entry is not recorded
ABANDONED = 3600.0  # age in seconds at which a temporary file is considered abandoned
DISK_BLOCK = 4096  # files occupy whole blocks

LIMIT = "MIV_CACHE_GB"

_NEW = "new"  # folder of temporary files
_FOLDER_NAME = re.compile("[0-9a-f]{2}")
_FILE_NAME = re.compile("[0-9a-f]{62}")
# Map all pages at once where the system supports it: the checksum touches every one of them.
_READ_ONLY: dict[str, int] = (
    {"flags": mmap.MAP_SHARED | mmap.MAP_POPULATE, "prot": mmap.PROT_READ}
    if hasattr(mmap, "MAP_POPULATE")
    else {"access": mmap.ACCESS_READ}
)
# Do not block on a pipe that somebody put in place of an entry.
_OPEN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_log = logging.getLogger(__name__)
_reported: set[Path] = set()  # folders whose problems were reported


def open_cache(folder: str | Path | None = None) -> FeatureCache | None:
    """Open the cache in a folder, by default the user's; None if the user has disabled it.

    Parameters
    ----------
    folder : str or Path, default=None
        The folder. None: the one that the variable `MIV_CACHE` names, or the user's cache folder.

    Returns
    -------
    FeatureCache or None

    Examples
    --------
    >>> open_cache("features").folder.name
    'features'
    """
    if folder is None:
        folder = cache_folder()
        if folder is None:
            return None
    return FeatureCache(Path(folder).expanduser(), _limit())


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


@dataclass(frozen=True)
class CacheInfo:
    """Contents of a cache.

    Parameters
    ----------
    folder : Path
        Its folder.
    entries : int
        Number of entries.
    bytes : int
        Their size on disk.
    limit : int
        Maximum size in bytes.
    """

    folder: Path
    entries: int
    bytes: int
    limit: int


class FeatureCache:
    """Features of single images and views by key, shared by all processes that use the folder.

    An entry that cannot be read counts as missing. If the disk is full or read-only, nothing more
    is stored, and a single warning says so.

    Parameters
    ----------
    folder : str or Path
        Folder of the entries; created when the first one is stored.
    limit : int, default=10 GB
        Bytes on disk above which the least recently used entries are removed.
    strict : bool, default=False
        Raise an error if an entry cannot be stored, instead of continuing without it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = FeatureCache(folder)
    ...     cache.put("0" * 64, {"block0.token": np.ones(2, np.float16)})
    ...     print(cache.get("0" * 64), cache.get("1" * 64), cache.info().entries)
    {'block0.token': array([1., 1.], dtype=float16)} None 1
    """

    def __init__(
        self, folder: str | Path, limit: int = DEFAULT_LIMIT, *, strict: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self.strict = strict
        self._root = str(self.folder)
        self._writable = True
        self._unseen = limit * LOOK  # bytes written since the last check: the first write checks

    def get(self, key: str) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return an entry as read-only views of the mapped file, or None if it is missing.

        A corrupted entry is removed, so that it is computed and stored again.

        Parameters
        ----------
        key : str
            Key of the entry.

        Returns
        -------
        dict of str to array, or None
            The parts of the entry by name.
        """
        path = self._path(key)
        try:
            parts = decode(key, _mapped(path))
        except FileNotFoundError:
            return None
        except ValueError:  # an empty file, or a pipe, cannot be mapped
            parts = None
        except OSError as error:
            self._report("read", error)
            return None
        if parts is None:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        return parts

    def put(self, key: str, parts: Parts) -> None:
        """Store an entry, then remove old entries if the cache exceeds its limit.

        Parameters
        ----------
        key : str
            Key of the entry.
        parts : mapping of str to array
            The features of one image by name, as in `Features.tensors`.
        """
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
            if self.strict:
                raise NotAvailableError(
                    f"Cannot write features into {self.folder}: {error.strerror or error}. Free "
                    "some space, or name another folder with --cache, and run the same command "
                    "again: it resumes where it stopped."
                ) from error
            self._writable = False
            self._report("write to", error)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that have no entry, and mark the entries of all others as just used.

        As long as their size is within `capacity`, entries that were just used are not removed to
        make room for new ones.

        Parameters
        ----------
        keys : iterable of str
            Keys of the entries.

        Returns
        -------
        list of str
            The keys without an entry, in their order.
        """
        absent = []
        for key in keys:
            try:
                os.utime(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                absent.append(key)
            except OSError:  # a read-only folder can still be read
                pass
        return absent

    @property
    def capacity(self) -> int:
        """Bytes that remain when old entries are removed: what one command can rely on."""
        return int(self.limit * KEEP)

    def info(self) -> CacheInfo:
        """Count the entries and their bytes on disk.

        Returns
        -------
        CacheInfo
        """
        files = list(self._files())
        return CacheInfo(self.folder, len(files), sum(file.bytes for file in files), self.limit)

    def clear(self) -> CacheInfo:
        """Remove all entries, and no other file in the folder.

        Returns
        -------
        CacheInfo
            The contents before.
        """
        before = self.info()
        try:
            for file in self._files():
                Path(file.path).unlink(missing_ok=True)
            self._remove_abandoned()
        except OSError as error:
            raise NotAvailableError(f"Cannot clear {self.folder}: {error.strerror}.") from error
        return before  # empty folders stay: another process may be about to write into them

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key[2:]}"  # a `Path` would take longer than reading

    def _make_folders(self, *folders: Path) -> None:
        if not self.folder.is_dir():
            # Features reveal something about the user's images.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in folders:
            if not folder.is_dir():  # faster than catching the error
                folder.mkdir(exist_ok=True)

    def _folders(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from (f for f in self.folder.iterdir() if _FOLDER_NAME.fullmatch(f.name))

    def _files(self) -> Iterator[_File]:
        """List the entries; some may disappear in the meantime."""
        for folder in self._folders():
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
                for file in files:
                    if _FILE_NAME.fullmatch(file.name):
                        with suppress(FileNotFoundError):
                            found = file.stat()
                            yield _File(found.st_mtime, _on_disk(found.st_size), file.path)

    def _remove_old(self) -> None:
        """Remove the least recently used entries if the cache exceeds its limit."""
        self._unseen = 0
        self._remove_abandoned()
        files = sorted(self._files())
        left = sum(file.bytes for file in files)
        if left <= self.limit:
            return
        for file in files:
            if left <= self.capacity:
                break
            Path(file.path).unlink(missing_ok=True)
            left -= file.bytes

    def _remove_abandoned(self) -> None:
        """Remove temporary files that killed processes left behind."""
        with suppress(FileNotFoundError):
            for path in (self.folder / _NEW).iterdir():
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > ABANDONED:
                        path.unlink()

    def _report(self, what: str, error: OSError) -> None:
        if self.folder not in _reported:
            _reported.add(self.folder)
            _log.warning(
                "Cannot %s the feature cache %s (%s); continuing without it. Set the environment "
                "variable MIV_CACHE to another folder, or to `off`.",
                what,
                self.folder,
                error.strerror or error,
            )


class _File(NamedTuple):
    used: float  # time of the last use
    bytes: int
    path: str


def _mapped(path: str) -> mmap.mmap:
    """Map a file into memory and record that it was used."""
    file = os.open(path, _OPEN)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if time.time() - found.st_mtime > FRESH:
            with suppress(OSError):  # a read-only folder can still be read
                os.utime(path)
        return mmap.mmap(file, 0, **_READ_ONLY)
    finally:
        os.close(file)


def _on_disk(size: int) -> int:
    return -(-size // DISK_BLOCK) * DISK_BLOCK


# Keys: the name of an entry is a hash of everything that its features depend on.


# Increase it when decoding, resizing or augmentation gives other pixels than before, or when the
# layout of an entry changes: older entries are then never found, and are eventually removed.
VERSION = 1
DEFAULT_TYPE = "float16"


def content_hash(image: bytes | Image.Image) -> str:
    """Hash the bytes of an image file, or the pixels of an image that is in memory.

    >>> red = Image.new("RGB", (2, 3), "red")
    >>> content_hash(red) == content_hash(red.copy()) != content_hash(red.rotate(90, expand=True))
    True
    """
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    head = f"{image.mode} {image.width} {image.height}:".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


class CacheKeys:
    """Keys of the features that one backbone extracts.

    The backbone's identity, the type that it rounds features to (its attribute `dtype`, if it has
    one) and, for a view, how it is made are part of the key.
    """

    def __init__(self, backbone: Backbone, how: Augmentation) -> None:
        kind = str(getattr(backbone, "dtype", DEFAULT_TYPE)).removeprefix("torch.")
        self._common = [VERSION, backbone.identity.key, kind]
        self._how = asdict(how)

    def key(self, content: str, seed: int | None) -> str:
        """Return the key of an image (by `content_hash`), or of its view with this seed."""
        view = "original" if seed is None else [seed, self._how]
        text = json.dumps([*self._common, content, view], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


# The file format of an entry: `mivcache`, CRC-32 of all that follows, length of the header, the
# header (JSON: name, type and shape of every part, padded to align the values), the values. The
# checksum also covers the key, so an entry under a wrong name counts as corrupted. Not safetensors,
# which has no checksum.


_MAGIC = b"mivcache"
_PREFIX = struct.Struct("<8sI")  # magic, checksum
_LENGTH = struct.Struct("<I")  # of the header
_ALIGN = 64


def encode(key: str, parts: Parts) -> bytes:
    """Pack the features of one image under a key.

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
    """Unpack an entry as views of `data` (bytes or a memory map); None if it is corrupted."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        return None
    magic, checksum = _PREFIX.unpack_from(view)
    body = view[_PREFIX.size :]
    if magic != _MAGIC or checksum != _checksum(key, body):
        return None
    # Data with the right checksum was written by `encode` and needs no further checks.
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    values = np.frombuffer(body[start:], np.uint8)
    return {
        name: values[place].view(kind).reshape(shape)
        for name, place, kind, shape in _read_header(bytes(body[_LENGTH.size : start]))
    }


def entry_size(parts: Parts) -> int:
    """Return how many bytes an entry with these features takes on disk."""
    return _on_disk(len(encode("", parts)))


@lru_cache(maxsize=64)  # all entries of a backbone have the same header
def _read_header(header: bytes) -> list[tuple[str, slice, str, tuple[int, ...]]]:
    """Return name, place among the values, type and shape of every part."""
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
