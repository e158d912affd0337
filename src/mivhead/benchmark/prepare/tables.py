"""Downloads of images and a table of their classes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from mivhead.benchmark.prepare.items import Item, find_file
from mivhead.benchmark.prepare.splits import FLOWERS
from mivhead.data.naming import is_image_name
from mivhead.errors import InputError

FINDINGS = (
    *("Atelectasis", "Cardiomegaly", "Effusion", "Infiltration"),
    *("Mass", "Nodule", "Pneumothorax"),
)


def isic(raw: Path) -> Iterator[Item]:
    """ISIC 2018, task 3: the class is the column of the ground truth that is 1."""
    table = find_file(raw, "ISIC2018_Task3_Training_GroundTruth.csv")
    files = _by_stem(raw)
    for row in _rows(table, "image"):
        name = row.pop("image")
        chosen = [column for column, value in row.items() if value in ("1", "1.0")]
        if len(chosen) != 1:
            raise InputError(f"{table} gives {name} {len(chosen)} classes, expected 1.")
        yield Item(chosen[0], name, _file(files, name, table))


def chest(raw: Path) -> Iterator[Item]:
    """ChestX-ray14: images with exactly one finding, out of seven."""
    table = find_file(raw, "Data_Entry_2017*.csv")
    files = _by_stem(raw)
    for row in _rows(table, "Image Index", "Finding Labels"):
        if row["Finding Labels"] in FINDINGS:
            name = Path(row["Image Index"]).stem
            yield Item(row["Finding Labels"], name, _file(files, name, table))


def flowers(raw: Path) -> Iterator[Item]:
    """102 Category Flower Dataset: the test classes; image 1 has the first label, and so on."""
    from scipy.io import loadmat

    table = find_file(raw, "imagelabels.mat")
    try:
        labels = [int(label) for label in loadmat(table)["labels"].ravel()]
    # Damaged files make scipy's reader raise almost anything, and only it runs in this block.
    except Exception as error:
        raise InputError(f"{table} cannot be read: {error!r}.") from error
    files = _by_stem(raw)
    for number, label in enumerate(labels, start=1):
        if label in FLOWERS:
            name = f"image_{number:05}"
            yield Item(f"{label:03}.{FLOWERS[label]}", name, _file(files, name, table))


def _rows(table: Path, *columns: str) -> Iterator[dict[str, str]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if missing := sorted(set(columns) - set(reader.fieldnames or ())):
                raise InputError(f"{table} has no column {missing[0]!r}.")
            yield from reader
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{table} cannot be read: {error}.") from error


def _by_stem(raw: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(raw.rglob("*")) if is_image_name(path.name)}


def _file(files: dict[str, Path], name: str, table: Path) -> Path:
    if name not in files:
        raise InputError(f"The image {name} of {table} is missing: unpack all images beside it.")
    return files[name]
