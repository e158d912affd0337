"""The bank: features of images and of their augmented views, extracted once, mapped from disk.

A bank is a folder of segments. A segment is a folder with one `.npy` file per part of the features
(`block0.map.npy`, `block0.token.npy`, ...), a row per picture, and `index.json`, which names the
rows. It is written under another name and renamed when it is complete: a kill loses the segment in
work, and nobody ever reads half of one. A row's name is a hash of all that its features depend on
(`mivhead.extraction.cache`), so that nothing in a bank is ever stale.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from mivhead._schema import from_json, to_json
from mivhead.errors import InputError, NotAvailableError
from mivhead.features import Features

INDEX = "index.json"
_NEW = "new-"  # how the folder of an unfinished segment begins

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Index:
    """What a segment holds.

    Parameters
    ----------
    keys
        Names of the rows.
    parts
        Names of the arrays.
    seconds
        The backbone took for one picture, in one thread, without decoding and augmentation.
    """

    keys: tuple[str, ...]
    parts: tuple[str, ...]
    seconds: float


class Bank:
    """Features by key, from all finished segments of a folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_segment(folder, ["a", "b"], Features(np.eye(2, dtype=np.float16)), 0.02)
    ...     bank = Bank(folder)
    ...     print(bank.take(["b", "a", "b"]).blocks[0].token.tolist(), "c" in bank)
    [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]] False
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._segments: dict[str, tuple[Index, dict[str, Array]]] = {}
        self._places: dict[str, tuple[str, int]] = {}  # key to segment and row
        self.refresh()

    def refresh(self) -> None:
        """Look for segments that were finished in the meantime."""
        for path in sorted(self.folder.glob("segment-*")):
            if path.name not in self._segments:
                index, arrays = _open_segment(path)
                self._segments[path.name] = (index, arrays)
                for row, key in enumerate(index.keys):
                    self._places.setdefault(key, (path.name, row))

    def __contains__(self, key: str) -> bool:
        return key in self._places

    @property
    def seconds(self) -> float:
        """What the backbone took for one picture: the median of the segments."""
        rates = [index.seconds for index, _ in self._segments.values()]
        return float(np.median(rates)) if rates else 0.0

    @property
    def nbytes(self) -> int:
        """Size of all features."""
        return sum(a.nbytes for _, arrays in self._segments.values() for a in arrays.values())

    def take(self, keys: Sequence[str]) -> Features:
        """Features of these rows, in this order, copied to memory."""
        if any(key not in self._places for key in keys):
            self.refresh()
        lost = sum(key not in self._places for key in keys)
        if lost or not keys:
            raise NotAvailableError(
                f"The bank {self.folder} lacks features of {lost} pictures that were there "
                "before: run the same command again, and they are extracted anew."
            )
        rows: dict[str, tuple[list[int], list[int]]] = {}  # segment to places out and rows in
        for place, key in enumerate(keys):
            segment, row = self._places[key]
            places, inside = rows.setdefault(segment, ([], []))
            places.append(place)
            inside.append(row)
        out: dict[str, Array] = {}
        for segment, (places, inside) in rows.items():
            for part, array in self._segments[segment][1].items():
                if part not in out:
                    out[part] = np.empty((len(keys), *array.shape[1:]), array.dtype)
                out[part][places] = array[inside]
        return Features.from_tensors({part: torch.from_numpy(a) for part, a in out.items()})

    def drop(self) -> None:
        """Remove the segments, and what killed runs left behind; nothing else in the folder."""
        self._segments.clear()
        self._places.clear()
        for pattern in ("segment-*", f"{_NEW}*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


def write_segment(
    folder: str | Path, keys: Sequence[str], features: Features, seconds: float
) -> None:
    """Add a segment, whole or not at all; the same keys give the same name."""
    folder = Path(folder)
    name = hashlib.sha256(json.dumps(list(keys)).encode()).hexdigest()[:16]
    unfinished, finished = folder / f"{_NEW}{uuid4().hex}", folder / f"segment-{name}"
    tensors = features.tensors
    try:
        # What is in here tells something of the user's images.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.mkdir()
        for part, tensor in tensors.items():
            with (unfinished / f"{part}.npy").open("wb") as file:
                np.save(file, tensor.numpy(), allow_pickle=False)
                os.fsync(file.fileno())
        index = Index(tuple(keys), tuple(tensors), seconds)
        (unfinished / INDEX).write_text(json.dumps(to_json(index)), encoding="utf-8")
        if not finished.exists():
            unfinished.rename(finished)
    except OSError as error:
        if finished.exists():  # another process was faster
            return
        raise NotAvailableError(
            f"Cannot write features into {folder}: {error.strerror or error}. Free some space, or "
            "name another folder with --bank, and run the same command again: it goes on where "
            "it was."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _open_segment(path: Path) -> tuple[Index, dict[str, Array]]:
    try:
        document = json.loads((path / INDEX).read_text(encoding="utf-8"))
        index = from_json(Index, document, str(path / INDEX))
        arrays = {
            part: np.load(path / f"{part}.npy", mmap_mode="r", allow_pickle=False)
            for part in index.parts
        }
        if any(len(array) != len(index.keys) for array in arrays.values()):
            raise ValueError("the number of rows does not fit the index")
    except (OSError, ValueError) as error:
        raise InputError(
            f"The bank's segment {path} is damaged ({error}): remove that folder, and its features "
            "are extracted anew."
        ) from error
    return index, arrays
