"""Run a preparation and write its folder, whole or not at all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mivhead.datasets import downloads as bitmaps
from mivhead.datasets import downloads as boxes
from mivhead.datasets import downloads as folders
from mivhead.datasets import downloads as tables
from mivhead.datasets.downloads import Item
from mivhead.datasets.sets import declared
from mivhead.errors import InputError, NotAvailableError

JPEG_QUALITY = 95

PREPARATIONS: Mapping[str, Callable[[Path], Iterator[Item]]] = MappingProxyType(
    {
        "omniglot": folders.omniglot,
        "cu_birds": folders.birds,
        "dtd": folders.textures,
        "vgg_flower": tables.flowers,
        "traffic_sign": folders.traffic_signs,
        "mscoco": boxes.mscoco,
        "aircraft": boxes.aircraft,
        "quickdraw": bitmaps.quickdraw,
        "mnist": bitmaps.mnist,
        "cifar10": bitmaps.cifar10,
        "cifar100": bitmaps.cifar100,
        "CropDisease": folders.crop_disease,
        "EuroSAT": folders.eurosat,
        "ISIC": tables.isic,
        "ChestX": tables.chest,
        "Food101": folders.food,
    }
)


def prepare_set(
    name: str,
    raw: str | Path,
    output: str | Path,
    advance: Callable[[int], Any] = lambda _: None,
) -> dict[str, int]:
    """Make class folders from the unpacked download of one of the paper's sets.

    Parameters
    ----------
    name
        Of the set, as in `PREPARATIONS`.
    raw
        Folder of the download; what is needed is found at any depth.
    output
        Folder to make; it must not exist yet.
    advance
        Called with 1 after every image.

    Returns
    -------
    dict
        Images of each class that was written.
    """
    preparation = _find_preparation(name)
    raw, output = Path(raw), Path(output)
    if not raw.is_dir():
        raise InputError(f"{raw} is not a folder: unpack the download, and give its folder.")
    if output.exists():
        raise InputError(f"{output} exists already: remove it, or choose another name.")
    part = output.with_name(f".{output.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir(parents=True)
        counts: Counter[str] = Counter()
        for item in preparation(raw):
            _write(item, part / _safe(item.label))
            counts[item.label] += 1
            advance(1)
        if not counts:
            raise InputError(f"{raw} holds no images of {name}.")
        part.rename(output)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot prepare {output}: {error.filename or ''} {error.strerror or error}. "
            "Nothing was written; check access and space."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return dict(sorted(counts.items()))


def _find_preparation(name: str) -> Callable[[Path], Iterator[Item]]:
    info = declared(name)
    if info is None:
        raise InputError(
            f"{name!r} is none of the paper's sets; `miv data list` shows them. Other sets need "
            "no preparation: put each class's images into a folder named after it."
        )
    if info.name not in PREPARATIONS:
        raise InputError(
            f"{info.name} is prepared by Meta-Dataset's own converter, whose records are read as "
            f"they are: put its folder {info.name}, with dataset_spec.json, into the data folder."
        )
    return PREPARATIONS[info.name]


def _write(item: Item, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if isinstance(item.content, Path):
        shutil.copyfile(item.content, folder / f"{_safe(item.name)}{item.content.suffix}")
    elif item.photograph:
        item.content.save(folder / f"{_safe(item.name)}.jpg", quality=JPEG_QUALITY)
    else:
        item.content.save(folder / f"{_safe(item.name)}.png")


def _safe(name: str) -> str:
    """Replace what no file name can hold, and a dot at the beginning, which would hide it."""
    cleaned = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in name)
    return f"_{cleaned[1:]}" if cleaned.startswith(".") else cleaned


# Raw downloads of the paper's sets to folders of class folders, one module a kind of download.


__all__ = ["PREPARATIONS", "prepare_set"]
