"""`Store`: a place that holds features, labels and ids."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mivhead._schema import from_json, to_json
from mivhead.errors import InputError, check_one_of
from mivhead.features import Features, FeatureTable

BATCH = 256  # rows


class Store(ABC):
    """A table of features in a database, or a features file; made by `mivhead.stores.open`.

    Parameters
    ----------
    name
        What to call it in errors; holds no password.
    columns
        Which rows and columns to read.
    """

    def __init__(self, name: str, columns: Columns) -> None:
        self.name = name
        self.columns = columns

    def close(self) -> None:  # noqa: B027  # most stores hold nothing open
        """Disconnect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Read images batch by batch, without their views, in little memory."""

    @abstractmethod
    def read(self) -> FeatureTable:
        """Read all images that the filter leaves, and their views, in the order of writing."""

    @abstractmethod
    def write(self, table: FeatureTable) -> None:
        """Write features, labels, ids and views; make the table if there is none.

        In a database, rows that have the same ids, and their views, are replaced, and the others
        stay; a file is replaced as a whole.
        """

    @abstractmethod
    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:
        """Write values, such as predictions, into columns, which are made if there are none."""


class FileStore(Store):
    """A features file of `miv extract`.

    Parameters
    ----------
    path
        The file.
    columns
        A file has its own columns and no filter: anything but the default is refused.
    """

    def __init__(self, path: str | Path, columns: Columns) -> None:
        super().__init__(str(path), columns)
        if columns != Columns():
            raise InputError(
                f"{path} is a features file, which has its own columns and no filter: "
                "leave out id, label, vectors and where."
            )

    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Cut the table of the file into batches."""
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

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:  # noqa: ARG002  # the same for all stores
        """Refuse: a features file has no place for it."""
        raise InputError(f"{self.name} is a features file: predictions cannot be written into it.")


# Which columns of a table hold what.


# The columns of a table that mivhead made, beside its features.
ID = "id"
LABEL = "label"
VIEW_OF = "view_of"  # id of the image that a view was made from
POSITION = "position"  # order of the rows


@dataclass(frozen=True)
class Columns:
    """Which rows and columns of a table to read.

    Parameters
    ----------
    id
        Column of the names of the rows; None: `id`, or what the database itself uses.
    label
        Column of the labels; None: `label`, if there is one.
    vectors
        Columns of the features, one per block, shallow to deep; none: those that mivhead wrote, or
        the only column of vectors.
    where
        Filter in the database's own language, passed on as it is: never build it from texts of
        strangers.
    """

    id: str | None = None
    label: str | None = None
    vectors: tuple[str, ...] = ()
    where: str | None = None

    def choose_vectors(self, candidates: Sequence[str], table: str) -> tuple[str, ...]:
        """Choose the features among the columns that hold vectors."""
        for column in self.vectors:
            check_one_of("vectors", column, candidates)
        if self.vectors:
            return self.vectors
        if len(candidates) != 1:
            found = ", ".join(candidates) or "none"
            raise InputError(
                f"{table} needs one column of vectors, but there are {found}: name the ones to "
                "read, shallow to deep, with `vectors`."
            )
        return tuple(candidates)

    def choose_id(self, existing: Sequence[str]) -> str | None:
        """Choose the column of the ids: the one that was asked for, or the usual one, if any."""
        return _choose(ID, self.id, existing)

    def choose_label(self, existing: Sequence[str]) -> str | None:
        """Choose the column of the labels: the one that was asked for, or the usual one, if any."""
        return _choose(LABEL, self.label, existing)


def _choose(role: str, given: str | None, existing: Sequence[str]) -> str | None:
    if given is None:
        return role if role in existing else None
    check_one_of(role, given, existing)
    return given


# Rows on their way between a `FeatureTable` and a database.


Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Some rows of a table; None for a column that the table does not have."""

    ids: list[str]
    parts: dict[str, Array]  # by column, (n, ...)
    labels: list[str | None] | None = None
    view_of: list[str | None] | None = None
    positions: list[int] | None = None

    @staticmethod
    def join(batches: Sequence[Rows]) -> Rows:
        """Put batches together, in the order of their positions."""
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
    """Yield the images of a table, then their views; positions count from `first`."""
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
    """Stacks the vectors of rows, which must all be there and of one shape, in all batches."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._shapes: dict[str, tuple[int, ...]] = {}

    def stack(self, column: str, ids: Sequence[str], vectors: Sequence[Array | None]) -> Array:
        """Return an array (n, ...) of the vectors of one column."""
        for id_, vector in zip(ids, vectors, strict=True):
            if vector is None:
                raise InputError(
                    f"The row {id_!r} of {self._table} has no vector in the column {column!r}: "
                    "filter such rows out."
                )
            expected = self._shapes.setdefault(column, vector.shape)
            if vector.shape != expected:
                raise InputError(
                    f"The row {id_!r} of {self._table} has {_size(vector.shape)} values in the "
                    f"column {column!r}, the rows before it have {_size(expected)}: all vectors "
                    "of a column must be equally wide."
                )
        return np.stack([np.asarray(vector) for vector in vectors])


def texts(column: Sequence[Any]) -> list[Any]:
    """Values of a column as texts, gaps as None."""
    return [None if each is None else str(each) for each in column]


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _arrays(features: Features) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in features.tensors.items()}


