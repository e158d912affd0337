"""`Store`: features, labels and ids in a file or a database, and what all stores share.

A table that mivhead created has the columns `id`, `label`, `view_of`, `position` and one column per
part of the features (`block0.map`, `block0.token`, ...), and carries a `TableInfo`. Other tables
can be read as well, as long as they have a column of vectors.

To add a database, subclass `DatabaseStore` and add its scheme to `mivhead.stores.uri`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json, parse_json, to_json
from mivhead.errors import InputError, check_one_of
from mivhead.features import Features, FeatureTable

Array = NDArray[Any]

FORMAT = 1  # of `TableInfo`
BATCH = 256  # rows
# What a file unpacks to is limited to this many times its size; smaller ones are no danger.
MAX_RATIO, SMALL = 200, 2**30  # bytes

# The columns of a table that mivhead created, apart from its features.
ID = "id"
LABEL = "label"
VIEW_OF = "view_of"  # id of the image that a view was made from
POSITION = "position"  # order of the rows


def check_ratio(path: Path, unpacked: int) -> None:
    """Raise an error if a small file would fill the memory."""
    if unpacked > max(SMALL, MAX_RATIO * path.stat().st_size):
        raise InputError(
            f"{path} would unpack to {unpacked // 2**20:,} MiB, more than {MAX_RATIO} times its "
            "size: it may have been made to fill your memory."
        )


@dataclass(frozen=True)
class Columns:
    """Which rows and columns of a table to read."""

    id: str | None = None  # column of the row ids; by default `id`, or the database's own ids
    label: str | None = None  # column of the labels; by default `label`, if it exists
    # Columns of the features, one per block, shallow to deep; by default those that mivhead wrote,
    # or the only column of vectors
    vectors: tuple[str, ...] = ()
    # Filter in the database's own language. It is passed on unchanged: never build it from
    # untrusted strings.
    where: str | None = None

    def choose_vectors(self, candidates: Sequence[str], table: str) -> tuple[str, ...]:
        """Return the columns to read features from, given those that hold vectors."""
        for column in self.vectors:
            check_one_of("vectors", column, candidates)
        if self.vectors:
            return self.vectors
        if len(candidates) != 1:
            found = ", ".join(candidates) or "none"
            raise InputError(
                f"{table} must have exactly one column of vectors, found {found}: name the columns "
                "to read, shallow to deep, with `vectors`."
            )
        return tuple(candidates)

    def choose_id(self, existing: Sequence[str]) -> str | None:
        """Return the column of the ids: the requested one, or `id` if it exists."""
        return _choose(ID, self.id, existing)

    def choose_label(self, existing: Sequence[str]) -> str | None:
        """Return the column of the labels: the requested one, or `label` if it exists."""
        return _choose(LABEL, self.label, existing)


def _choose(role: str, given: str | None, existing: Sequence[str]) -> str | None:
    if given is None:
        return role if role in existing else None
    check_one_of(role, given, existing)
    return given


class Store(ABC):
    """A table of features in a database, or a features file; opened by `mivhead.stores.open`.

    Parameters
    ----------
    name : str
        Its name in errors; contains no password.
    columns : Columns
        Which rows and columns to read.
    """

    def __init__(self, name: str, columns: Columns) -> None:
        self.name = name
        self.columns = columns

    @classmethod
    def from_address(cls, address: str, options: Mapping[str, str], columns: Columns) -> Store:
        """Open `SCHEME://FOLDER/TABLE`.

        Parameters
        ----------
        address : str
            The address without its options.
        options : mapping of str to str
            Options that only this kind of store has, which follow the question mark.
        columns : Columns
            Which rows and columns to read.

        Returns
        -------
        Store
        """
        scheme, _, path = address.partition("://")
        for option in options:
            check_one_of(f"An option of {scheme}", option, [each.name for each in fields(Columns)])
        folder, _, table = unquote(path).rpartition("/")
        if not folder or not table:
            raise InputError(f"{address} must be {scheme}://FOLDER/TABLE.")
        return cls(folder, table, columns)  # type: ignore[arg-type, call-arg]  # subclasses

    def close(self) -> None:  # noqa: B027  # most stores keep no connection
        """Disconnect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Yield the images batch by batch, without their views, using little memory.

        Parameters
        ----------
        batch_size : int, default=256
            Number of images per batch.

        Yields
        ------
        FeatureTable
        """

    @abstractmethod
    def read(self) -> FeatureTable:
        """Read all images that match the filter, and their views, in the order of writing.

        Returns
        -------
        FeatureTable
        """

    @abstractmethod
    def write(self, table: FeatureTable) -> None:
        """Write features, labels, ids and views; create the table if it does not exist.

        In a database, rows with the same ids are replaced together with their views, and all other
        rows are kept; a file is replaced as a whole.

        Parameters
        ----------
        table : FeatureTable
            The images to write.
        """

    @abstractmethod
    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:
        """Write values, such as predictions, into columns, which are created if needed.

        Parameters
        ----------
        ids : sequence of str
            The images to annotate; they must be in the store.
        values : mapping of str to sequence
            For each column, one string or number per image.
        """


class FileStore(Store):
    """A features file, as written by `miv extract`; it has fixed columns and no filter."""

    def __init__(self, path: str | Path, columns: Columns) -> None:
        super().__init__(str(path), columns)
        if columns != Columns():
            raise InputError(
                f"{path} is a features file, which has fixed columns and no filter: "
                "omit id, label, vectors and where."
            )

    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Read the file and yield it in batches."""
        table = self.read()
        for start in range(0, len(table), batch_size):
            part = slice(start, start + batch_size)
            labels = None if table.labels is None else table.labels[part]
            features = table.features[part]
            yield FeatureTable(features, table.ids[part], labels, backbone=table.backbone)

    def read(self) -> FeatureTable:
        """Read the file."""
        return FeatureTable.load(self.name)

    def write(self, table: FeatureTable) -> None:
        """Write the file."""
        table.save(self.name)

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:  # noqa: ARG002  # the signature of all stores
        """Raise an error: a features file cannot hold other values."""
        raise InputError(
            f"{self.name} is a features file, which cannot hold predictions: use a database."
        )


