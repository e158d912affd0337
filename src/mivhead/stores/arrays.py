"""NumPy's files of embeddings: `.npy` holds vectors, `.npz` vectors, labels and ids.

Nothing is unpickled, and no array is allocated that the file is too short for.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from mivhead.errors import InputError, NotAvailableError, reading
from mivhead.features import Features, FeatureTable
from mivhead.stores.base import Array, Columns, FileStore, check_ratio

MAX_BYTES = 16 * 2**30
# What NumPy and zipfile raise for damaged and forged files, which neither documents.
_DAMAGED = (
    *(ValueError, TypeError, OverflowError, EOFError, RuntimeError, SyntaxError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
IDS = ("ids", "id", "names", "files")
LABELS = ("labels", "label", "y")


class ArrayStore(FileStore):
    """A `.npy` file, or an `.npz` archive.

    An archive holds one array of vectors (n, channels) or patches under any name, or features of
    several blocks as `block0.map`, `block0.token`, `block1.map` ...; optionally labels as `labels`,
    `label` or `y`, and names of the rows as `ids`, `id`, `names` or `files`.
    """

    def __init__(self, path: str | Path, columns: Columns) -> None:
        super().__init__(path, Columns())
        if columns.where is not None:
            raise InputError(f"{path} is a NumPy file, which has no filter: omit where.")
        self.columns = columns

    def read(self) -> FeatureTable:
        """Read the file."""
        path = Path(self.name)
        if not path.is_file():
            kind = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {kind}.")
        try:
            with reading(path, *_DAMAGED):
                if path.suffix.lower() == ".npy":
                    arrays = {"X": np.load(path, mmap_mode="r", allow_pickle=False)}
                else:
                    arrays = _read_archive(path)
                return self._table(arrays)
        except MemoryError:
            raise NotAvailableError(f"There is not enough memory to read {path}.") from None

    def write(self, table: FeatureTable) -> None:  # noqa: ARG002  # the signature of all stores
        """Raise an error: other formats also hold views and the backbone."""
        raise InputError(
            f"Features are not written to {self.name}, which could not hold the backbone's "
            "identity: give a .safetensors or .parquet file."
        )

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:  # noqa: ARG002  # the signature of all stores
        """Raise an error: a file is not changed."""
        raise InputError(
            f"{self.name} is not changed: write the predictions to a new file with --job."
        )

    def _table(self, arrays: dict[str, Array]) -> FeatureTable:
        ids = _take(arrays, self.columns.id, IDS)
        labels = _take(arrays, self.columns.label, LABELS)
        chosen = self.columns.choose_vectors(_candidates(arrays), self.name)
        if chosen[0].startswith("block") and not self.columns.vectors:
            features = Features.from_tensors(arrays)
        else:
            features = Features([np.asarray(arrays[name]) for name in chosen])
        count = len(features)
        for name, column in (("ids", ids), ("labels", labels)):
            if column is not None and column.shape != (count,):
                raise InputError(
                    f"{self.name} holds {count} vectors, but its {name} have the shape "
                    f"{column.shape}."
                )
        return FeatureTable(
            features,
            tuple(map(str, range(count) if ids is None else ids.tolist())),
            None if labels is None else tuple(map(str, labels.tolist())),
        )


def _candidates(arrays: Mapping[str, Array]) -> list[str]:
    found = [name for name, array in arrays.items() if array.dtype.kind == "f" and array.ndim > 1]
    blocks = [name for name in found if name.startswith("block")]
    return blocks[:1] or found  # the blocks belong together


def _take(arrays: dict[str, Array], given: str | None, names: Sequence[str]) -> Array | None:
    if given is not None and given not in arrays:
        raise InputError(f"No array is called {given!r}; there are {', '.join(sorted(arrays))}.")
    found = next((name for name in ([given] if given else names) if name in arrays), None)
    return None if found is None else arrays.pop(found)


def _read_archive(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        unpacked = sum(each.file_size for each in members)
        if unpacked > MAX_BYTES:
            raise InputError(f"{path} would unpack to more than {MAX_BYTES // 2**30} GiB.")
        check_ratio(path, unpacked)
        arrays: dict[str, Array] = {}
        for member in members:
            with archive.open(member) as file:
                _check_header(file, member, path)
            with archive.open(member) as file:
                array: Any = np.lib.format.read_array(file, allow_pickle=False)
            arrays[member.filename.removesuffix(".npy")] = array
        return arrays


def _check_header(file: IO[bytes], member: zipfile.ZipInfo, path: Path) -> None:
    """Raise an error if an array is larger than its member: it would be allocated in vain."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else (np.lib.format.read_array_header_2_0)
    )
    shape, _, dtype = read(file)
    needed = dtype.itemsize * int(np.prod(shape, dtype=object))
    if needed > member.file_size:
        raise InputError(f"{path} is corrupted: {member.filename} is too short for its header.")
