"""Images for the demo: handwritten digits that scikit-learn carries, as folders of PNG files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = 64  # pixels of a side; the scans have 8
MARGIN = 1  # pixels of paper around a scan


@dataclass(frozen=True)
class DigitFolders:
    """Two folders with one folder per class: to learn from, and to predict."""

    shots: Path
    new: Path


def write_digits(
    folder: Path, names: Sequence[str], shots: int, new: int, seed: int
) -> DigitFolders:
    """Write so many digits per class, drawn at random; replaces what an earlier demo wrote."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    ink = np.round(255 * (1 - scans.reshape(-1, 8, 8) / 16)).astype(np.uint8)  # dark on light
    ink = np.pad(ink, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)), constant_values=255)
    generator = np.random.default_rng(seed)
    folders = DigitFolders(folder / "shots", folder / "new")
    for label, name in enumerate(names):
        rows = generator.permutation(np.flatnonzero(labels == label))[: shots + new]
        for target, chosen in ((folders.shots, rows[:shots]), (folders.new, rows[shots:])):
            shutil.rmtree(target / name, ignore_errors=True)
            (target / name).mkdir(parents=True)
            for number, row in enumerate(chosen, start=1):
                image = Image.fromarray(ink[row]).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
                image.save(target / name / f"{number}.png")
    return folders
