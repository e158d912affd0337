"""Copy images into one folder per predicted class; nothing is ever overwritten or moved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from mivhead.errors import NotAvailableError

if TYPE_CHECKING:
    from mivhead.data.imageset import ImageSet, ImageSource

MAX_NAME_BYTES = 200  # file systems allow 255; some room for suffix and number
MAX_SUFFIX = 10
_FORBIDDEN = '/\\:*?"<>|'
# Devices on Windows, in any folder and with any suffix.
_RESERVED = {"con", "prn", "aux", "nul"} | {f"{p}{n}" for p in ("com", "lpt") for n in range(1, 10)}


def sort_images(
    images: ImageSet, labels: Sequence[str], names: Sequence[str], folder: str | Path
) -> list[Path]:
    """Copy every image into the folder of its label and return the copies.

    Parameters
    ----------
    images
        Files, or members of a zip.
    labels
        One per image.
    names
        All labels that may occur; each gets a folder of its own, whatever characters it holds.
    folder
        Where the folders of the classes are made, if they are needed.
    """
    folder_of = _folders(names)
    copies = []
    for source, label in zip(images.sources, labels, strict=True):
        target = Path(folder) / folder_of[label]
        try:
            target.mkdir(parents=True, exist_ok=True)
            copies.append(_copy(source, target))
        except OSError as error:
            raise NotAvailableError(
                f"Cannot copy {source.name} into {target}: {error.strerror or error}."
            ) from error
    return copies


def safe_name(name: str) -> str:
    """Make a name that every file system takes, and that stays inside its folder.

    >>> safe_name("cat.jpg"), safe_name("../etc"), safe_name("a/b: c?"), safe_name("NUL")
    ('cat.jpg', '_._etc', 'a_b_ c_', 'NUL_')
    """
    text = "".join("_" if c in _FORBIDDEN or not c.isprintable() else c for c in name)
    stem, suffix = os.path.splitext(text)  # noqa: PTH122  # a name, not a path
    if len(suffix) > MAX_SUFFIX:
        stem, suffix = text, ""
    while len(stem.encode()) > MAX_NAME_BYTES:
        stem = stem[:-1]
    text = (stem + suffix).rstrip(". ")
    if text.startswith("."):
        text = "_" + text[1:]
    if not text or text.partition(".")[0].casefold() in _RESERVED:
        text += "_"
    return text


def _folders(names: Sequence[str]) -> dict[str, str]:
    """Give every class a folder name; two names must not meet, not even in small letters."""
    taken: set[str] = set()
    folders = {}
    for name in names:
        folders[name] = next(c for c in _numbered(safe_name(name)) if c.casefold() not in taken)
        taken.add(folders[name].casefold())
    return folders


def _numbered(name: str) -> Iterator[str]:
    """Yield a name, then with numbers before its suffix: a.jpg, a (2).jpg, a (3).jpg."""
    yield name
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  # a name, not a path
    number = 2
    while True:
        yield f"{stem} ({number}){suffix}"
        number += 1


def _copy(source: ImageSource, folder: Path) -> Path:
    original = source.get()
    for name in _numbered(safe_name(PurePosixPath(source.id).name)):
        copy = folder / name
        try:
            file = copy.open("xb")  # fails if there is such a file
        except FileExistsError:
            continue
        try:
            with file:
                _write(original, file)
            if isinstance(original, str | os.PathLike):
                shutil.copystat(original, copy)
        except BaseException:  # Ctrl-C too: no half copies
            copy.unlink(missing_ok=True)
            raise
        return copy
    raise AssertionError("numbers do not end")


def _write(original: object, file: IO[bytes]) -> None:
    if isinstance(original, str | os.PathLike):
        with Path(original).open("rb") as opened:
            shutil.copyfileobj(opened, file)
    elif isinstance(original, bytes):
        shutil.copyfileobj(BytesIO(original), file)
    else:
        raise TypeError(f"an image from a file or a zip was expected, got {type(original)}")
