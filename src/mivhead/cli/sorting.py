"""Images copied into folders by class, for `miv predict --sort-into`."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from PIL import Image

from mivhead.errors import NotAvailableError
from mivhead.images.imageset import numbered, safe_name

if TYPE_CHECKING:
    from mivhead.images.imageset import ImageSet, ImageSource


def sort_images(
    images: ImageSet, labels: Sequence[str], names: Sequence[str], folder: str | Path
) -> list[Path]:
    """Copy every image into a folder named after its label; nothing is overwritten or moved.

    Crops of boxes are written as PNG files.
    An image whose copy is already there, with the same name and content, is not copied again. Each
    of the names that may occur gets its own folder where it is needed, whichever characters it
    contains. Returns the new copies.
    """
    folder_of = _folders(names)
    copies: list[Path] = []
    for source, label in zip(images.sources, labels, strict=True):
        target = Path(folder) / folder_of[label]
        try:
            target.mkdir(parents=True, exist_ok=True)
            if (copy := _copy(source, target)) is not None:
                copies.append(copy)
        except OSError as error:
            raise NotAvailableError(
                f"Cannot copy {source.name} into {target}: {error.strerror or error}."
            ) from error
    return copies


def _folders(names: Sequence[str]) -> dict[str, str]:
    """Choose a distinct folder name for every class, regardless of upper and lower case."""
    taken: set[str] = set()
    folders = {}
    for name in names:
        folders[name] = next(c for c in numbered(safe_name(name)) if c.casefold() not in taken)
        taken.add(folders[name].casefold())
    return folders


def _copy(source: ImageSource, folder: Path) -> Path | None:
    """Copy an image; None if an identical copy is there."""
    original, own = source.get(), PurePosixPath(source.id).name
    if isinstance(original, Image.Image):  # a crop, which is not a file
        encoded = BytesIO()
        original.save(encoded, "PNG")
        original, own = encoded.getvalue(), f"{own}.png"
    for name in numbered(safe_name(own)):
        copy = folder / name
        try:
            file = copy.open("xb")  # fails if the file exists
        except FileExistsError:
            if _is_copy(original, copy):
                return None
            continue
        try:
            with file:
                _write(original, file)
            if isinstance(original, str | os.PathLike):
                shutil.copystat(original, copy)
        except BaseException:  # Ctrl-C too: leave no partial copies
            copy.unlink(missing_ok=True)
            raise
        return copy
    raise AssertionError("unreachable: numbers do not end")


def _is_copy(original: object, copy: Path) -> bool:
    """Return whether a file has the content of an image."""
    if not copy.is_file():
        return False
    if isinstance(original, str | os.PathLike):
        return filecmp.cmp(original, copy, shallow=False)
    return copy.stat().st_size == len(original) and copy.read_bytes() == original  # type: ignore[arg-type]  # bytes


def _write(original: object, file: IO[bytes]) -> None:
    if isinstance(original, str | os.PathLike):
        with Path(original).open("rb") as opened:
            shutil.copyfileobj(opened, file)
    elif isinstance(original, bytes):
        shutil.copyfileobj(BytesIO(original), file)
    else:
        raise TypeError(f"expected an image from a file or a zip archive, got {type(original)}")
