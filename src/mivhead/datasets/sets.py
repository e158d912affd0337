"""Image sets in a data folder, found by name; and the 17 sets of the paper, declared.

A data folder holds one entry a set: a folder of class folders, a zip of one, or a folder of
Meta-Dataset's records. Its name is the set's name.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.datasets.catalogue import SETS, DataSet
from mivhead.errors import InputError
from mivhead.images.imageset import ImageSet, is_litter, natural_key
from mivhead.images.sources import open_labelled


def declared(name: str) -> DataSet | None:
    """Return what is declared of a set, by its name, the paper's title or a usual other name.

    >>> declared("Birds").name, declared("cub200_birds").name, declared("my_own_photos")
    ('cu_birds', 'cu_birds', None)
    """
    wanted = _simple(name)
    for each in SETS:
        if wanted in map(_simple, (each.name, each.title, *each.aliases)):
            return each
    return None


def find_sets(data: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of all sets in a data folder, without looking into them."""
    try:
        entries = [entry for entry in Path(data).iterdir() if not is_litter(entry.name)]
    except OSError as error:
        raise InputError(f"The data folder {data} cannot be read: {error.strerror}.") from error
    names = {
        entry.name if entry.is_dir() else entry.stem
        for entry in entries
        if entry.is_dir() or entry.suffix.lower() == ".zip"
    }
    return tuple(sorted(names, key=natural_key))


def open_set(name: str, data: str | os.PathLike[str]) -> ImageSet:
    """Open a set of a data folder; nothing is decoded yet.

    Parameters
    ----------
    name
        Of the set's folder, or of its zip without `.zip`.
    data
        The data folder.

    Returns
    -------
    ImageSet
        With labels. Of Meta-Dataset's records, the classes of the test split only.
    """
    found = find_sets(data)
    if name not in found:
        raise InputError(_not_found(name, data, found))
    folder = Path(data, name)
    return open_labelled(folder if folder.is_dir() else folder.with_name(f"{name}.zip"))


def groups_of(name: str, classes: Iterable[str]) -> dict[str, str]:
    """Return the group of each class; tasks of a set with groups stay within one.

    Only Omniglot has groups, its alphabets; a class is named `alphabet.character` there, with a
    dot or a slash.

    >>> groups_of("omniglot", ["Greek.character01", "Latin/character02"])
    {'Greek.character01': 'Greek', 'Latin/character02': 'Latin'}
    >>> groups_of("birds", ["robin", "wren"])
    {'robin': '', 'wren': ''}
    """
    info = declared(name)
    if info is None or not info.grouped:
        return dict.fromkeys(classes, "")
    groups = {each: re.split(r"[./]", each, maxsplit=1)[0] for each in classes}
    if whole := [each for each, group in groups.items() if each == group]:
        raise InputError(
            f"The class {whole[0]!r} of {name} names no alphabet; name the class folders "
            "alphabet.character, such as Greek.character01."
        )
    return groups


def _simple(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _not_found(name: str, data: str | os.PathLike[str], found: tuple[str, ...]) -> str:
    info = declared(name)
    if info is not None:
        return (
            f"{data} has no set {name!r}. `miv data list {info.name}` says how to get it; "
            f"put it into {data}/{name} or {data}/{name}.zip."
        )
    near = difflib.get_close_matches(name, found, n=1)
    if near:
        return f"{data} has no set {name!r}. Did you mean {near[0]!r}?"
    listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    return (
        f"{data} has no set {name!r}; it has {listed or 'no sets at all'}. A set is a folder of "
        "class folders or a zip of one."
    )


# Three small data sets made of images that pip carries, for a benchmark without any download.


PER_CLASS = 20  # images
SIDE = 64  # pixels of an enlarged digit
TILE = 140  # pixels: a class of photographs is a tile of one of them
CROP = 100  # pixels: an image is a random part of its tile
SEED = 0

Picture = tuple[str, NDArray[np.uint8]]  # class and pixels


def write_carried(folder: Path) -> Path:
    """Write the data sets as folders of class folders; sets that are there already stay.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in write_carried(Path(folder)).iterdir())
    ['digits', 'photographs', 'turned_digits']
    """
    for name, pictures in _SETS.items():
        if (folder / name).exists():
            continue
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(mkdtemp(prefix=f".{name}-", dir=folder))
        try:
            for number, (label, pixels) in enumerate(pictures()):
                (unfinished / label).mkdir(exist_ok=True)
                Image.fromarray(pixels).save(unfinished / label / f"{number:04}.png")
            if not (folder / name).exists():
                unfinished.rename(folder / name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _digits(first: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Handwritten digits, dark on light, `PER_CLASS` of each from number `first` on."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    ink = np.round(255 * (1 - scans.reshape(-1, 8, 8) / 16)).astype(np.uint8)
    ink = np.pad(ink, ((0, 0), (1, 1), (1, 1)), constant_values=255)
    for label in range(10):
        for row in np.flatnonzero(labels == label)[first : first + PER_CLASS]:
            large = Image.fromarray(ink[row]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            yield label, np.asarray(large)


def _upright() -> Iterator[Picture]:
    for label, pixels in _digits(0):
        yield str(label), pixels


def _turned() -> Iterator[Picture]:
    """Other digits, turned by 90 degrees and light on dark."""
    for label, pixels in _digits(PER_CLASS):
        yield f"turned {label}", 255 - np.rot90(pixels)


def _photographs() -> Iterator[Picture]:
    """Parts of two photographs: the tiles are the classes."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(SEED)
    for name, photo in zip(("temple", "flower"), load_sample_images().images, strict=True):
        height, width = photo.shape[:2]
        for top in range(0, height - TILE + 1, TILE):
            for left in range(0, width - TILE + 1, TILE):
                tile: NDArray[Any] = photo[top : top + TILE, left : left + TILE]
                for _ in range(PER_CLASS):
                    y, x = rng.integers(0, TILE - CROP, size=2)
                    yield f"{name} {top} {left}", tile[y : y + CROP, x : x + CROP]


_SETS: dict[str, Callable[[], Iterator[Picture]]] = {
    "digits": _upright,
    "turned_digits": _turned,
    "photographs": _photographs,
}
CARRIED = tuple(_SETS)