# What the stores in databases have in common.
#
# A table that mivhead made has the columns `id`, `label`, `view_of`, `position` and one per
# part of the features (`block0.map`, `block0.token`, ...), and carries a `Description`. Tables
# of others can be read as well: any that has a column of vectors.


FORMAT = 1


@dataclass(frozen=True)
class Description:
    """What a table that mivhead made says of its features."""

    format: int
    dtype: str
    shapes: dict[str, list[int]]  # per image
    backbone: dict[str, Any] | None = None

    @classmethod
    def of(cls, table: FeatureTable) -> Description:
        """Describe features that are about to be written."""
        dtype, *others = {str(tensor.dtype) for tensor in table.features.tensors.values()}
        if others:
            raise InputError(f"The parts of {table.features} must have one type to be stored.")
        shapes = {name: list(shape) for name, shape in table.features.layout.items()}
        return cls(FORMAT, dtype.removeprefix("torch."), shapes, table.backbone)

    @classmethod
    def read(cls, text: str | bytes, table: str) -> Description:
        """Read what `as_text` wrote; a newer or damaged one is an error."""
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        number = document.get("format") if isinstance(document, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise InputError(f"{table} was written by a newer mivhead: `pip install -U mivhead`.")
        return from_json(cls, document, f"the description of {table}")

    def as_text(self) -> str:
        """One JSON document."""
        return json.dumps(to_json(self))


class DatabaseStore(Store):
    """A table in a database: what is read and written, without how."""

    def iter_batches(self, batch_size: int = BATCH) -> Iterator[FeatureTable]:
        """Read images batch by batch, without their views, in little memory."""
        description = self._describe()
        for rows in self._scan(description, views=False, batch_size=batch_size):
            yield self._table(rows, description)

    def read(self) -> FeatureTable:
        """Read all images that the filter leaves, and their views, in the order of writing."""
        description = self._describe()
        images = Rows.join(list(self._scan(description, views=False, batch_size=BATCH)))
        if not images.ids:
            matching = " that match the filter" if self.columns.where else ""
            raise InputError(f"{self.name} has no rows{matching}.")
        table = self._table(images, description)
        if description is None or self.columns.vectors:
            return table
        views = Rows.join(list(self._scan(description, views=True, batch_size=BATCH)))
        row_of = {each: row for row, each in enumerate(images.ids)}
        origins = [row_of.get(each or "", -1) for each in views.view_of or ()]
        kept = [i for i, row in enumerate(origins) if row >= 0]  # the filter may have removed some
        if not kept:
            return table
        features = self._features(views, description)[kept]
        return replace(table, views=features, view_of=np.array([origins[i] for i in kept]))

    def write(self, table: FeatureTable) -> None:
        """Write features, labels, ids and views; make the table if there is none."""
        if len(set(table.ids)) < len(table.ids):
            raise InputError(f"The ids are not distinct; {self.name} needs one of its own per row.")
        new = Description.of(table)
        found = self._describe() if self._exists() else new
        if found is None:
            raise InputError(f"{self.name} was not made by mivhead: write into a new table.")
        if found != new:
            raise InputError(
                f"{self.name} holds features of another backbone, type or shape: "
                "write into a new table."
            )
        self._insert(new, rows_of(table, self._next_position(), BATCH))

    @abstractmethod
    def _exists(self) -> bool:
        """Whether the table is there."""

    @abstractmethod
    def _describe(self) -> Description | None:
        """Read what mivhead noted when it made the table; None for a table of someone else."""

    @abstractmethod
    def _scan(
        self, description: Description | None, *, views: bool, batch_size: int
    ) -> Iterator[Rows]:
        """Read rows batch by batch: the images that the filter leaves, or all views.

        Parts of a table that mivhead made may come flat, as (n, values).
        """

    @abstractmethod
    def _next_position(self) -> int:
        """Position for the next new row."""

    @abstractmethod
    def _insert(self, description: Description, batches: Iterator[Rows]) -> None:
        """Write rows in place of those with the same ids and their views; make the table first."""

    def _vectors(
        self, description: Description | None, candidates: Callable[[], list[str]]
    ) -> tuple[str, ...]:
        """Columns to read the features from; `candidates` finds them in a table of someone else."""
        if description is None:
            return self.columns.choose_vectors(candidates(), self.name)
        known = tuple(description.shapes)
        return self.columns.choose_vectors(known, self.name) if self.columns.vectors else known

    def _features(self, rows: Rows, description: Description | None) -> Features:
        if description is None:
            return Features(list(rows.parts.values()))
        shapes = description.shapes
        parts = {name: part.reshape(-1, *shapes[name]) for name, part in rows.parts.items()}
        if self.columns.vectors:
            return Features(list(parts.values()))
        return Features.from_tensors(parts)

    def _table(self, rows: Rows, description: Description | None) -> FeatureTable:
        complete = description is not None and not self.columns.vectors
        return FeatureTable(
            self._features(rows, description),
            tuple(rows.ids),
            self._labels(rows),
            backbone=description.backbone if description is not None and complete else None,
        )

    def _labels(self, rows: Rows) -> tuple[str, ...] | None:
        if rows.labels is None or (self.columns.label is None and None in rows.labels):
            return None  # nobody asked for labels, as for a prediction
        if None in rows.labels:
            raise InputError(
                f"The row {rows.ids[rows.labels.index(None)]!r} of {self.name} has no label: "
                "fill it in, or filter such rows out."
            )
        return tuple(map(str, rows.labels))
