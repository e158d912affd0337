"""`ImageSet`: images in a fixed order, decoded one at a time on demand."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import PurePath
from typing import Any

from PIL import Image

from mivhead.errors import ImageError, InputError, check_no_missing
from mivhead.images.decoding import ImageLike, load_image, read_capped


@dataclass(frozen=True)
class ImageSource:
    """Where one image comes from."""

    id: str  # relative path with `/`, the same on every machine
    # Returns what `load_image` accepts: a path, the bytes of a zip member, or an array
    get: Callable[[], ImageLike]
    name: str  # its name in errors, so that a user can find it

    def load(self) -> Image.Image:
        """Decode the image."""
        return load_image(self.get(), name=self.name)


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True)
class ImageSet:
    """Images in a fixed order, with or without labels; an image is decoded when it is loaded.

    Parameters
    ----------
    sources : tuple of ImageSource
        Where the images come from.
    labels : tuple of str, optional
        One label per image.

    Examples
    --------
    >>> import numpy as np
    >>> pictures = from_images([np.zeros((2, 2), np.uint8)] * 3)
    >>> images = ImageSet(pictures.sources, ("cat", "dog", "cat"))
    >>> len(images), images.ids[0], images.classes, images.load(1).size
    (3, 'image 0', ('cat', 'dog'), (2, 2))
    """

    sources: tuple[ImageSource, ...]
    labels: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def ids(self) -> tuple[str, ...]:
        """The images' relative paths."""
        return tuple(source.id for source in self.sources)

    @property
    def classes(self) -> tuple[str, ...]:
        """The distinct labels, sorted."""
        return tuple(sorted(set(self.labels or ())))

    def load(self, row: int) -> Image.Image:
        """Decode one image.

        Parameters
        ----------
        row : int
            Row of the image.

        Returns
        -------
        PIL.Image.Image
            In RGB.
        """
        return self.sources[row].load()

    def take(self, rows: Iterable[int]) -> ImageSet:
        """Return the images of these rows, in this order.

        Parameters
        ----------
        rows : iterable of int
            The rows to keep.

        Returns
        -------
        ImageSet
        """
        rows = list(rows)
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        return ImageSet(tuple(self.sources[row] for row in rows), labels)

    def without(self, skipped: Iterable[Skipped]) -> ImageSet:
        """Drop the images that could not be read.

        Parameters
        ----------
        skipped : iterable of Skipped
            The unreadable images.

        Returns
        -------
        ImageSet

        Raises
        ------
        InputError
            If a class becomes empty.
        """
        reasons = {each.id: each.reason for each in skipped}
        kept = self.take(row for row, each in enumerate(self.ids) if each not in reasons)
        if reasons and not kept.sources:
            raise InputError(f"None of the images can be read: {next(iter(reasons.values()))}")
        if lost := sorted(set(self.classes) - set(kept.classes)):
            reason = next(
                reasons[each.id]
                for each, label in zip(self.sources, self.labels or (), strict=True)
                if label == lost[0]
            )
            raise InputError(f"The class {lost[0]!r} has no readable images: {reason}")
        return kept


def given(image: ImageLike) -> Callable[[], ImageLike]:
    """Return the `get` of a source whose image is a path or already in memory."""
    return lambda: image


def from_images(images: Iterable[ImageLike]) -> ImageSet:
    """Return a set of images in memory, of open files, or of paths."""
    sources = []
    for row, image in enumerate(images):
        name = os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {row}"
        get = given(image)
        if hasattr(image, "read"):  # an open file can be read only once
            get = cache(partial(read_capped, image, name))  # type: ignore[arg-type]
        sources.append(ImageSource(name, get, name))
    return ImageSet(tuple(sources))


def label_images(images: ImageSet, labels: Sequence[Any], *, min_classes: int = 2) -> ImageSet:
    """Return the set with labels; raise an error if there are too few classes."""
    if len(images) != len(labels):
        raise InputError(f"There are {len(images)} images, but {len(labels)} labels.")
    if not len(images) and min_classes:
        raise InputError("There are no images: give images of at least 2 classes.")
    check_no_missing("labels", labels)
    named = replace(images, labels=tuple(map(str, labels)))
    check_names(named.classes)
    if len(named.classes) < min_classes:
        raise InputError(
            f"All images have the label {named.classes[0]!r}; a classifier needs at least "
            "2 classes."
        )
    return named


