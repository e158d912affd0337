"""Reading files and folders here, or anywhere that fsspec reaches: `s3://`, `gs://`, `hf://`.

Paths of this computer stay paths: fsspec is imported for addresses only.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, TypeVar, cast

from mivhead._util.optional import need
from mivhead._util.text import reason_of
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError, reading
from mivhead.images.decoding import read_capped, read_file
from mivhead.images.imageset import is_litter, natural_key

T = TypeVar("T")

_log = logging.getLogger(__name__)

EXTRA = "batch"
MAX_DEPTH = 64  # folders around an image, in a folder or a zip
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
    return reach(path, lambda: bool(fs.exists(inside)))


def is_folder(path: str) -> bool:
    """Return whether a path is a folder."""
    if not is_address(path):
        return Path(path).is_dir()
    fs, inside = file_system(path)
    return reach(path, lambda: bool(fs.isdir(inside)))


def stamp(path: str) -> str:
    """Return what changes when a file changes: its size, and its date or its entity tag."""
    if not is_address(path):
        with reading(path):
            found = Path(path).stat()
        if not S_ISREG(found.st_mode):
            raise InputError(f"{path} is not a regular file.")  # reading a pipe could block
        return f"{found.st_size} {found.st_mtime_ns}"
    fs, inside = file_system(path)
    fs.invalidate_cache(inside.rpartition("/")[0])
    info = reach(path, lambda: fs.info(inside))
    changing = ("ETag", "etag", "mtime", "LastModified", "updated", "created", "blob_id")
    dates = [str(info[key]) for key in changing if info.get(key)]
    return " ".join([str(info.get("size")), *dates[:1]])


def open_file(path: str) -> AbstractContextManager[IO[bytes]]:
    """Open a file for reading; it can be searched."""
    if not is_address(path):
        stamp(path)  # which must not be a pipe
    else:
        fs, inside = file_system(path)
        opened = reach(path, lambda: fs.open(inside, "rb"))
        return cast("AbstractContextManager[IO[bytes]]", opened)
    with reading(path):
        return Path(path).open("rb")


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
        return reach(path, read)
    except InputError as error:
        raise ImageError(str(error)) from error


def reach(path: str, action: Callable[[], T]) -> T:
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
                text = reason_of(error)
                raise NotAvailableError(
                    f"{path} cannot be reached: {text}. Check the address and your credentials."
                ) from error
            time.sleep(wait)
    raise AssertionError


def _is_transient(error: Exception) -> bool:
    """Return whether another attempt may help: missing credentials stay missing."""
    return "redential" not in f"{type(error).__name__} {error}"


def walk(root: str) -> Iterator[tuple[str, bool]]:
    """Yield the files and folders below a folder, and whether each is a folder.

    Paths are relative to `root`. A folder's files come first, in natural order, then its folders.
    Hidden ones are left out. Only the names of a few folders are in memory at a time.
    """
    if not is_address(root):
        yield from _walk(Path(root))
        return
    fs, top = file_system(root)
    waiting = [("", top)]
    while waiting:
        inside, place = waiting.pop()
        path = f"{root.rstrip('/')}/{inside}"
        check_depth(path, inside.count("/") + bool(inside))
        # Not `fs.walk`, which leaves out the folders that it fails to list.
        found: dict[str, dict[str, Any]] = {
            each["name"].rstrip("/").rpartition("/")[2]: each
            for each in reach(path, partial(fs.ls, place, detail=True))
            if each["name"].rstrip("/") != place.rstrip("/")  # some list the folder itself
        }
        names = sorted((name for name in found if name and not is_litter(name)), key=natural_key)
        folders = []
        for name in names:
            below = f"{inside}/{name}" if inside else name
            if found[name]["type"] == "directory":
                folders.append((below, found[name]["name"]))
            else:
                yield below, False
        yield from ((below, True) for below, _ in folders)
        waiting += reversed(folders)


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """Walk a folder of this computer.

    Links are followed after everything else, and every real folder is visited once, however many
    links lead to it: folders that link to each other would otherwise never end.
    """
    visited: set[tuple[int, int]] = set()
    links, repeated = deque([""]), []
    while links:
        stack = [links.popleft()]
        if _identity(root / stack[0]) in visited:
            repeated.append(stack[0])
            continue
        while stack:
            inside = stack.pop()
            folder = root / inside
            if _identity(folder) in visited:
                continue
            visited.add(_identity(folder))
            if inside:
                yield inside, True
            check_depth(folder, inside.count("/") + bool(inside))
            below: list[str] = []
            for name, is_folder, is_link in _entries(folder):
                path = f"{inside}/{name}" if inside else name
                if not is_folder:
                    yield path, False
                else:
                    (links if is_link else below).append(path)
            stack += reversed(below)
    if repeated:
        _log.warning(
            "Ignored %d links to folders that were already listed, such as %s.",
            len(repeated),
            root / repeated[0],
        )


def _entries(folder: Path) -> list[tuple[str, bool, bool]]:
    """Return what is in a folder: names, whether they are folders, and whether they are links."""
    with reading(f"The folder {folder}"), os.scandir(folder) as entries:
        found = [(e.name, e.is_dir(), e.is_symlink()) for e in entries if not is_litter(e.name)]
    return sorted(found, key=lambda entry: natural_key(entry[0]))


def _identity(folder: Path) -> tuple[int, int]:
    with reading(f"The folder {folder}"):
        found = folder.stat()
    return found.st_dev, found.st_ino


def check_depth(path: Path | str, depth: int) -> None:
    """Raise an error for a folder that is nested too deeply."""
    if depth > MAX_DEPTH:
        raise InputError(
            f"{path!s:.200} is nested deeper than {MAX_DEPTH} folders, the limit for images."
        )


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
        found = reach(pattern, lambda: fs.glob(inside))
        return [fs.unstrip_protocol(each) for each in sorted(found, key=natural_key)]
    return [pattern]
