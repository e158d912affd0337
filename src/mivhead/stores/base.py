"""What all stores of features share.

A table that mivhead created has the columns `id`, `label` and one per part of the features
(`block0.map`, `block0.token`, ...), and carries a `TableInfo`. Other tables can be read as well, as
long as they have a column of vectors. Augmented views are kept by `.safetensors` files only.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json, parse_json, to_json
from mivhead.errors import InputError, check_one_of, reading
from mivhead.features import Features, FeatureTable

Array = NDArray[Any]

FORMAT = 1  # of `TableInfo`
BATCH = 256  # rows
ID, LABEL = "id", "label"
# What a file unpacks to is limited to this many times its size; smaller ones are no danger.
MAX_RATIO, SMALL = 200, 2**30  # bytes


@dataclass(frozen=True)
class Columns:
    """Which rows and columns of a table to read."""

    id: str | None = None
    label: str | None = None
    vectors: tuple[str, ...] = ()
    where: str | None = None


@dataclass(frozen=True)
class TableInfo:
    """What a table that mivhead created says about its features."""

    format: int
    dtype: str
    shapes: dict[str, list[int]]  # per image
    backbone: dict[str, Any] | None = None

    @classmethod
    def of(cls, table: FeatureTable) -> TableInfo:
        """Return the info of features that are about to be written."""
        dtype, *others = {tensor.dtype.name for tensor in table.features.tensors.values()}
        if others:
            raise InputError(f"All parts of {table.features} must have the same type to be stored.")
        shapes = {name: list(shape) for name, shape in table.features.layout.items()}
        return cls(FORMAT, dtype, shapes, table.backbone)

    @classmethod
    def read(cls, text: str | bytes, table: str) -> TableInfo:
        """Read what `to_string` wrote."""
        with reading(f"The info of {table}", ValueError):
            info = from_json(cls, parse_json(text), table)
        if info.format != FORMAT:
            raise InputError(f"{table} was written by another version of mivhead.")
        return info

    def to_string(self) -> str:
        """Return one JSON document."""
        return json.dumps(to_json(self))


class Store(ABC):
    """A table of features in a database, or a features file; opened by `mivhead.stores.open`."""

    keeps_views = False  # whether `write` also keeps augmented views, pictures and hashes

    def __init__(self, name: str, columns: Columns) -> None:
        self.name = name  # in errors; contains no password
        self.columns = columns

    @abstractmethod
    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Yield the images batch by batch, without their views, using little memory."""

    @abstractmethod
    def read(self) -> FeatureTable:
        """Read all images that match the filter."""

    @abstractmethod
    def write(self, table: FeatureTable) -> None:
        """Write features, labels and ids; a `.safetensors` file also keeps everything else.

        In a database, rows with the same ids are replaced, and all other rows are kept; a file is
        replaced as a whole.
        """


class TableStore(Store):
    """A table with one row per image; subclasses say how rows are read and written."""

    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Yield the images batch by batch, using little memory."""
        info, count = self._read_info(), 0
        for columns in self._scan(info, batch_size):
            if rows := len(next(iter(columns.values()))):
                with reading(self.name, ValueError):  # shapes that do not fit
                    table = self._table(columns, info, range(count, count + rows))
                yield table
                count += rows

    def read(self) -> FeatureTable:
        """Read all images that match the filter."""
        batches = list(self.iter_batches())
        if not batches:
            matching = " that match the filter" if self.columns.where else ""
            raise InputError(f"{self.name} has no rows{matching}.")
        ids = tuple(chain(*(batch.ids for batch in batches)))
        labels = [batch.labels for batch in batches if batch.labels is not None]
        known = tuple(chain(*labels)) if len(labels) == len(batches) else None
        features = Features.concat([batch.features for batch in batches])
        return replace(batches[0], features=features, ids=ids, labels=known)

    def write(self, table: FeatureTable) -> None:
        """Write features, labels and ids; create the table if it does not exist."""
        if len(set(table.ids)) < len(table.ids):
            raise InputError(f"The ids are not unique, but {self.name} needs a unique id per row.")
        info = TableInfo.of(table)
        if self._exists() and self._read_info() != info:
            raise InputError(
                f"{self.name} holds other data, or features of another backbone, type or shape: "
                "write into a new table."
            )
        self._insert(info, table)

    @abstractmethod
    def _exists(self) -> bool:
        """Return whether the table exists."""

    @abstractmethod
    def _read_info(self) -> TableInfo | None:
        """Read the info of a table that mivhead created; None for any other table."""

    @abstractmethod
    def _scan(self, info: TableInfo | None, batch_size: int) -> Iterator[dict[str, Any]]:
        """Yield columns by what they hold; features may be flat, and None in some rows."""

    @abstractmethod
    def _insert(self, info: TableInfo, table: FeatureTable) -> None:
        """Write rows in place of those with the same ids; create the table first."""

    def _choose(
        self, names: Sequence[str], vectors: Sequence[str], info: TableInfo | None
    ) -> dict[str, str]:
        """Return the columns to read, by what they hold; `vectors` are those that could be."""
        chosen = {}
        for role, column in ((ID, self.columns.id), (LABEL, self.columns.label)):
            if column is not None:
                check_one_of(role, column, names)
            if column or role in names:
                chosen[role] = column or role
        vectors = vectors if info is None else list(info.shapes)
        for name in self.columns.vectors:
            check_one_of("vectors", name, vectors)
        if info is None and not self.columns.vectors and len(vectors) != 1:
            listed = ", ".join(vectors) or "none"
            raise InputError(
                f"{self.name} must have exactly one column of vectors: name some of {listed}."
            )
        return chosen | {name: name for name in self.columns.vectors or vectors}

    def _table(
        self, columns: dict[str, Any], info: TableInfo | None, numbers: range
    ) -> FeatureTable:
        """Make a table of columns; `numbers` are ids of rows that have none."""
        ids, labels = tuple(map(str, columns.pop(ID, numbers))), columns.pop(LABEL, None)
        if labels is not None and None in labels:
            if self.columns.label is not None:
                unlabelled = ids[labels.index(None)]
                raise InputError(f"The row {unlabelled!r} of {self.name} has no label.")
            labels = None  # they were not requested, as for a prediction
        labels = None if labels is None else tuple(map(str, labels))
        columns = {name: self._stack(name, ids, part) for name, part in columns.items()}
        if info is not None:
            columns = {name: part.reshape(-1, *info.shapes[name]) for name, part in columns.items()}
        if info is None or self.columns.vectors:
            return FeatureTable(Features(list(columns.values())), ids, labels)
        return FeatureTable(Features.from_tensors(columns), ids, labels, backbone=info.backbone)

    def _stack(self, column: str, ids: Sequence[str], vectors: Any) -> Array:
        """Return vectors as one array (n, ...); an error names the row that does not fit."""
        if isinstance(vectors, np.ndarray):
            return vectors
        for id_, vector in zip(ids, vectors, strict=True):
            if vector is None or getattr(vectors[0], "shape", vector.shape) != vector.shape:
                what = "no vector" if vector is None else "a vector of another shape"
                raise InputError(f"The row {id_!r} of {self.name} has {what} in {column!r}.")
        return np.stack(vectors)


def check_ratio(path: Path, unpacked: int) -> None:
    """Raise an error if a small file would fill the memory."""
    if unpacked > max(SMALL, MAX_RATIO * path.stat().st_size):
        size = f"{unpacked // 2**20:,} MiB"
        raise InputError(f"{path} would unpack to {size}, more than {MAX_RATIO} times its size.")
