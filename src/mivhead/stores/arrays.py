"""Files of features: `.safetensors` as mivhead writes it, and NumPy's `.npz` and `.npy`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mivhead.errors import InputError, check_file, check_one_of, reading
from mivhead.features import Features, FeatureTable
from mivhead.stores.base import BATCH, Array, Store, check_ratio

IDS = ("ids", "id", "names", "files")
LABELS = ("labels", "label", "y")


class FileStore(Store):
    """A features file, as written by `miv extract`."""

    keeps_views = True

    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Read the file and yield it in batches."""
        table = self.read()
        for start in range(0, len(table), batch_size):
            yield table[start : start + batch_size]

    def read(self) -> FeatureTable:
        """Read the file."""
        return FeatureTable.load(self.name)

    def write(self, table: FeatureTable) -> None:
        """Write the file."""
        table.save(self.name)


class ArrayStore(FileStore):
    """A `.npy` file, or an `.npz` archive; nothing is unpickled.

    An archive holds one array of vectors (n, channels) or patches under any name, or features of
    several blocks as `block0.map`, `block0.token`, `block1.map` ...; optionally labels as `labels`,
    `label` or `y`, and names of the rows as `ids`, `id`, `names` or `files`.
    """

    def read(self) -> FeatureTable:
        """Read the file."""
        path = Path(self.name)
        check_file(path)
        # NumPy and zipfile raise almost anything for damaged and forged files.
        with reading(path, Exception):
            return self._table(_read_arrays(path))

    def write(self, table: FeatureTable) -> None:  # noqa: ARG002
        """Raise an error: other formats also hold views and the backbone."""
        raise InputError(
            f"Features are not written to {self.name}: give a .safetensors or .parquet file."
        )

    def _table(self, arrays: dict[str, Array]) -> FeatureTable:
        ids = _take(arrays, self.columns.id, IDS)
        labels = _take(arrays, self.columns.label, LABELS)
        floats = [k for k, array in arrays.items() if array.dtype.kind == "f" and array.ndim > 1]
        for name in self.columns.vectors:
            check_one_of("vectors", name, floats)
        chosen = {name: np.asarray(arrays[name]) for name in self.columns.vectors or floats}
        if not self.columns.vectors and any(name.startswith("block") for name in chosen):
            features = Features.from_tensors(chosen)
        elif self.columns.vectors or len(chosen) == 1:
            features = Features(list(chosen.values()))
        else:
            listed = ", ".join(chosen) or "none"
            raise InputError(f"{self.name} must have exactly one array of vectors: {listed}.")
        return FeatureTable(
            features,
            tuple(map(str, range(len(features)) if ids is None else ids.ravel().tolist())),
            None if labels is None else tuple(map(str, labels.ravel().tolist())),
        )


def _read_arrays(path: Path) -> dict[str, Array]:
    if path.suffix.lower() == ".npy":
        return {"X": np.load(path, mmap_mode="r", allow_pickle=False)}
    with zipfile.ZipFile(path) as archive:
        check_ratio(path, sum(member.file_size for member in archive.infolist()))
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _take(arrays: dict[str, Array], name: str | None, usual: Sequence[str]) -> Any:
    if name is not None:
        check_one_of("The array", name, arrays)
    name = name or next((known for known in usual if known in arrays), None)
    return None if name is None else arrays.pop(name)
