"""The feature cache: features of images and views on disk, each computed once.

The cache is a folder with one small file per image or augmented view. The name is a hash of all
that the features depend on (the image, the backbone, the augmentation), so nothing is ever stale.
Entries of labelled images also contain a small picture (`PICTURE`).

A file is written under a temporary name and then renamed, and never modified; a checksum detects
what a power failure leaves. Above a limit, the least recently used ones are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

import numpy as np
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mivhead._util.files import cache_folder
from mivhead.errors import InputError, NotAvailableError, reason_of

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.images.augmentation import Augmentation

Parts: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"  # such as `block0.map` and `block0.token`

PICTURE = "picture"  # name of the part that is not a feature: an encoded picture of the image
LIMIT = "MIV_CACHE_GB"  # the variable that sets the limit
DEFAULT_LIMIT = 10 * 10**9  # bytes: about 45,000 images with the default backbone
KEEP = 0.9  # fraction of the limit that remains after old entries have been removed
LOOK = 0.05  # fraction of the limit after which a writer checks what other processes have written
ABANDONED = 3600.0  # age in seconds at which a temporary file is considered abandoned
# Part of every key. Increase it when decoding, resizing or augmentation gives other pixels than
# before, or when the layout of an entry changes: older entries are then never found.
VERSION = 2

_NEW = "new"  # folder of temporary files
_ENTRY = re.compile("[0-9a-f]{2}/[0-9a-f]{62}")
# Do not block on a pipe that somebody put in place of an entry.
_OPEN = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_log = logging.getLogger(__name__)
_reported: set[Path] = set()  # folders whose problems were reported


def open_cache(folder: str | Path | None = None) -> FeatureCache | None:
    """Open the cache in a folder, by default the user's; None if the user has disabled it.

    The variable `MIV_CACHE` names the user's folder, or disables it.

    >>> open_cache("features").folder.name
    'features'
    """
    path = cache_folder() if folder is None else Path(folder).expanduser()
    if path is None:
        return None
    text = os.environ.get(LIMIT)
    try:
        limit = float(text) * 1e9 if text else DEFAULT_LIMIT
        if not 0 < limit < math.inf:
            raise ValueError
    except ValueError:
        raise InputError(f"{LIMIT} is {text!r}; expected a number of gigabytes, like 10.") from None
    return FeatureCache(path, int(limit))


@dataclass(frozen=True)
class CacheInfo:
    """Contents of a cache: its folder, the number and size of its entries, and the size limit."""

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
    limit : int, default=10 GB
        Bytes above which the least recently used entries are removed.
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
        self._writable = True
        self._unseen = limit * LOOK  # bytes written since the last check: the first write checks

    def get(self, key: str) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return an entry, or None if it is missing; a corrupted one is removed."""
        path = self._path(key)
        try:
            with open(os.open(path, _OPEN), "rb") as file:  # noqa: PTH123
                is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                parts = decode(key, file.read() if is_file else b"")
            with suppress(OSError):  # a read-only folder can still be read
                os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report("read", error)
            return None
        if parts is None:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        return parts

    def put(self, key: str, parts: Parts) -> None:
        """Store the features of one image, then remove old entries if there are too many."""
        if not self._writable:
            return
        data = encode(key, parts)
        path, temporary = Path(self._path(key)), self.folder / _NEW / uuid4().hex
        try:
            for folder in (self.folder, path.parent, temporary.parent):
                if not folder.is_dir():  # private: features reveal something about the images
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._unseen += len(data)
            if self._unseen > self.limit * LOOK:
                self._remove_old()
        except OSError as error:
            if self.strict:
                raise NotAvailableError(
                    f"Cannot write features into {self.folder}: {reason_of(error)}. Free "
                    "some space, or name another folder with --cache."
                ) from error
            self._writable = False
            self._report("write to", error)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that have no entry, and mark the others as used: not the next to go."""
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
        """Count the entries and their bytes."""
        sizes = [size for _, size, _ in self._files()]
        return CacheInfo(self.folder, len(sizes), sum(sizes), self.limit)

    def _path(self, key: str) -> str:
        return f"{self.folder}/{key[:2]}/{key[2:]}"  # a `Path` would take longer than reading

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """List the entries: time of the last use, bytes and path; some may disappear meanwhile."""
        for path in self.folder.glob("??/*"):
            if _ENTRY.fullmatch(f"{path.parent.name}/{path.name}"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime, status.st_size, path

    def _remove_old(self) -> None:
        """Remove the least recently used entries above the limit, and abandoned temporary files."""
        self._unseen = 0
        for temporary in (self.folder / _NEW).iterdir():
            with suppress(FileNotFoundError):
                if time.time() - temporary.stat().st_mtime > ABANDONED:
                    temporary.unlink()
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        if left > self.limit:
            for _, size, path in files:
                if left <= self.capacity:
                    break
                path.unlink(missing_ok=True)
                left -= size

    def _report(self, what: str, error: OSError) -> None:
        if self.folder not in _reported:
            _reported.add(self.folder)
            reason = reason_of(error)
            _log.warning(
                f"Cannot {what} the feature cache {self.folder} ({reason}); continuing without it. "
                "Set the environment variable MIV_CACHE to another folder, or to `off`."
            )


# An entry is a CRC-32 of its key and of all that follows, and a safetensors file.


def encode(key: str, parts: Parts) -> bytes:
    """Pack the features of one image under a key."""
    content = save(dict(parts))
    return _checksum(key, content) + content


def decode(key: str, data: bytes) -> dict[str, np.ndarray[Any, Any]] | None:
    """Unpack an entry; None if it is corrupted, or belongs to another key."""
    content = data[4:]
    if data[:4] == _checksum(key, content):
        with suppress(SafetensorError):  # no file at all, of the right checksum
            return load(content)
    return None


def _checksum(key: str, content: bytes) -> bytes:
    return zlib.crc32(content, zlib.crc32(key.encode())).to_bytes(4, "little")


def entry_size(parts: Parts) -> int:
    """Return how many bytes an entry with these features has."""
    return len(encode("", parts))


def content_hash(image: bytes | Image.Image) -> str:
    """Hash the bytes of an image file, or the pixels of an image that is in memory."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    head = f"{image.mode} {image.width} {image.height}:".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


class CacheKeys:
    """Keys of the features that one backbone extracts, and of views that are made in one way."""

    def __init__(self, backbone: Backbone, augmentation: Augmentation) -> None:
        kind = str(getattr(backbone, "dtype", "float16")).removeprefix("torch.")
        self._common = [VERSION, backbone.identity.key, kind]
        self._augmentation = asdict(augmentation)

    def key(self, content: str, seed: int | None) -> str:
        """Return the key of an image (by `content_hash`), or of its view with this seed."""
        view = "original" if seed is None else [seed, self._augmentation]
        text = json.dumps([*self._common, content, view], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
