"""Files and folders here, or anywhere that fsspec reaches: `s3://`, `gs://`, `hf://`.

Drivers try again by themselves when a network fails. If it goes on failing, that is a
`NotAvailableError`: the job stops, and can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mivhead._util.files import replacing
from mivhead._util.imports import need
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError, reason_of
from mivhead.images.decoding import read_capped, read_file
from mivhead.images.imageset import is_litter, natural_key
from mivhead.images.sources import expand_pattern, walk

MISSING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# What file systems call the date or version of a file.
VERSIONS = ("ETag", "etag", "mtime", "LastModified", "updated", "created", "blob_id")


def is_url(path: str) -> bool:
    """Return whether a path is a URL rather than a path of this computer."""
    return "://" in path


def absolute(path: str) -> str:
    """Return a path that other processes and machines understand."""
    path = path.removeprefix("file://").removeprefix("local://")
    return path.rstrip("/") if is_url(path) else str(Path(path).absolute())


@contextmanager
def reach(path: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a path or URL, and the path in it; turn its errors into ours."""
    fsspec = need("fsspec")
    try:
        if is_url(path):
            yield fsspec.core.url_to_fs(path)
        else:
            yield fsspec.filesystem("file"), path
    except MivError:
        raise
    except MISSING as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}.") from error
    except Exception as error:  # every driver has its own
        raise NotAvailableError(f"{path} cannot be reached: {reason_of(error)}.") from error


def exists(path: str) -> bool:
    """Return whether there is a file or folder."""
    with reach(path) as (fs, inside):
        return bool(fs.exists(inside))


def is_folder(path: str) -> bool:
    """Return whether a path is a folder."""
    with reach(path) as (fs, inside):
        return bool(fs.isdir(inside))


def stamp(path: str) -> str:
    """Return what changes when a file changes: its size, and its date or version."""
    with reach(path) as (fs, inside):
        fs.invalidate_cache(inside.rpartition("/")[0])
        info = fs.info(inside)
    if info["type"] != "file":
        raise InputError(f"{path} is not a regular file.")  # reading a pipe could block
    return " ".join(str(info[key]) for key in ("size", *VERSIONS) if info.get(key))


def open_file(path: str) -> Any:
    """Open a file for reading, as a context; it can be searched."""
    stamp(path)
    with reach(path) as (fs, inside):
        return fs.open(inside, "rb")


def read_image(path: str, name: str) -> bytes:
    """Read an image file; raise an `ImageError` if it cannot be read, whenever it is tried."""
    if not is_url(path):
        return read_file(Path(path), name)
    try:
        with reach(path) as (fs, inside), fs.open(inside, "rb") as file:
            return read_capped(file, name)
    except InputError as error:
        raise ImageError(str(error)) from error


def list_files(root: str) -> Iterator[str]:
    """Yield the files below a folder in natural order; only the names of a few are in memory."""
    if not is_url(root):
        yield from (inside for inside, folder in walk(root) if not folder)
        return
    with reach(root) as (fs, top):
        top = top.rstrip("/")
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            # Not `fs.walk`, which leaves out the folders that it fails to list.
            kinds = {e["name"].rstrip("/"): e["type"] for e in fs.ls(folder, detail=True)}
            names = sorted(kinds.keys() - {folder}, key=natural_key)  # some list the folder itself
            names = [name for name in names if not is_litter(name.rpartition("/")[2])]
            yield from (name[len(top) + 1 :] for name in names if kinds[name] != "directory")
            waiting += [name for name in reversed(names) if kinds[name] == "directory"]


def expand(pattern: str) -> list[str]:
    """Return the paths or URLs that a pattern stands for: `*`, `?` and `[...]`."""
    pattern = pattern.removeprefix("file://").removeprefix("local://")
    if exists(pattern):
        return [pattern]
    if is_url(pattern):
        with reach(pattern) as (fs, inside):
            paths = [fs.unstrip_protocol(p) for p in sorted(fs.glob(inside), key=natural_key)]
    else:
        paths = [match.as_posix() for match in expand_pattern(Path(pattern))]
    if not paths:
        raise InputError(f"{pattern} does not exist.")
    return paths


def names_in(folder: str) -> list[str]:
    """Return the names of what is in a folder, sorted; none if it does not exist."""
    with reach(folder) as (fs, inside):
        fs.invalidate_cache()
        listed = fs.ls(inside, detail=False) if fs.exists(inside) else []
    return sorted(filter(None, (name.rstrip("/").rpartition("/")[2] for name in listed)))


@contextmanager
def writing(path: str) -> Iterator[Path]:
    """Yield a path of this computer, whose file appears under its name when it is complete."""
    if not is_url(path):
        with replacing(path, make_folders=True) as part:
            yield part
        return
    with TemporaryDirectory() as folder:
        part = Path(folder, "part.parquet")
        yield part
        with reach(path) as (fs, inside):
            fs.makedirs(inside.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(part), inside)


def remove(path: str) -> None:
    """Remove a file, or a folder with everything in it."""
    with reach(path) as (fs, inside):
        if fs.exists(inside):
            fs.rm(inside, recursive=True)
