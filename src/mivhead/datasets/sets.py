"""Find and open the image sets of a data folder by name.

A data folder holds one entry per set: a folder of class folders, a zip of one, or a folder of
Meta-Dataset's records. The name of the entry is the name of the set.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from mivhead.datasets.catalogue import find_declared, paper_size
from mivhead.errors import InputError, reading
from mivhead.images.decoding import ImageLike, load_image
from mivhead.images.imageset import ImageSet, is_litter, natural_key
from mivhead.images.sources import open_labelled


def find_sets(data: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of all sets in a data folder without opening them.

    Parameters
    ----------
    data : str or path-like
        The data folder.

    Returns
    -------
    tuple of str
        In natural order.
    """
    with reading(f"The data folder {data}"):
        entries = [entry for entry in Path(data).iterdir() if not is_litter(entry.name)]
    names = {
        entry.name if entry.is_dir() else entry.stem
        for entry in entries
        if entry.is_dir() or entry.suffix.lower() == ".zip"
    }
    return tuple(sorted(names, key=natural_key))


def open_set(name: str, data: str | os.PathLike[str], *, paper_sizes: bool = False) -> ImageSet:
    """Open a set of a data folder; no image is decoded yet.

    Parameters
    ----------
    name : str
        Name of the set's folder, or of its zip without `.zip`.
    data : str or path-like
        The data folder.
    paper_sizes : bool, default=False
        Whether images of MNIST, CIFAR-10 and CIFAR-100 are resized to 84 x 84 pixels (Lanczos) when
        they are loaded, as the paper's authors did before everything else. Images that already have
        this size, such as those of `miv data prepare --size 84`, stay as they are.

    Returns
    -------
    ImageSet
        With labels. Meta-Dataset's records give the classes of the test split only.
    """
    check_sets([name], data)
    folder = Path(data, name)
    images = open_labelled(folder if folder.is_dir() else folder.with_name(f"{name}.zip"))
    size = paper_size(name) if paper_sizes else None
    if size is None:
        return images
    sources = tuple(replace(s, get=_Resized(s.get, s.name, size)) for s in images.sources)
    return replace(images, sources=sources)


def resize(image: Image.Image, size: int) -> Image.Image:
    """Resize an image to a square as the paper's authors did (Lanczos)."""
    return image.resize((size, size), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class _Resized:
    """Loads an image and resizes it; the `get` of an `ImageSource`."""

    get: Callable[[], ImageLike]
    name: str
    size: int

    def __call__(self) -> Image.Image:
        return resize(load_image(self.get(), name=self.name), self.size)


def check_sets(names: Iterable[str], data: str | os.PathLike[str]) -> None:
    """Raise an error if a data folder lacks one of these sets."""
    found = find_sets(data)
    for name in names:
        if name not in found:
            raise InputError(_not_found(name, data, found))


def _not_found(name: str, data: str | os.PathLike[str], found: tuple[str, ...]) -> str:
    info = find_declared(name)
    if info is not None:
        return (
            f"{data} has no set {name!r}. `miv data list {info.name}` explains how to get it; "
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
