"""Small image sets made from images that scikit-learn ships, for use without any download."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.errors import NotAvailableError

PER_CLASS = 20  # images
SIDE = 64  # pixels of an enlarged digit
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


def load_scans() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Load handwritten digits, dark on light.

    Returns
    -------
    scans : array of shape (n, 10, 10)
        8 x 8 scans with a margin of one pixel.
    labels : array of shape (n,)
        The digits, 0 to 9.
    """
    package = find_spec("sklearn")  # only its file is read: importing it takes a second
    if package is None or package.origin is None:
        raise NotAvailableError(
            "The example images are part of scikit-learn, which is not installed: run "
            '`pip install "mivhead[demo]"`.'
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(path, np.int64, delimiter=",")  # 64 grey values from 0 to 16, and the digit
    ink = np.round(255 * (1 - rows[:, :-1].reshape(-1, 8, 8) / 16)).astype(np.uint8)
    return np.pad(ink, ((0, 0), (1, 1), (1, 1)), constant_values=255), rows[:, -1]


def enlarge_scan(scan: NDArray[np.uint8]) -> Image.Image:
    """Enlarge a scan of a digit to `SIDE` x `SIDE` pixels."""
    return Image.fromarray(scan).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


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


_SETS: dict[str, Callable[[], Iterator[LabelledPixels]]] = {
    "digits": _upright,
    "turned_digits": _turned,
    "photographs": _photographs,
}
BUNDLED = tuple(_SETS)
