"""Three small data sets made of images that pip carries, for a benchmark without any download."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
