"""What the stores in databases have in common.

A table that mivhead made has the columns `id`, `label`, `view_of`, `position` and one per part of
the features (`block0.map`, `block0.token`, ...), and carries a `Description`. Tables of others can
be read as well: any that has a column of vectors.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.schema import from_json, to_json
from mivhead.stores.rows import Rows, rows_of
from mivhead.stores.store import BATCH, Store
from mivhead.stores.table import FeatureTable

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
