"""LanceDB tables: a database in a folder.

The parts of a block are the fields of a struct (`block0.map` is `map` in `block0`): flat lists of
fixed size in the type of the features, so that float16 values are stored exactly. Their shapes are
in the metadata of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mivhead._util.optional import need
from mivhead.errors import InputError, MivError
from mivhead.stores.arrow import from_arrow, is_vector, to_arrow
from mivhead.stores.base import (
    ID,
    LABEL,
    POSITION,
    VIEW_OF,
    Columns,
    DatabaseStore,
    Rows,
    Stacker,
    TableInfo,
    strings,
)

_METADATA = b"mivhead"


class LanceStore(DatabaseStore):
    """A LanceDB table; the filter is LanceDB's SQL."""

    def __init__(self, folder: str, table: str, columns: Columns) -> None:
        super().__init__(f"lancedb://{folder}/{table}", columns)
        self._folder = Path(folder)
        self._table_name = table
        self._lancedb = need("lancedb", "lancedb")
        self._pa = need("pyarrow", "lancedb")

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:
        """Write values, such as predictions, into columns, which are created if needed."""
        table = self._open_table()
        id_column = self.columns.choose_id(table.schema.names)
        if id_column is None:
            raise InputError(f"{self.name} has no column of ids: name one with `id`.")
        pa = self._pa
        known = pa.array(list(ids)).cast(table.schema.field(id_column).type)
        new = pa.table({id_column: known, **{k: pa.array(list(v)) for k, v in values.items()}})
        with self._explained():
            for name in values:
                if name not in table.schema.names:
                    kind = "string" if new.schema.field(name).type == pa.string() else "double"
                    table.add_columns({name: f"cast(NULL as {kind})"})
            table.merge_insert(id_column).when_matched_update_all().execute(new)

    def _exists(self) -> bool:
        return (self._folder / f"{self._table_name}.lance").is_dir()

    def _open_table(self) -> Any:
        if not self._exists():
            raise InputError(f"{self.name} does not exist.")
        with self._explained():
            return self._lancedb.connect(self._folder).open_table(self._table_name)

    def _read_info(self) -> TableInfo | None:
        text = (self._open_table().schema.metadata or {}).get(_METADATA)
        return None if text is None else TableInfo.read(text, self.name)

    def _next_position(self) -> int:
        if not self._exists():
            return 0
        table = self._open_table()
        return 1 + max(
            (max(batch.column(POSITION).to_pylist()) for batch in _read(table, [POSITION], None)),
            default=-1,
        )

    def _scan(self, info: TableInfo | None, *, views: bool, batch_size: int) -> Iterator[Rows]:
        table = self._open_table()
        names = table.schema.names
        vectors = self._vectors(info, lambda: [f.name for f in table.schema if is_vector(f.type)])
        id_column, label = self.columns.choose_id(names), self.columns.choose_label(names)
        own = [] if info is None else [VIEW_OF, POSITION]
        selected = [*filter(None, (id_column, label)), *own, *vectors]
        stacker = Stacker(self.name)
        count = 0
        with self._explained():
            for batch in _read(table, selected, self._where(info, views), batch_size):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                numbers = range(count, count + batch.num_rows)
                ids = strings(columns[id_column].to_pylist() if id_column else numbers)
                count += batch.num_rows
                yield Rows(
                    ids,
                    {name: from_arrow(columns[name], name, ids, stacker) for name in vectors},
                    strings(columns[label].to_pylist()) if label else None,
                    columns[VIEW_OF].to_pylist() if own else None,
                    columns[POSITION].to_pylist() if own else None,
                )

    def _where(self, info: TableInfo | None, views: bool) -> str | None:
        if info is None:
            return self.columns.where
        if views:
            return f"{VIEW_OF} IS NOT NULL"
        given = f" AND ({self.columns.where})" if self.columns.where else ""
        return f"{VIEW_OF} IS NULL{given}"

    def _insert(self, info: TableInfo, batches: Iterator[Rows]) -> None:
        with self._explained():
            table = self._open_table() if self._exists() else None
            for rows in batches:
                data = self._as_arrow(rows, info)
                if table is None:
                    database = self._lancedb.connect(self._folder)
                    table = database.create_table(self._table_name, data)
                    continue
                if rows.view_of and rows.view_of[0] is None:  # images: replaced
                    listed = ", ".join("'" + each.replace("'", "''") + "'" for each in rows.ids)
                    table.delete(f"{ID} IN ({listed}) OR {VIEW_OF} IN ({listed})")
                table.add(data)

    def _as_arrow(self, rows: Rows, info: TableInfo) -> Any:
        pa = self._pa
        blocks: dict[str, dict[str, Any]] = {}
        for name, part in rows.parts.items():
            block, _, field = name.partition(".")
            blocks.setdefault(block, {})[field] = to_arrow(part)
        labels = rows.labels or [None] * len(rows.ids)
        columns = {
            ID: pa.array(rows.ids, pa.string()),
            LABEL: pa.array(labels, pa.string()),
            VIEW_OF: pa.array(rows.view_of, pa.string()),
            POSITION: pa.array(rows.positions, pa.int64()),
        }
        for block, fields in blocks.items():
            columns[block] = pa.StructArray.from_arrays(list(fields.values()), list(fields))
        return pa.table(columns).replace_schema_metadata({_METADATA: info.to_string()})

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn LanceDB's errors (a wrong filter, a corrupted table) into mivhead's."""
        try:
            yield
        except (ValueError, RuntimeError, OSError, self._pa.ArrowException) as error:
            if isinstance(error, MivError):
                raise
            raise InputError(f"{self.name}: {str(error).partition(', /')[0]}.") from error


def _read(table: Any, columns: list[str], where: str | None, batch_size: int = 4096) -> Any:
    query = table.search().select(columns)
    return (query.where(where) if where else query).to_batches(batch_size)
