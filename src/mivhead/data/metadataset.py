"""Meta-Dataset's converted sets: `dataset_spec.json` and a `.tfrecords` file per class.

Classes are numbered through: first those of the training split, then validation, then test. Of
Omniglot it is the alphabets that are split, and the classes of an alphabet are neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mivhead.data.imageset import ImageSet, ImageSource
from mivhead.data.naming import normal
from mivhead.data.records import RecordImage, list_records
from mivhead.errors import InputError, check_one_of

SPECIFICATION = "dataset_spec.json"
SPLITS = ("train", "valid", "test")
_MAX_BYTES = 64 * 2**20
_POOL = "test"  # where a class has images for training and for testing


@dataclass(frozen=True)
class _RecordClass:
    """A class: its name, its file and how many images the specification promises."""

    name: str
    file: Path
    images: int


def is_records(path: Path) -> bool:
    """Tell whether a path is a folder of Meta-Dataset's records."""
    return (path / SPECIFICATION).is_file()


def open_records(folder: Path, *, split: str = "test", per_class: int | None = None) -> ImageSet:
    """Open the classes of one split of a converted set; no image is read yet.

    Parameters
    ----------
    folder
        Holds `dataset_spec.json` and the records.
    split
        `train`, `valid` or `test`.
    per_class
        Take the first so many images of a class only; by default all.

    Returns
    -------
    ImageSet
        In the order of class numbers and records. Omniglot's classes are named
        `alphabet.character`.
    """
    check_one_of("split", split, SPLITS)
    sources, labels = [], []
    names = set()
    for each in _classes(folder, _read_specification(folder), split):
        if each.name in names:
            raise InputError(f"{folder / SPECIFICATION} has two classes named {each.name!r}.")
        names.add(each.name)
        records = list_records(each.file)
        if len(records) != each.images:
            raise InputError(
                f"{each.file} holds {len(records):,} images, {SPECIFICATION} says {each.images:,}: "
                "convert or download the set again."
            )
        for number, record in enumerate(records[:per_class]):
            place = f"{each.file}, image {number}"
            sources.append(ImageSource(f"{each.name}/{number:05}", RecordImage(record), place))
            labels.append(each.name)
    if not sources:
        raise InputError(f"{folder} has no images in its {split} split.")
    return ImageSet(tuple(sources), tuple(labels))


def _read_specification(folder: Path) -> Mapping[str, Any]:
    path = folder / SPECIFICATION
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is larger than {_MAX_BYTES // 2**20} MiB.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {error}.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a specification of Meta-Dataset.")
    return document


def _classes(folder: Path, document: Mapping[str, Any], split: str) -> Iterator[_RecordClass]:
    """Yield the classes of a split; whatever is missing or of a wrong type is one error."""
    where = folder / SPECIFICATION
    try:
        pattern = document["file_pattern"]
        if "/" in pattern or "\\" in pattern or "{}" not in pattern:
            raise InputError(f"{where} has the file pattern {pattern!r}; expected {{}}.tfrecords.")
        for number, name in _names(document, split):
            images, file = document["images_per_class"][str(number)], str(number)
            if isinstance(images, dict):  # images for training and for testing in two files
                images, file = images[_POOL], f"{number}_{_POOL}"
            filled = pattern.replace("{}_{}", "{}").replace("{}", file)
            yield _RecordClass(normal(name), folder / filled, int(images))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{where} is not a specification of Meta-Dataset that is read here: "
            f"{type(error).__name__} {error}."
        ) from error


def _names(document: Mapping[str, Any], split: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each class of a split."""
    names = document["class_names"]
    if "superclasses_per_split" not in document:
        for number in _span(document["classes_per_split"], split):
            yield number, str(names[str(number)])
        return
    sizes = document["classes_per_superclass"]
    titles = document["superclass_names"]
    for group in _span(document["superclasses_per_split"], split):
        first = sum(sizes[str(before)] for before in range(group))
        title = str(titles[str(group)])
        for number in range(first, first + sizes[str(group)]):
            member = str(names[str(number)]).removeprefix(f"{title}-")
            yield number, f"{title.replace('.', '_')}.{member}"


def _span(counts: Mapping[str, int], split: str) -> range:
    """Return the numbers of a split, which follow those of the splits before it."""
    place = SPLITS.index(split)
    first = sum(counts[each.upper()] for each in SPLITS[:place])
    return range(first, first + counts[split.upper()])
