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

from mivhead.errors import InputError, reading
from mivhead.images.decoding import ImageLike, load_image
from mivhead.images.imageset import ImageSet, is_litter, natural_key
from mivhead.images.sources import open_labelled
from mivhead_bench.datasets.catalogue import find_declared, paper_size
from mivhead_bench.datasets.records import SPECIFICATION, open_records


def find_sets(data: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of all sets in a data folder, in natural order, without opening them."""
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
        they are loaded, as the paper's authors did before everything else.

    Returns
    -------
    ImageSet
        With labels. Meta-Dataset's records give the classes of the test split only.
    """
    check_sets([name], data)
    folder = Path(data, name)
    if (folder / SPECIFICATION).is_file():
        images = open_records(folder)
    else:
        images = open_labelled(folder if folder.is_dir() else folder.with_name(f"{name}.zip"))
    size = paper_size(name) if paper_sizes else None
    if size is None:
        return images
    sources = tuple(replace(s, get=_Resized(s.get, s.name, size)) for s in images.sources)
    return replace(images, sources=sources)


@dataclass(frozen=True)
class _Resized:
    """Loads an image and resizes it to a square; the `get` of an `ImageSource`."""

    get: Callable[[], ImageLike]
    name: str
    size: int

    def __call__(self) -> Image.Image:
        image = load_image(self.get(), name=self.name)
        return image.resize((self.size, self.size), Image.Resampling.LANCZOS)


def check_sets(names: Iterable[str], data: str | os.PathLike[str]) -> None:
    """Raise an error if a data folder lacks one of these sets."""
    present = find_sets(data)
    for name in names:
        if name in present:
            continue
        if declared := find_declared(name):
            raise InputError(
                f"{data} has no set {name!r}: `miv bench data list {declared.name}` says how to "
                "get it."
            )
        near = difflib.get_close_matches(name, present, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(present) or 'none'}."
        raise InputError(f"{data} has no set {name!r}: {hint}")
