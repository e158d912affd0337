"""Rows on their way between a `FeatureTable` and a database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.stores.table import FeatureTable

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
