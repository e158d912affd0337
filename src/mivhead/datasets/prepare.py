"""Make class folders from the download of a set, completely or not at all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mivhead.datasets.catalogue import find_declared, unknown_set
from mivhead.datasets.downloads import PREPARATIONS, SAMPLED, Item, Preparation
from mivhead.datasets.sets import resize
from mivhead.errors import InputError, NotAvailableError
from mivhead.images.decoding import load_image

JPEG_QUALITY = 95


def prepare_set(
    name: str,
    raw: str | Path,
    output: str | Path,
    advance: Callable[[int], Any] = lambda _: None,
    *,
    size: int | None = None,
    per_class: int | None = None,
) -> dict[str, int]:
    """Make class folders from the unpacked download of one of the paper's sets.

    Parameters
    ----------
    name : str
        Any name of the set (see `mivhead.datasets.catalogue.find_declared`).
    raw : str or Path
        Folder of the download; the files that are needed are found at any depth.
    output : str or Path
        Folder to create; it must not exist yet.
    advance : callable, optional
        Called with 1 after every image.
    size : int, optional
        Resize every image to `size` x `size` pixels (Lanczos), as the paper's authors did with
        MNIST and CIFAR (84). By default images keep their sizes, which is more accurate.
    per_class : int, optional
        For Quick Draw, the maximum number of images per class, 0 for all of them; by default 1,000.

    Returns
    -------
    dict of str to int
        Number of images per class.
    """
    declared, preparation = _find_preparation(name)
    settings = _sampling(declared, per_class)
    raw, output = Path(raw), Path(output)
    if not raw.is_dir():
        raise InputError(f"{raw} is not a folder: unpack the download and give its folder.")
    if output.exists():
        raise InputError(f"{output} already exists: remove it or choose another name.")
    part = output.with_name(f".{output.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        part.mkdir(parents=True)
        counts: Counter[str] = Counter()
        for item in preparation(raw, **settings):
            _write(item if size is None else _resized(item, size), part / _safe(item.label))
            counts[item.label] += 1
            advance(1)
        if not counts:
            raise InputError(f"{raw} does not contain images of {name}.")
        part.rename(output)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot prepare {output}: {error.filename or ''} {error.strerror or error}. "
            "Nothing was written; check permissions and free space."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return dict(sorted(counts.items()))


def _sampling(declared: str, per_class: int | None) -> dict[str, int | None]:
    """Return the arguments that limit the number of images of a set with very many."""
    if declared in SAMPLED:
        wanted = SAMPLED[declared] if per_class is None else per_class
        return {"per_class": wanted or None}
    if per_class is not None:
        raise InputError(
            f"{declared} is prepared completely; only {', '.join(SAMPLED)} can be limited."
        )
    return {}


def _resized(item: Item, size: int) -> Item:
    content = load_image(item.content) if isinstance(item.content, Path) else item.content
    return replace(item, content=resize(content, size))


def _find_preparation(name: str) -> tuple[str, Preparation]:
    info = find_declared(name)
    if info is None:
        raise InputError(
            f"{unknown_set(name)} Other sets need no preparation: put the images of each class "
            "into a folder named after the class."
        )
    return info.name, PREPARATIONS[info.name]


def _write(item: Item, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if isinstance(item.content, Path):
        shutil.copyfile(item.content, folder / f"{_safe(item.name)}{item.content.suffix}")
    elif item.photograph:
        item.content.save(folder / f"{_safe(item.name)}.jpg", quality=JPEG_QUALITY)
    else:
        item.content.save(folder / f"{_safe(item.name)}.png")


def _safe(name: str) -> str:
    """Replace characters that file names cannot contain, and a leading dot, which would hide it."""
    cleaned = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in name)
    return f"_{cleaned[1:]}" if cleaned.startswith(".") else cleaned
