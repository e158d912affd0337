"""Make class folders from the download of a set, completely or not at all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mivhead.errors import InputError, NotAvailableError, reason_of
from mivhead_bench.datasets.catalogue import get_declared
from mivhead_bench.datasets.downloads import PER_CLASS, Item, read_download

JPEG_QUALITY = 95


def prepare_set(
    name: str,
    raw: str | Path,
    output: str | Path,
    advance: Callable[[int], Any] = lambda _: None,
    *,
    per_class: int = PER_CLASS,
) -> dict[str, int]:
    """Make class folders from the unpacked download of a declared set.

    Parameters
    ----------
    name : str
        Any name of the set (see `find_declared`).
    raw : str or Path
        Folder of the download; the files that are needed are found at any depth.
    output : str or Path
        Folder to create; it must not exist yet.
    advance : callable, optional
        Called with 1 after every image.
    per_class : int, default=1000
        For Quick Draw, the maximum number of images per class, 0 for all of them.

    Returns
    -------
    dict of str to int
        Number of images per class.
    """
    declared = get_declared(name)
    raw, output = Path(raw), Path(output)
    if not raw.is_dir():
        raise InputError(f"{raw} is not a folder: unpack the download and give its folder.")
    if output.exists():
        raise InputError(f"{output} already exists: remove it or choose another name.")
    part = output.with_name(f".{output.name}.part")
    counts: Counter[str] = Counter()
    try:
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        part.mkdir(parents=True)
        for item in read_download(declared, raw, per_class):
            _write(item, part / _safe(item.label))
            counts[item.label] += 1
            advance(1)
        if not counts:
            raise InputError(f"{raw} does not contain images of {name}.")
        part.rename(output)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot prepare {output}: {error.filename or ''} {reason_of(error)}. "
            "Nothing was written; check permissions and free space."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return dict(sorted(counts.items()))


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
