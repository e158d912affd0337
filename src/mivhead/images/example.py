"""Example images: the handwritten digits that scikit-learn ships."""

from __future__ import annotations

from importlib.metadata import distribution

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 64  # pixels of an enlarged digit


def load_scans() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Load scans of 10 x 10 pixels, dark on light with a margin of one pixel, and their digits."""
    # Of scikit-learn only this file is read: importing it takes a second. Its rows are 64 grey
    # values from 0 to 16, and the digit.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(path), np.int64, delimiter=",")
    ink = np.round(255 * (1 - rows[:, :-1].reshape(-1, 8, 8) / 16)).astype(np.uint8)
    return np.pad(ink, ((0, 0), (1, 1), (1, 1)), constant_values=255), rows[:, -1]


def enlarge_scan(scan: NDArray[np.uint8]) -> Image.Image:
    """Enlarge a scan of a digit to `SIDE` x `SIDE` pixels."""
    return Image.fromarray(scan).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
