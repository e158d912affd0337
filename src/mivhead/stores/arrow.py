"""Parquet files and LanceDB tables, which have Arrow's columns.

Those that mivhead wrote (see `mivhead.stores.base`) are lists of fixed size in the type of the
features, whose shapes are in the metadata of the schema. LanceDB allows no dot in a name: there
`block0.map` is `block0_map`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from mivhead._util.files import replacing
from mivhead._util.imports import need
from mivhead.errors import InputError, NotAvailableError, check_file, reading, reason_of
from mivhead.features import FeatureTable
from mivhead.stores.base import ID, LABEL, Array, Columns, TableInfo, TableStore, check_ratio

METADATA = b"mivhead"
DOT = "_"  # in LanceDB
GROUP_BYTES = 2**25  # of a row group


class ParquetStore(TableStore):
    """A Parquet file."""

    def _exists(self) -> bool:
        return Path(self.name).exists()

    @contextmanager
    def _open(self) -> Iterator[Any]:
        path = Path(self.name)
        check_file(path)
        pq = need("pyarrow.parquet")
        with (
            reading(path, ValueError, RuntimeError),
            pq.ParquetFile(path, page_checksum_verification=True) as file,
        ):
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            values = (
                group.column(i).num_values for group in groups for i in range(group.num_columns)
            )
            check_ratio(path, 4 * sum(values))
            yield file

    def _read_info(self) -> TableInfo | None:
        with self._open() as file:
            return info_of(file.schema_arrow, self.name)

    def _scan(self, info: TableInfo | None, batch_size: int) -> Iterator[dict[str, Any]]:
        with self._open() as file:
            schema = file.schema_arrow
            chosen = self._choose(schema.names, vector_columns(schema), info)
            for batch in file.iter_batches(batch_size, columns=list(chosen.values())):
                yield read_batch(batch, chosen)

    def write(self, table: FeatureTable) -> None:
        """Write a new file; an existing one is replaced."""
        self._insert(TableInfo.of(table), table)

    def _insert(self, info: TableInfo, table: FeatureTable) -> None:
        pq = need("pyarrow.parquet")
        rows = max(1, GROUP_BYTES * len(table) // max(1, table.features.nbytes))
        options = {"row_group_size": rows, "compression": "zstd", "write_page_checksum": True}
        with replacing(self.name) as part:
            pq.write_table(arrow_table(table, info), part, **options)


class LanceStore(TableStore):
    """A LanceDB table, in a folder; the filter is LanceDB's SQL."""

    def __init__(self, path: str, columns: Columns) -> None:
        super().__init__(f"lancedb://{path}", columns)
        folder, _, self._table_name = unquote(path).rpartition("/")
        if not folder or not self._table_name:
            raise InputError(f"{self.name} must be lancedb://FOLDER/TABLE.")
        self._folder = Path(folder)
        self._lancedb = need("lancedb")
        self._errors = (OSError, ValueError, RuntimeError, need("pyarrow").ArrowException)

    def _exists(self) -> bool:
        return (self._folder / f"{self._table_name}.lance").is_dir()

    def _open_table(self) -> Any:
        if not self._exists():
            raise InputError(f"{self.name} does not exist.")
        with reading(self.name, *self._errors):
            return self._lancedb.connect(self._folder).open_table(self._table_name)

    def _read_info(self) -> TableInfo | None:
        return info_of(self._open_table().schema, self.name)

    def _scan(self, info: TableInfo | None, batch_size: int) -> Iterator[dict[str, Any]]:
        table = self._open_table()
        chosen = self._choose(table.schema.names, vector_columns(table.schema), info)
        if info is not None:
            chosen |= {k: k.replace(".", DOT) for k in chosen.keys() & info.shapes.keys()}
        with reading(self.name, *self._errors):
            query = table.search().select(list(chosen.values()))
            query = query.where(self.columns.where) if self.columns.where else query
            yield from (read_batch(batch, chosen) for batch in query.to_batches(batch_size))

    def _insert(self, info: TableInfo, table: FeatureTable) -> None:
        rows = arrow_table(table, info, DOT)
        stored = self._open_table() if self._exists() else None
        try:
            if stored is None:
                self._lancedb.connect(self._folder).create_table(self._table_name, rows)
            else:
                merge = stored.merge_insert(ID).when_matched_update_all()
                merge.when_not_matched_insert_all().execute(rows)
        except self._errors as error:
            reason = reason_of(error)
            raise NotAvailableError(f"{self.name} cannot be written: {reason}.") from error


# Columns of Arrow.


def info_of(schema: Any, name: str) -> TableInfo | None:
    """Read what a file that mivhead wrote says about its features; None for any other file."""
    text = (schema.metadata or {}).get(METADATA)
    return None if text is None else TableInfo.read(text, name)


def vector_columns(schema: Any) -> list[str]:
    """Return the columns that hold vectors: lists of floats, or of lists of floats."""
    types = need("pyarrow").types

    def is_vector(kind: Any) -> bool:
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return types.is_floating(kind.value_type) or is_vector(kind.value_type)
        return False

    return [field.name for field in schema if is_vector(field.type)]


def arrow_table(table: FeatureTable, info: TableInfo, dot: str = ".") -> Any:
    """Return a table without copying it; `dot` replaces those in names."""
    pa = need("pyarrow")
    labels = table.labels or (None,) * len(table)
    columns = {ID: pa.array(table.ids, pa.string()), LABEL: pa.array(labels, pa.string())}
    for name, part in table.features.tensors.items():
        flat = np.ascontiguousarray(part).reshape(len(part), -1)
        values = pa.array(flat.reshape(-1))
        columns[name.replace(".", dot)] = pa.FixedSizeListArray.from_arrays(values, flat.shape[1])
    return pa.table(columns).replace_schema_metadata({METADATA: info.to_string()})


def read_batch(batch: Any, chosen: dict[str, str]) -> dict[str, Any]:
    """Return the chosen columns of a batch of Arrow, by what they hold."""
    columns = {role: batch.column(name) for role, name in chosen.items()}
    return {
        role: column.to_pylist() if role in (ID, LABEL) else _vectors(column)
        for role, column in columns.items()
    }


def _vectors(column: Any) -> Array | list[Array | None]:
    """Return vectors (n, width) at once, or those of each row, which may have several."""
    types = need("pyarrow").types
    flat = types.is_fixed_size_list(column.type) and types.is_floating(column.type.value_type)
    if flat and not column.null_count:
        values: Array = column.flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(column), column.type.list_size)
    return [_vector(row) for row in column]


def _vector(row: Any) -> Array | None:
    if not row.is_valid:
        return None
    values = row.values
    if hasattr(values.type, "value_type"):  # several vectors
        inner: Array = values.flatten().to_numpy(zero_copy_only=False)
        return inner.reshape(len(values), -1)
    numbers: Array = values.to_numpy(zero_copy_only=False)
    return numbers