def iter_images(
    images: ImageSet, skipped: list[Skipped] | None = None
) -> Iterator[tuple[int, Image.Image]]:
    """Decode the images one after the other and yield each with its row.

    An unreadable image raises an error, unless a list `skipped` is given: the image is then
    appended to it and dropped.
    """
    for row, source in enumerate(images.sources):
        try:
            image = source.load()
        except ImageError as error:
            if skipped is None:
                raise
            skipped.append(Skipped(source.id, str(error)))
        else:
            yield row, image


def check_images(images: ImageSet) -> list[Skipped]:
    """Decode every image once and return those that cannot be read."""
    skipped: list[Skipped] = []
    for _ in iter_images(images, skipped):
        pass
    return skipped


# Names of files: which are images, which are ignored, and how they are sorted.

# The formats of the last line cannot be decoded, but must not be dropped silently.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".heic", ".heif", ".avif"),
    *(".jxl", ".jp2"),
)
_LITTER = ("thumbs.db", "desktop.ini", "__macosx")
MAX_NAME_BYTES = 200  # file systems allow 255; this leaves room for suffix and number
MAX_SUFFIX = 10
_FORBIDDEN = '/\\:*?"<>|'
# Device names on Windows, in any folder and with any suffix.
_RESERVED = {"con", "prn", "aux", "nul"} | {f"{p}{n}" for p in ("com", "lpt") for n in range(1, 10)}


def is_image_name(name: str) -> bool:
    """Return whether a file is an image, judging by its suffix.

    >>> is_image_name("a.JPG"), is_image_name("SOURCE.txt")
    (True, False)
    """
    return PurePath(name).suffix.lower() in IMAGE_SUFFIXES


def is_litter(name: str) -> bool:
    """Return whether a file or folder is hidden or was created by an operating system.

    >>> is_litter(".DS_Store"), is_litter("Thumbs.db"), is_litter("cat.jpg")
    (True, True, False)
    """
    return name.startswith(".") or name.lower() in _LITTER


def check_names(names: Iterable[str]) -> None:
    r"""Raise an error for a name that cannot be written to a file as UTF-8.

    >>> check_names(["caf\udce9"])
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: The name 'caf\udce9' is not valid UTF-8: rename the file or folder.
    """
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"The name {name!r} is not valid UTF-8: rename the file or folder."
            ) from None


def safe_name(name: str) -> str:
    """Make a file name that every file system accepts and that stays inside its folder.

    >>> safe_name("cat.jpg"), safe_name("../etc"), safe_name("a/b: c?"), safe_name("NUL")
    ('cat.jpg', '_._etc', 'a_b_ c_', 'NUL_')
    """
    text = "".join("_" if c in _FORBIDDEN or not c.isprintable() else c for c in name)
    stem, suffix = os.path.splitext(text)  # noqa: PTH122  # a name, not a path
    if len(suffix) > MAX_SUFFIX:
        stem, suffix = text, ""
    stem = stem.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    text = (stem + suffix).rstrip(". ")
    if text.startswith("."):
        text = "_" + text[1:]
    if not text or text.partition(".")[0].casefold() in _RESERVED:
        text += "_"
    return text


def numbered(name: str) -> Iterator[str]:
    """Yield a name, then the name with numbers before its suffix, without an end.

    >>> from itertools import islice
    >>> list(islice(numbered("a.jpg"), 3))
    ['a.jpg', 'a (2).jpg', 'a (3).jpg']
    """
    yield name
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  # a name, not a path
    number = 2
    while True:
        yield f"{stem} ({number}){suffix}"
        number += 1


def normal(name: str) -> str:
    """Return a name in Unicode's composed form, so that equal names are equal strings."""
    return unicodedata.normalize("NFC", name)


def natural_key(path: str) -> tuple[object, ...]:
    """Return a sort key that compares paths by component, and numbers in names as numbers.

    Written here because the package `natsort` would be a dependency for these few lines.

    >>> sorted(["b/1.png", "a/10.png", "a/9.png"], key=natural_key)
    ['a/9.png', 'a/10.png', 'b/1.png']
    """
    parts = [re.split("([0-9]+)", part.casefold()) for part in path.split("/")]
    # Odd positions hold the digits. The path itself breaks the tie of 1.png and 01.png.
    numbered = tuple(
        tuple(_number_key(text) if place % 2 else text for place, text in enumerate(part))
        for part in parts
    )
    return (numbered, path)


def _number_key(digits: str) -> tuple[int, str]:
    digits = digits.lstrip("0")  # the longer number is larger, and no number is too long to compare
    return len(digits), digits
