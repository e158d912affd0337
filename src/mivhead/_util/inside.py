"""Changes inside a folder that may come from a stranger, and nowhere else.

A folder can hold links to anywhere, and lists of moves that a stranger wrote. `Inside` names
everything by its path relative to the folder, refuses paths that lead out of it, and follows no
link on the way: each folder of a path is opened relative to the one above, which stays open, so
that nobody can replace it by a link in between. Windows cannot do that; there each folder is
checked first.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mivhead.errors import InputError

_RELATIVE = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | os.O_RDONLY
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_MODES = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


@dataclass(frozen=True)
class Inside:
    """A folder, and what may be done in it.

    Every method takes paths relative to the folder, with `/`. They raise an `OSError` for a path
    that passes through a link, and an `InputError` for one that is not relative.

    Examples
    --------
    >>> import tempfile
    >>> folder = Inside(Path(tempfile.mkdtemp()).resolve())
    >>> folder.make("robin/2026")
    >>> (folder.root / "away").symlink_to("/")
    >>> folder.exists("robin/2026"), folder.exists("away/etc")
    (True, False)
    >>> folder.move("robin", "away/robin")
    Traceback (most recent call last):
        ...
    OSError: [Errno ...] 'away' is a link, which is not followed
    >>> folder.delete("../..")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: '../..' is not a path inside the folder.
    """

    root: Path  # the folder, resolved

    def exists(self, path: str) -> bool:
        """Return whether there is something, be it a link; False beyond a link."""
        return self._stat(path) is not None

    def same(self, first: str, second: str) -> bool:
        """Return whether two paths name the same file, as on a disk that ignores case."""
        found = self._stat(first), self._stat(second)
        return None not in found and os.path.samestat(*found)  # type: ignore[arg-type]

    def make(self, path: str) -> None:
        """Make a folder, and those above it, unless they exist."""
        with self._folder(split_path(path), make=True):
            pass

    def move(self, source: str, target: str) -> None:
        """Move a file or folder; missing folders above the target are made."""
        with self._at(source) as (old, name), self._at(target, make=True) as (new, renamed):
            if stat.S_ISLNK(os.lstat(name, dir_fd=old).st_mode):
                raise _link(source)
            os.rename(name, renamed, src_dir_fd=old, dst_dir_fd=new)

    def delete(self, path: str) -> None:
        """Delete a file, a link, or a folder with all that is in it."""
        with self._at(path) as (handle, name):
            if stat.S_ISDIR(os.lstat(name, dir_fd=handle).st_mode):
                shutil.rmtree(name, dir_fd=handle)
            else:
                os.unlink(name, dir_fd=handle)

    def open(self, path: str, mode: str) -> IO[bytes]:
        """Open a regular file as `rb`, `r+b`, `wb` or `xb`."""
        with self._at(path) as (at, name):
            if not _RELATIVE and Path(name).is_symlink():
                raise _link(path)
            try:
                handle = os.open(name, _MODES[mode] | _FILE, 0o644, dir_fd=at)
            except OSError as error:
                raise (_link(path) if error.errno == errno.ELOOP else error) from error
        file = os.fdopen(handle, mode)
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # such as a pipe, which never ends
            file.close()
            raise OSError(errno.EINVAL, f"{path!r} is not a regular file")
        return file

    def names(self, path: str) -> list[str]:
        """Return the names in a folder."""
        with (
            self._folder(split_path(path), make=False) as (handle, place),
            os.scandir(place if handle is None else handle) as entries,
        ):
            return [each.name for each in entries]

    def check_plain(self, path: str = ".", besides: str = "") -> None:
        """Raise an error if there is anything but files and folders below a path.

        The contents of the folder `besides`, which must be a folder itself, are not looked at.
        """
        waiting = [path]
        while waiting:
            folder = waiting.pop()
            with os.scandir(self.root / folder) as entries:
                for each in entries:
                    inside = f"{folder}/{each.name}"
                    if each.is_dir(follow_symlinks=False):
                        waiting += [inside] if inside != besides else []
                    elif not each.is_file(follow_symlinks=False):
                        raise InputError(
                            f"{self.root / inside} is a link or a device, which could lead to "
                            "other files. If you trust the rest of the folder, delete it."
                        )

    def _stat(self, path: str) -> os.stat_result | None:
        with suppress(OSError), self._at(path) as (handle, name):
            return os.lstat(name, dir_fd=handle)
        return None

    @contextmanager
    def _at(self, path: str, *, make: bool = False) -> Iterator[tuple[int | None, str]]:
        """Open the folder above a path; yield its handle and the name, for `dir_fd`."""
        *above, name = split_path(path)
        with self._folder(above, make=make) as (handle, place):
            yield handle, place + name

    @contextmanager
    def _folder(self, names: list[str], *, make: bool) -> Iterator[tuple[int | None, str]]:
        """Open a folder; where that is impossible, yield what its path begins with instead."""
        if not _RELATIVE:
            yield None, f"{self._walk(names, make=make)}/"
            return
        handle = os.open(self.root, _FOLDER)
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=handle)
                try:
                    deeper = os.open(name, _FOLDER, dir_fd=handle)
                except NotADirectoryError as error:
                    is_link = stat.S_ISLNK(os.lstat(name, dir_fd=handle).st_mode)
                    raise (_link(name) if is_link else error) from error
                os.close(handle)
                handle = deeper
            yield handle, ""
        finally:
            os.close(handle)

    def _walk(self, names: list[str], *, make: bool) -> Path:
        place = self.root
        for name in names:
            place /= name
            if make:
                place.mkdir(exist_ok=True)
            if place.resolve() != place:  # a link, or a junction of Windows
                raise _link(name)
        return place


def split_path(path: str) -> list[str]:
    """Split a path into names, none of which leads out of a folder.

    >>> split_path("robin/1.jpg")
    ['robin', '1.jpg']
    >>> split_path("robin/../../1.jpg")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: 'robin/../../1.jpg' is not a path inside the folder.
    """
    names = path.split("/")
    try:
        os.fsencode(path)
    except ValueError:
        names = []
    forbidden = "\0\\:" if os.name == "nt" else "\0"
    if not names or any(n in ("", ".", "..") or set(n) & set(forbidden) for n in names):
        raise InputError(f"{path!r:.200} is not a path inside the folder.")
    return names


def _link(path: str) -> OSError:
    return OSError(errno.ELOOP, f"{path!r} is a link, which is not followed")
