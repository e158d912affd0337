"""Files and folders on this computer, or anywhere that fsspec reaches: `s3://`, `gs://`, `hf://`.

Paths of this computer stay paths: fsspec is imported for addresses only.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from mivhead._util.files import replacing
from mivhead._util.optional import need
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError
from mivhead.images.decoding import read_capped, read_file
from mivhead.images.imageset import is_litter, natural_key

T = TypeVar("T")

EXTRA = "batch"
WAITS = (0.5, 2.0, 8.0)  # seconds before another attempt to read from a network
# What other attempts would not change.
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address rather than a path of this computer.

    >>> is_address("s3://bucket/photos"), is_address("photos/")
    (True, False)
    """
    return "://" in os.fspath(path)


def absolute(path: str) -> str:
    """Return a path that other processes and machines understand."""
    return path.rstrip("/") if is_address(path) else str(Path(path).absolute())


def plain(path: str) -> str:
    """Return the path of an address on this computer; other addresses and paths are unchanged.

    >>> plain("file:///data/new"), plain("s3://data/new")
    ('/data/new', 's3://data/new')
    """
    return path.removeprefix("file://").removeprefix("local://")


def file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it; an error names what is missing."""
    fsspec = need("fsspec", EXTRA)
    scheme = address.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise NotAvailableError(
            f"Addresses that start with {scheme}:// need another package: {error}."
        ) from error
    except ValueError as error:
        raise InputError(f"{address} cannot be opened: {error}.") from error
    return fs, path


def exists(path: str) -> bool:
    """Return whether there is a file or folder."""
    if not is_address(path):
        return Path(path).exists()
    fs, inside = file_system(path)
    return _reach(path, lambda: bool(fs.exists(inside)))


def is_folder(path: str) -> bool:
    """Return whether a path is a folder."""
    if not is_address(path):
        return Path(path).is_dir()
    fs, inside = file_system(path)
    return _reach(path, lambda: bool(fs.isdir(inside)))


def stamp(path: str) -> str:
    """Return what changes when a file changes: its size, and its date or its entity tag."""
    if not is_address(path):
        try:
            found = Path(path).stat()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error
        return f"{found.st_size} {found.st_mtime_ns}"
    fs, inside = file_system(path)
    fs.invalidate_cache(inside.rpartition("/")[0])
    info = _reach(path, lambda: fs.info(inside))
    changing = ("ETag", "etag", "mtime", "LastModified", "updated", "created", "blob_id")
    dates = [str(info[key]) for key in changing if info.get(key)]
    return " ".join([str(info.get("size")), *dates[:1]])


def open_file(path: str) -> AbstractContextManager[IO[bytes]]:
    """Open a file for reading; it can be searched."""
    if is_address(path):
        fs, inside = file_system(path)
        opened = _reach(path, lambda: fs.open(inside, "rb"))
        return cast("AbstractContextManager[IO[bytes]]", opened)
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def read_image(path: str, name: str) -> bytes:
    """Read an image file; raise an `ImageError` if it cannot be read, whenever it is tried.

    If a network fails several times, that is a `NotAvailableError`: the job stops, and can be
    resumed.
    """
    if not is_address(path):
        return read_file(Path(path), name)
    fs, inside = file_system(path)

    def read() -> bytes:
        with fs.open(inside, "rb") as file:
            return read_capped(file, name)

    try:
        return _reach(path, read)
    except InputError as error:
        raise ImageError(str(error)) from error


def _reach(path: str, action: Callable[[], T]) -> T:
    """Try an action over a network a few times."""
    for wait in (*WAITS, None):
        try:
            return action()
        except MivError:
            raise
        except FINAL as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "does not exist" if missing else "cannot be read"
            raise InputError(f"{path} {reason}.") from error
        # Every driver has exceptions of its own.
        except Exception as error:
            if wait is None or not _is_transient(error):
                text = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
                raise NotAvailableError(
                    f"{path} cannot be reached: {text}. Check the address and your credentials."
                ) from error
            time.sleep(wait)
    raise AssertionError


def _is_transient(error: Exception) -> bool:
    """Return whether another attempt may help: missing credentials stay missing."""
    return "redential" not in f"{type(error).__name__} {error}"


def walk(root: str) -> Iterator[str]:
    """Yield the files below a folder as paths relative to it, in natural order, folder by folder.

    Hidden files and folders are left out. Only the names of one folder are in memory at a time.
    """
    if is_address(root):
        fs, top = file_system(root)
        walker = fs.walk(top)
    else:
        top, fs, walker = root, None, os.walk(root, onerror=_refuse, followlinks=True)
    visited: set[tuple[int, int]] = set()
    for folder, folders, files in _entries(root, walker):
        if fs is None:  # links may lead in circles
            found = Path(folder).stat()
            if (found.st_dev, found.st_ino) in visited:
                folders.clear()
                continue
            visited.add((found.st_dev, found.st_ino))
            kept = [each for each in folders if not is_litter(each)]
            folders[:] = sorted(kept, key=natural_key)  # which `os.walk` follows
        inside = str(folder)[len(top.rstrip("/")) :].replace(os.sep, "/").strip("/")
        if any(map(is_litter, filter(None, inside.split("/")))):
            continue
        for name in sorted(files, key=natural_key):
            if name and not is_litter(name):
                yield f"{inside}/{name}" if inside else name


def _refuse(error: OSError) -> None:
    raise InputError(f"The folder {error.filename} cannot be read: {error.strerror}.")


def _entries(root: str, walker: Iterator[Any]) -> Iterator[tuple[str, Any, Any]]:
    if not is_address(root):
        yield from walker
        return
    while True:
        found = _reach(root, lambda: next(walker, None))
        if found is None:
            return
        yield found


def expand(pattern: str) -> list[str]:
    """Return the paths that a pattern stands for: braces, then `*`, `?` and `[...]`.

    >>> expand("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    head, brace, rest = pattern.partition("{")
    body, end, tail = rest.partition("}")
    if brace and end and (is_address(pattern) or not Path(pattern).exists()):
        first, dots, last = body.partition("..")
        if dots and first.isdecimal() and last.isdecimal():
            numbers = range(int(first), int(last) + 1)
            options = [f"{number:0{len(first)}d}" for number in numbers]
        else:
            options = body.split(",")
        return [path for each in options for path in expand(f"{head}{each}{tail}")]
    if is_address(pattern) and any(each in pattern for each in "*?["):
        fs, inside = file_system(pattern)
        found = _reach(pattern, lambda: fs.glob(inside))
        return [fs.unstrip_protocol(each) for each in sorted(found, key=natural_key)]
    return [pattern]


class Folder:
    """A folder of small files that are written as a whole, so that none is ever half there.

    Parameters
    ----------
    path : str
        A path of this computer, or an address.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._fs: Any = None
        self._made: set[str] = set()
        self._inside = self.path
        if is_address(path):
            self._fs, self._inside = file_system(self.path)

    def __truediv__(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        return exists(self / name)

    def names(self) -> list[str]:
        """Return the names of files and folders in it, sorted; empty if it does not exist."""
        if self._fs is None:
            folder = Path(self.path)
            return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        fs, inside = self._fs, self._inside
        if not exists(self.path):
            return []
        fs.invalidate_cache()
        listed = _reach(self.path, lambda: fs.ls(inside, detail=False))
        return sorted(filter(None, (each.rstrip("/").rpartition("/")[2] for each in listed)))

    def read(self, name: str) -> bytes:
        """Read a file."""
        with open_file(self / name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file; it appears when it is complete."""
        if self._fs is None:
            with replacing(self / name, make_folders=True) as part:
                part.write_bytes(data)
            return
        fs, path = self._fs, self._make(name)
        _reach(self / name, lambda: fs.pipe_file(path, data))

    def write_json(self, name: str, document: Any) -> None:
        """Write a JSON document."""
        self.write(name, json.dumps(document, indent=1).encode())

    def put(self, name: str, local: Path) -> None:
        """Write a file of this computer into the folder; it appears when it is complete."""
        if self._fs is None:
            with replacing(self / name) as part:
                shutil.move(local, part)
            return
        fs, path = self._fs, self._make(name)
        _reach(self / name, lambda: fs.put_file(str(local), path))

    def _make(self, name: str) -> str:
        """Create the folder of a file, where there are folders, and return the file's path."""
        path = f"{self._inside}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in self._made:
            _reach(self / name, lambda: self._fs.makedirs(folder, exist_ok=True))
            self._made.add(folder)
        return path

    def remove(self, *names: str) -> None:
        """Remove files."""
        for name in names:
            if self._fs is None:
                Path(self / name).unlink(missing_ok=True)
            elif self.exists(name):
                self._fs.rm(f"{self._inside}/{name}")

    def remove_all(self) -> None:
        """Remove the folder."""
        if self._fs is None:
            if Path(self.path).exists():
                shutil.rmtree(self.path)
        elif exists(self.path):
            self._fs.rm(self._inside, recursive=True)
