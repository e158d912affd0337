"""Check a set of labelled images: sizes, unreadable files, duplicates, contradicting labels."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mivhead.errors import ImageError
from mivhead.images.decoding import load_image, read_file
from mivhead.images.imageset import ImageSet, ImageSource, Skipped


@dataclass(frozen=True)
class Duplicate:
    """Images with the same pixels."""

    ids: tuple[str, ...]  # ids of the images, in the order of the set
    labels: tuple[str, ...]  # their distinct classes; more than one is a contradiction
    same_files: bool  # whether the files are identical too, or only the decoded pixels


@dataclass(frozen=True)
class DataReport:
    """The result of `check_set`.

    Parameters
    ----------
    classes : dict of str to int
        Number of images per class, readable or not.
    sizes : tuple, optional
        The smallest, median and largest short side of the readable images, in pixels; None if
        there are none.
    most_common_size : tuple, optional
        Width, height, and the number of images that have this size; None if there are none.
    unreadable : tuple of Skipped
        Images that cannot be decoded, and the reasons.
    duplicates : tuple of Duplicate
        Groups of equal images, those across classes first.
    """

    classes: dict[str, int]
    sizes: tuple[int, float, int] | None
    most_common_size: tuple[int, int, int] | None
    unreadable: tuple[Skipped, ...]
    duplicates: tuple[Duplicate, ...]

    @property
    def images(self) -> int:
        """Number of images, readable or not."""
        return sum(self.classes.values())

    @property
    def contradictions(self) -> tuple[Duplicate, ...]:
        """Equal images in different classes."""
        return tuple(each for each in self.duplicates if len(each.labels) > 1)

    @property
    def good(self) -> bool:
        """Whether all images are readable and none is in two classes."""
        return not self.unreadable and not self.contradictions

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document.

        Returns
        -------
        dict
        """
        return {**asdict(self), "images": self.images, "good": self.good}


def check_set(images: ImageSet, advance: Callable[[int], Any] = lambda _: None) -> DataReport:
    """Decode every image of a labelled set once.

    Parameters
    ----------
    images : ImageSet
        Images with labels.
    advance : callable, optional
        Called with 1 after every image, such as a tqdm bar's `update`.

    Returns
    -------
    DataReport

    Examples
    --------
    >>> from mivhead.images.imageset import from_images
    >>> black, white = np.zeros((2, 3), np.uint8), np.full((2, 3), 255, np.uint8)
    >>> pictures = from_images([black, white, black])
    >>> report = check_set(ImageSet(pictures.sources, ("night", "day", "day")))
    >>> report.contradictions[0].ids, report.good
    (('image 0', 'image 2'), False)
    """
    labels = dict(zip(images.ids, images.labels or (), strict=True))
    unreadable, sizes = [], []
    files: dict[str, bytes] = {}
    pictures: defaultdict[bytes, list[str]] = defaultdict(list)
    for source in images.sources:
        try:
            files[source.id], picture = _load(source)
        except ImageError as error:
            unreadable.append(Skipped(source.id, str(error)))
        else:
            sizes.append(picture.size)
            pictures[_hash(f"{picture.size}".encode(), picture.tobytes())].append(source.id)
        advance(1)
    duplicates = [
        Duplicate(
            tuple(ids),
            tuple(sorted({labels[each] for each in ids})),
            len({files[each] for each in ids}) == 1,
        )
        for ids in pictures.values()
        if len(ids) > 1
    ]
    return DataReport(
        dict(sorted(Counter(labels.values()).items())),
        _short_sides(sizes),
        _most_common(sizes),
        tuple(unreadable),
        tuple(sorted(duplicates, key=lambda each: len(each.labels) == 1)),
    )


def _load(source: ImageSource) -> tuple[bytes, Image.Image]:
    """Return the hash of the file and the decoded picture."""
    content = source.get()
    if isinstance(content, str | os.PathLike):
        content = read_file(Path(content), source.name)
    picture = load_image(content, name=source.name)
    # An image that is not a file, such as an array, is compared by its pixels.
    return _hash(content if isinstance(content, bytes) else picture.tobytes()), picture


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _short_sides(sizes: list[tuple[int, int]]) -> tuple[int, float, int] | None:
    if not sizes:
        return None
    short = np.array(sizes).min(axis=1)  # (image)
    return int(short.min()), float(np.median(short)), int(short.max())


def _most_common(sizes: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    if not sizes:
        return None
    ((width, height), count) = Counter(sizes).most_common(1)[0]
    return width, height, count
