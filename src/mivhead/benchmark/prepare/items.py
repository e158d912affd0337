"""What a preparation yields, and how it finds its way in a download."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mivhead.data.naming import is_image_name, is_litter, natural_key
from mivhead.errors import InputError


@dataclass(frozen=True)
class Item:
    """One image of the prepared set.

    Parameters
    ----------
    label
        Its class.
    name
        Of its file, without the ending.
    content
        A file to copy as it is, or a picture to save.
    photograph
        Whether a picture is saved as JPEG, like the photograph it was cut from; else as PNG.
    """

    label: str
    name: str
    content: Path | Image.Image
    photograph: bool = False


def find_file(raw: Path, *names: str) -> Path:
    """Find the file of one of these names in a download, at any depth."""
    for name in names:
        found = sorted(path for path in raw.rglob(name) if path.is_file())
        if found:
            return found[0]
    raise InputError(
        f"{raw} holds no file {names[0]}: give the folder of the unpacked download of this set."
    )


def find_classes(raw: Path, known: str, within: Iterable[str] = ()) -> Path:
    """Find the folder that holds class folders, by the name of one of them.

    Parameters
    ----------
    raw
        The download.
    known
        A class that is surely there.
    within
        Where there are several such folders, the one with this name is meant; the first that is
        found counts.
    """
    found = sorted({path.parent for path in raw.rglob(known) if path.is_dir()})
    if not found:
        raise InputError(
            f"{raw} holds no class folder {known}: give the folder of the unpacked download of "
            "this set."
        )
    for name in within:
        if named := [folder for folder in found if folder.name == name]:
            return named[0]
    if len(found) > 1:
        raise InputError(
            f"{raw} holds class folders in several places, such as {found[0]} and {found[1]}: "
            "give the one that is meant."
        )
    return found[0]


def list_images(folder: Path) -> list[Path]:
    """Return the images in a folder, in the natural order of names."""
    found = (path for path in folder.iterdir() if is_image_name(path.name))
    return sorted((path for path in found if not is_litter(path.name)), key=_key)


def list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, in the natural order of names."""
    found = (path for path in folder.iterdir() if path.is_dir() and not is_litter(path.name))
    return sorted(found, key=_key)


def _key(path: Path) -> tuple[object, ...]:
    return natural_key(path.name)
