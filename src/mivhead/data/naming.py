"""Which files are images, which are litter, and in what order names come."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePath

# The last line cannot be decoded here, but leaving such photos out silently would lose images.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
    *(".heic", ".heif", ".avif", ".jxl", ".jp2"),
)
_LITTER = ("thumbs.db", "desktop.ini", "__macosx")


def is_image_name(name: str) -> bool:
    """Tell by its suffix whether a file is meant to be an image.

    >>> is_image_name("a.JPG"), is_image_name("SOURCE.txt")
    (True, False)
    """
    return PurePath(name).suffix.lower() in IMAGE_SUFFIXES


def is_litter(name: str) -> bool:
    """Tell whether a file or folder is hidden or was left behind by an operating system.

    >>> is_litter(".DS_Store"), is_litter("Thumbs.db"), is_litter("cat.jpg")
    (True, True, False)
    """
    return name.startswith(".") or name.lower() in _LITTER


def normal(name: str) -> str:
    """Write a name in Unicode's composed form, in which equal names are equal strings."""
    return unicodedata.normalize("NFC", name)


def natural_key(path: str) -> tuple[object, ...]:
    """Sort key by path component, with numbers in a name compared as numbers.

    >>> sorted(["b/1.png", "a/10.png", "a/9.png"], key=natural_key)
    ['a/9.png', 'a/10.png', 'b/1.png']
    """
    parts = [re.split("([0-9]+)", part.casefold()) for part in path.split("/")]
    # Odd places hold the digits. The path itself decides between 1.png and 01.png.
    numbered = tuple(
        tuple(_number_key(text) if place % 2 else text for place, text in enumerate(part))
        for part in parts
    )
    return (numbered, path)


def _number_key(digits: str) -> tuple[int, str]:
    digits = digits.lstrip("0")  # the longer number is the larger one, however many digits it has
    return len(digits), digits
