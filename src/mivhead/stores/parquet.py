"""Parquet files of embeddings, and folders of them.

A file that mivhead wrote has the columns of a table in a database (`mivhead.stores.base`): lists of
fixed size in the type of the features, and their shapes in the metadata of the schema. Other files
can be read as well, as long as they have a column of vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from mivhead._util.files import replacing
from mivhead._util.optional import need
from mivhead.errors import InputError, reading
from mivhead.features import FeatureTable
from mivhead.stores.arrow import from_arrow, is_vector, to_arrow
from mivhead.stores.base import (
    BATCH,
    ID,
    LABEL,
    POSITION,
    VIEW_OF,
    Columns,
    DatabaseStore,
    Rows,
    Stacker,
    TableInfo,
    check_ratio,
    rows_of,
    strings,
)

EXTRA = "batch"
METADATA = b"mivhead"
GROUP_ROWS, GROUP_BYTES = 2**16, 2**25  # of a row group
ERROR = "error"  # column of jobs over many images: why an image has no features


def _unpacked(metadata: Any) -> int:
    """Return how many bytes the columns take in memory, about: repetitions take none in a file."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return 4 * sum(int(g.column(i).num_values) for g in groups for i in range(g.num_columns))


class ParquetStore(DatabaseStore):
    """A Parquet file, or a folder of Parquet files; filters are not supported."""

    def __init__(self, path: str | Path, columns: Columns) -> None:
        super().__init__(str(path), columns)
        self._path = Path(path)
        if columns.where is not None:
            raise InputError(f"{path} is a Parquet file, which has no filter: omit where.")
        self._pq = need("pyarrow.parquet", EXTRA)

    def write(self, table: FeatureTable) -> None:
        """Write a new file; an existing one is replaced."""
        self._insert(TableInfo.of(table), rows_of(table, 0, BATCH))

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:  # noqa: ARG002  # the signature of all stores
        """Raise an error: a file is not changed."""
        raise InputError(
            f"{self.name} is a Parquet file, which is not changed: write the predictions to a new "
            "file with --job."
        )

    def _exists(self) -> bool:
        return self._path.exists()

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        files = sorted(self._path.glob("*.parquet"))
        if not files:
            raise InputError(f"The folder {self.name} holds no Parquet files.")
        return files

    @contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        """Open one file, and turn the errors of pyarrow into mivhead's."""
        if not path.is_file():
            # Reading a pipe could block.
            raise InputError(f"{path} {'is not a file' if path.exists() else 'does not exist'}.")
        with (
            reading(path, ValueError, RuntimeError),  # pyarrow's derive from these and OSError
            self._pq.ParquetFile(path, page_checksum_verification=True) as file,
        ):
            check_ratio(path, _unpacked(file.metadata))
            yield file

    def _read_info(self) -> TableInfo | None:
        with self._open(self._files()[0]) as file:
            return info_of(file.schema_arrow, self.name)

    def _scan(self, info: TableInfo | None, *, views: bool, batch_size: int) -> Iterator[Rows]:
        stacker, count = Stacker(self.name), 0
        for path in self._files():
            with self._open(path) as file:
                schema = file.schema_arrow
                if info_of(schema, str(path)) != info:
                    raise InputError(f"{path} holds other features than {self._files()[0]}.")
                vectors = self._vectors(info, partial(vector_columns, schema, self.name))
                names = schema.names
                id_column, label = self.columns.choose_id(names), self.columns.choose_label(names)
                own = [name for name in (VIEW_OF, POSITION, ERROR) if info and name in names]
                selected = [*filter(None, (id_column, label)), *own, *vectors]
                for batch in file.iter_batches(batch_size, columns=selected):
                    numbers = range(count, count + batch.num_rows)
                    count += batch.num_rows
                    columns = _kept(batch, numbers, views=views)
                    ids = strings(columns[id_column or _NUMBER].to_pylist())
                    if not ids:
                        continue
                    yield Rows(
                        ids,
                        {name: from_arrow(columns[name], name, ids, stacker) for name in vectors},
                        strings(columns[label].to_pylist()) if label else None,
                        columns[VIEW_OF].to_pylist() if VIEW_OF in own else None,
                        columns[POSITION].to_pylist() if POSITION in own else None,
                    )

    def _next_position(self) -> int:
        return 0

    def _insert(self, info: TableInfo, batches: Iterator[Rows]) -> None:
        pa = need("pyarrow", EXTRA)

        def tables() -> Iterator[Any]:
            for rows in batches:
                columns = {
                    ID: pa.array(rows.ids, pa.string()),
                    LABEL: pa.array(rows.labels or [None] * len(rows.ids), pa.string()),
                    VIEW_OF: pa.array(rows.view_of, pa.string()),
                    POSITION: pa.array(rows.positions, pa.int64()),
                    **{name: to_arrow(values) for name, values in rows.parts.items()},
                }
                yield pa.table(columns).replace_schema_metadata({METADATA: info.to_string()})

        found = tables()
        first = next(found)
        with replacing(self._path) as part:
            write_tables(part, first.schema, itertools.chain([first], found))


def write_tables(where: Any, schema: Any, tables: Iterable[Any]) -> None:
    """Write tables of Arrow to one file, a path or a binary file, with checksums.

    Small tables are joined to row groups of a useful size.
    """
    pa, pq = need("pyarrow", EXTRA), need("pyarrow.parquet", EXTRA)
    kept: list[Any] = []
    with pq.ParquetWriter(where, schema, compression="zstd", write_page_checksum=True) as writer:

        def flush() -> None:
            if kept:
                writer.write_table(pa.concat_tables(kept))
                kept.clear()

        for table in tables:
            kept.append(table.cast(schema))
            large = sum(each.nbytes for each in kept) >= GROUP_BYTES
            if large or sum(map(len, kept)) >= GROUP_ROWS:
                flush()
        flush()


def read_table(data: bytes) -> Any:
    """Read a file that `write_tables` wrote; its checksums are verified."""
    pq = need("pyarrow.parquet", EXTRA)
    return pq.read_table(BytesIO(data), page_checksum_verification=True)


_NUMBER = "row number"  # stands for the ids of a file that has none


def info_of(schema: Any, name: str) -> TableInfo | None:
    """Read what a file that mivhead wrote says about its features; None for any other file."""
    text = (schema.metadata or {}).get(METADATA)
    return None if text is None else TableInfo.read(text, name)


def vector_columns(schema: Any, name: str) -> list[str]:
    """Return the columns that hold vectors; raise an error if there are none."""
    found = [field.name for field in schema if is_vector(field.type)]
    if not found:
        raise InputError(
            f"{name} has no column of vectors (lists of floats); it has "
            f"{', '.join(schema.names[:8])}. If it holds images, predict them with --job."
        )
    return found


def _kept(batch: Any, numbers: range, *, views: bool) -> dict[str, Any]:
    """Return the columns of the images or of the views, without rows that have only an error."""
    pa, pc = need("pyarrow", EXTRA), need("pyarrow.compute", EXTRA)

    batch = batch.append_column(_NUMBER, pa.array(numbers))
    if VIEW_OF in batch.schema.names:
        chosen = pc.is_valid(batch[VIEW_OF]) if views else pc.is_null(batch[VIEW_OF])
        batch = batch.filter(chosen)
    elif views:
        batch = batch.slice(0, 0)
    if ERROR in batch.schema.names:
        batch = batch.filter(pc.is_null(batch[ERROR]))
    return dict(zip(batch.schema.names, batch.columns, strict=True))
