"""Downloads that are class folders already: only the right ones are copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from PIL import ImageOps

from mivhead.benchmark.prepare.items import Item, find_classes, list_folders, list_images
from mivhead.benchmark.prepare.splits import BIRDS, TEXTURES
from mivhead.data.images import load_image
from mivhead.errors import InputError


def birds(raw: Path) -> Iterator[Item]:
    """CUB-200-2011: whole photographs of the test classes."""
    return _copy(find_classes(raw, BIRDS[0], ["images"]), BIRDS)


def textures(raw: Path) -> Iterator[Item]:
    """DTD: the test classes."""
    return _copy(find_classes(raw, TEXTURES[0], ["images"]), TEXTURES)


def traffic_signs(raw: Path) -> Iterator[Item]:
    """GTSRB: all classes of the training images."""
    return _copy(find_classes(raw, "00000", ["Images"]))


def crop_disease(raw: Path) -> Iterator[Item]:
    """PlantVillage: all classes, training images in colour."""
    return _copy(find_classes(raw, "Apple___Apple_scab", ["train", "color"]))


def eurosat(raw: Path) -> Iterator[Item]:
    """EuroSAT in RGB: all classes."""
    return _copy(find_classes(raw, "AnnualCrop", ["2750", "EuroSAT_RGB"]))


def food(raw: Path) -> Iterator[Item]:
    """Food-101: all classes."""
    return _copy(find_classes(raw, "apple_pie", ["images"]))


def omniglot(raw: Path) -> Iterator[Item]:
    """Omniglot: the evaluation alphabets, white on black as in Meta-Dataset."""
    found = sorted(path for path in raw.rglob("images_evaluation") if path.is_dir())
    if not found:
        raise InputError(f"{raw} holds no folder images_evaluation: unpack that zip into it.")
    # The zip may unpack to a folder of its own name within a folder of its own name.
    for alphabet in list_folders(found[-1]):
        for character in list_folders(alphabet):
            for file in list_images(character):
                inverted = ImageOps.invert(load_image(file))
                yield Item(f"{alphabet.name}.{character.name}", file.stem, inverted)


def _copy(root: Path, classes: Iterable[str] | None = None) -> Iterator[Item]:
    folders = list_folders(root) if classes is None else [root / name for name in classes]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{root} lacks the class folder {folder.name}: unpack it again.")
        for file in list_images(folder):
            yield Item(folder.name, file.stem, file)
