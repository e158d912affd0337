"""`Store`: a place that holds features, labels and ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from mivhead.errors import InputError
from mivhead.stores.columns import Columns
from mivhead.stores.table import FeatureTable

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
