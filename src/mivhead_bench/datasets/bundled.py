"""Small image sets made from images that scikit-learn ships, for use without any download."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from mivhead.images.example import enlarge_scan, load_scans

PER_CLASS = 20  # images
TILE = 140  # pixels: each class of photographs is one tile of a photograph
CROP = 100  # pixels: each image is a random crop of its tile
SEED = 0

LabelledPixels = tuple[str, NDArray[np.uint8]]


def write_bundled(folder: Path) -> Path:
    """Write the bundled sets as folders of class folders; existing sets are kept.

    Parameters
    ----------
    folder : Path
        Data folder; created if it does not exist.

    Returns
    -------
    Path
        The same folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in write_bundled(Path(folder)).iterdir())
    ['digits', 'photographs', 'turned_digits']
    """
    for name, images in _SETS.items():
        if (folder / name).exists():
            continue
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(mkdtemp(prefix=f".{name}-", dir=folder))
        try:
            for number, (label, pixels) in enumerate(images()):
                (unfinished / label).mkdir(exist_ok=True)
                Image.fromarray(pixels).save(unfinished / label / f"{number:04}.png")
            if not (folder / name).exists():
                unfinished.rename(folder / name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _digits(first: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield `PER_CLASS` images of each digit, starting from number `first`."""
    scans, labels = load_scans()
    for label in range(10):
        for row in np.flatnonzero(labels == label)[first : first + PER_CLASS]:
            yield label, np.asarray(enlarge_scan(scans[row]))


def _upright() -> Iterator[LabelledPixels]:
    for label, pixels in _digits(0):
        yield str(label), pixels


def _turned() -> Iterator[LabelledPixels]:
    """Yield other digits, turned by 90 degrees and light on dark."""
    for label, pixels in _digits(PER_CLASS):
        yield f"turned {label}", 255 - np.rot90(pixels)


def _photographs() -> Iterator[LabelledPixels]:
    """Yield crops of two photographs whose tiles are the classes."""
    rng = np.random.default_rng(SEED)
    for name, photo in zip(("temple", "flower"), load_sample_images().images, strict=True):
        height, width = photo.shape[:2]
        for top in range(0, height - TILE + 1, TILE):
            for left in range(0, width - TILE + 1, TILE):
                tile: NDArray[Any] = photo[top : top + TILE, left : left + TILE]
                for _ in range(PER_CLASS):
                    y, x = rng.integers(0, TILE - CROP, size=2)
                    yield f"{name} {top} {left}", tile[y : y + CROP, x : x + CROP]


_SETS: dict[str, Callable[[], Iterator[LabelledPixels]]] = {
    "digits": _upright,
    "turned_digits": _turned,
    "photographs": _photographs,
}
BUNDLED = tuple(_SETS)
