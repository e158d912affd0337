"""`ImageSet`: images in a fixed order, decoded one at a time on demand, and sorted into folders."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from io import BytesIO
from itertools import chain, count
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from PIL import Image

from mivhead.errors import ImageError, InputError, NotAvailableError, check_no_missing, reason_of
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
    ignored : tuple of str, default=()
        Files beside them that are not images in class folders.

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
    ignored: tuple[str, ...] = ()

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
        """Decode one image, to RGB."""
        return self.sources[row].load()

    def take(self, rows: Iterable[int]) -> ImageSet:
        """Return the images of these rows, in this order."""
        rows = list(rows)
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        return ImageSet(tuple(self.sources[row] for row in rows), labels)

    def without(self, skipped: Iterable[Skipped]) -> ImageSet:
        """Drop the images that could not be read; raise an error if a class becomes empty."""
        reasons = {image.id: image.reason for image in skipped}
        kept = self.take(row for row, name in enumerate(self.ids) if name not in reasons)
        if reasons and not kept.sources:
            raise InputError(f"None of the images can be read: {next(iter(reasons.values()))}")
        if lost := sorted(set(self.classes) - set(kept.classes)):
            name = self.ids[(self.labels or ()).index(lost[0])]
            raise InputError(f"The class {lost[0]!r} has no readable images: {reasons[name]}")
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
        raise InputError(f"All images have the label {named.classes[0]!r}: give 2 classes or more.")
    return named


def check_images(images: ImageSet) -> list[Skipped]:
    """Decode every image once and return those that cannot be read."""
    skipped = []
    for source in images.sources:
        try:
            source.load()
        except ImageError as error:
            skipped.append(Skipped(source.id, str(error)))
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
    """Return whether a file is an image, judging by its suffix."""
    return PurePath(name).suffix.lower() in IMAGE_SUFFIXES


def is_litter(name: str) -> bool:
    """Return whether a file or folder is hidden or was created by an operating system."""
    return name.startswith(".") or name.lower() in _LITTER


def check_names(names: Iterable[str]) -> None:
    """Raise an error for a name that cannot be written to a file as UTF-8."""
    for name in names:
        if name.encode(errors="ignore").decode() != name:
            raise InputError(f"The name {name!r} is not valid UTF-8: rename the file or folder.")


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


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Return a safe file name for each name; they differ, also where case does not matter."""
    chosen: dict[str, str] = {}
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        chosen[name] = free_name(safe_name(name), lambda text: text.casefold() in taken)
        taken.add(chosen[name].casefold())
    return chosen


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return a name, such as `a.jpg`, or the first of `a (2).jpg`, `a (3).jpg` that is not taken.

    >>> free_name("1.jpg", ["1.jpg", "1 (2).jpg"].__contains__)
    '1 (3).jpg'
    """
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  # a name, not a path
    others = (f"{stem} ({number}){suffix}" for number in count(2))
    return next(text for text in chain([name], others) if not is_taken(text))


def normal(name: str) -> str:
    """Return a name in Unicode's composed form, so that equal names are equal strings."""
    return unicodedata.normalize("NFC", name)


def natural_key(path: str) -> tuple[object, ...]:
    """Return a sort key that compares paths by component, and numbers in names as numbers.

    >>> sorted(["b/1.png", "a/10.png", "a/9.png"], key=natural_key)
    ['a/9.png', 'a/10.png', 'b/1.png']
    """

    def part_key(part: str) -> tuple[object, ...]:
        texts = re.split("([0-9]+)", part.casefold())  # digits are at odd places
        # The longer number is larger, and no number is too long to compare.
        digits = (text.lstrip("0") for text in texts[1::2])
        texts[1::2] = [(len(number), number) for number in digits]
        return tuple(texts)

    return tuple(map(part_key, path.split("/"))), path  # the path breaks the tie of 1 and 01


def sort_images(
    images: ImageSet, labels: Sequence[str], names: Sequence[str], folder: str | Path
) -> list[Path]:
    """Copy every image into a folder named after its label; nothing is overwritten or moved.

    `names` are the labels that may occur: each gets a folder of its own, whichever characters it
    contains. Returns the copies; an image whose copy is already there is not copied again.
    """
    folders, copies = safe_names(names), []
    for source, label in zip(images.sources, labels, strict=True):
        target = Path(folder) / folders[label]
        try:
            target.mkdir(parents=True, exist_ok=True)
            copies.append(_copy(source, target))
        except OSError as error:
            reason = reason_of(error)
            raise NotAvailableError(f"Cannot copy {source.name} to {target}: {reason}.") from error
    return [copy for copy in copies if copy is not None]


def _copy(source: ImageSource, folder: Path) -> Path | None:
    """Copy an image; None if an identical copy is there."""
    original, name = source.get(), PurePosixPath(source.id).name
    if isinstance(original, Image.Image):  # a crop, which is not a file
        encoded = BytesIO()
        original.save(encoded, "PNG")
        content, name = encoded.getvalue(), f"{name}.png"
    elif isinstance(original, bytes):  # in an archive
        content = original
    else:
        assert isinstance(original, str | os.PathLike), "images are sorted from files"
        content = Path(original).read_bytes()

    def is_there(name: str) -> bool:
        copy = folder / name
        return copy.is_file() and copy.read_bytes() == content

    copy = folder / free_name(
        safe_name(name), lambda text: (folder / text).exists() and not is_there(text)
    )
    if copy.exists():  # the same image
        return None
    with copy.open("xb") as file:  # fails if the file exists
        try:
            file.write(content)
            if isinstance(original, str | os.PathLike):
                shutil.copystat(original, copy)
        except BaseException:  # Ctrl-C too: leave no partial copies
            copy.unlink()
            raise
    return copy