@dataclass(frozen=True)
class TableInfo:
    """What a table that mivhead created stores about its features."""

    format: int
    dtype: str
    shapes: dict[str, list[int]]  # per image
    backbone: dict[str, Any] | None = None

    @classmethod
    def of(cls, table: FeatureTable) -> TableInfo:
        """Return the info of features that are about to be written."""
        dtype, *others = {str(tensor.dtype) for tensor in table.features.tensors.values()}
        if others:
            raise InputError(f"All parts of {table.features} must have the same type to be stored.")
        shapes = {name: list(shape) for name, shape in table.features.layout.items()}
        return cls(FORMAT, dtype.removeprefix("torch."), shapes, table.backbone)

    @classmethod
    def read(cls, text: str | bytes, table: str) -> TableInfo:
        """Read what `to_string` wrote; raise an error if it is newer or corrupted."""
        try:
            document = parse_json(text)
        except ValueError:
            document = None
        number = document.get("format") if isinstance(document, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise InputError(f"{table} was written by a newer version: update mivhead.")
        return from_json(cls, document, f"the info of {table}")

    def to_string(self) -> str:
        """Return one JSON document."""
        return json.dumps(to_json(self))


@dataclass(frozen=True)
class Rows:
    """Rows on their way between a `FeatureTable` and a database; None for a missing column."""

    ids: list[str]
    parts: dict[str, Array]  # by column, (n, ...)
    labels: list[str | None] | None = None
    view_of: list[str | None] | None = None
    positions: list[int] | None = None

    @staticmethod
    def join(batches: Sequence[Rows]) -> Rows:
        """Concatenate batches, in the order of their positions."""
        if not batches:
            return Rows([], {})

        def all_of(name: str) -> Any:
            columns = [getattr(rows, name) for rows in batches]
            return None if columns[0] is None else [each for column in columns for each in column]

        names = batches[0].parts
        parts = {name: np.concatenate([rows.parts[name] for rows in batches]) for name in names}
        joined = Rows(
            all_of("ids"), parts, all_of("labels"), all_of("view_of"), all_of("positions")
        )
        positions = joined.positions
        if positions is None or positions == sorted(positions):
            return joined
        return joined._take(np.argsort(positions, kind="stable"))

    def _take(self, order: NDArray[np.int64]) -> Rows:
        def ordered(column: list[Any] | None) -> Any:
            return None if column is None else [column[i] for i in order]

        return Rows(
            ordered(self.ids),
            {name: part[order] for name, part in self.parts.items()},
            ordered(self.labels),
            ordered(self.view_of),
            ordered(self.positions),
        )


def rows_of(table: FeatureTable, first: int, batch_size: int) -> Iterator[Rows]:
    """Yield the images of a table, then their views; positions start at `first`."""
    labels = table.labels
    for start in range(0, len(table), batch_size):
        part = slice(start, start + batch_size)
        ids = list(table.ids[part])
        yield Rows(
            ids,
            _arrays(table.features[part]),
            None if labels is None else list(labels[part]),
            [None] * len(ids),
            list(range(first + start, first + start + len(ids))),
        )
    if table.views is None or table.view_of is None:
        return
    origins = table.view_of.tolist()
    for start in range(0, len(origins), batch_size):
        views = range(start, min(start + batch_size, len(origins)))
        yield Rows(
            [f"{table.ids[origins[i]]}#view{i}" for i in views],
            _arrays(table.views[start : views.stop]),
            None if labels is None else [labels[origins[i]] for i in views],
            [table.ids[origins[i]] for i in views],
            [first + len(table) + i for i in views],
        )


class Stacker:
    """Stacks vectors, none of which may be missing; all batches must have the same shape."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._shapes: dict[str, tuple[int, ...]] = {}

    def stack(self, column: str, ids: Sequence[str], vectors: Sequence[Array | None]) -> Array:
        """Return the vectors of one column as an array (n, ...)."""
        for id_, vector in zip(ids, vectors, strict=True):
            if vector is None:
                raise InputError(
                    f"The row {id_!r} of {self._table} has no vector in the column {column!r}: "
                    "exclude such rows with `where`."
                )
            expected = self._shapes.setdefault(column, vector.shape)
            if vector.shape != expected:
                raise InputError(
                    f"The row {id_!r} of {self._table} has {_size(vector.shape)} values in the "
                    f"column {column!r}, but earlier rows have {_size(expected)}: all vectors of a "
                    "column must have the same shape."
                )
        return np.stack([np.asarray(vector) for vector in vectors])


def strings(column: Sequence[Any]) -> list[Any]:
    """Return the values of a column as strings, missing ones as None."""
    return [None if each is None else str(each) for each in column]


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _arrays(features: Features) -> dict[str, Array]:
    return features.tensors


class DatabaseStore(Store):
    """A table in a database: what is read and written; subclasses implement how."""

    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Yield the images batch by batch, without their views, using little memory."""
        info = self._read_info()
        for rows in self._scan(info, views=False, batch_size=batch_size):
            yield self._table(rows, info)

    def read(self) -> FeatureTable:
        """Read all images that match the filter, and their views, in the order of writing."""
        info = self._read_info()
        images = Rows.join(list(self._scan(info, views=False, batch_size=BATCH)))
        if not images.ids:
            matching = " that match the filter" if self.columns.where else ""
            raise InputError(f"{self.name} has no rows{matching}.")
        table = self._table(images, info)
        if info is None or self.columns.vectors:
            return table
        views = Rows.join(list(self._scan(info, views=True, batch_size=BATCH)))
        row_of = {each: row for row, each in enumerate(images.ids)}
        origins = [row_of.get(each or "", -1) for each in views.view_of or ()]
        kept = [i for i, row in enumerate(origins) if row >= 0]  # others were filtered out
        if not kept:
            return table
        features = self._features(views, info)[kept]
        return replace(table, views=features, view_of=np.array([origins[i] for i in kept]))

    def write(self, table: FeatureTable) -> None:
        """Write features, labels, ids and views; create the table if it does not exist."""
        if len(set(table.ids)) < len(table.ids):
            raise InputError(f"The ids are not unique, but {self.name} needs a unique id per row.")
        new = TableInfo.of(table)
        found = self._read_info() if self._exists() else new
        if found is None:
            raise InputError(f"{self.name} was not created by mivhead: write into a new table.")
        if found != new:
            raise InputError(
                f"{self.name} contains features of another backbone, type or shape: "
                "write into a new table."
            )
        self._insert(new, rows_of(table, self._next_position(), BATCH))

    @abstractmethod
    def _exists(self) -> bool:
        """Return whether the table exists."""

    @abstractmethod
    def _read_info(self) -> TableInfo | None:
        """Read the info of a table that mivhead created; None for any other table."""

    @abstractmethod
    def _scan(self, info: TableInfo | None, *, views: bool, batch_size: int) -> Iterator[Rows]:
        """Yield rows batch by batch: the images that match the filter, or all views.

        Parts of a table that mivhead created may be flat, (n, values).
        """

    @abstractmethod
    def _next_position(self) -> int:
        """Return the position of the next new row."""

    @abstractmethod
    def _insert(self, info: TableInfo, batches: Iterator[Rows]) -> None:
        """Write rows, replacing those with the same ids and their views; create the table first."""

    def _vectors(
        self, info: TableInfo | None, candidates: Callable[[], list[str]]
    ) -> tuple[str, ...]:
        """Return the columns of the features; `candidates` finds them in other tables."""
        if info is None:
            return self.columns.choose_vectors(candidates(), self.name)
        known = tuple(info.shapes)
        return self.columns.choose_vectors(known, self.name) if self.columns.vectors else known

    def _features(self, rows: Rows, info: TableInfo | None) -> Features:
        if info is None:
            return Features(list(rows.parts.values()))
        shapes = info.shapes
        parts = {name: part.reshape(-1, *shapes[name]) for name, part in rows.parts.items()}
        if self.columns.vectors:
            return Features(list(parts.values()))
        return Features.from_tensors(parts)

    def _table(self, rows: Rows, info: TableInfo | None) -> FeatureTable:
        complete = info is not None and not self.columns.vectors
        return FeatureTable(
            self._features(rows, info),
            tuple(rows.ids),
            self._labels(rows),
            backbone=info.backbone if info is not None and complete else None,
        )

    def _labels(self, rows: Rows) -> tuple[str, ...] | None:
        if rows.labels is None or (self.columns.label is None and None in rows.labels):
            return None  # labels were not requested, as for a prediction
        if None in rows.labels:
            raise InputError(
                f"The row {rows.ids[rows.labels.index(None)]!r} of {self.name} has no label: "
                "add it, or exclude such rows with `where`."
            )
        return tuple(map(str, rows.labels))
