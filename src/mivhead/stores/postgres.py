"""PostgreSQL tables with the extension pgvector.

Tokens are stored as `halfvec` or `vector`, so that the database can search them; maps, which are
larger than these types allow, as `bytea`, in little-endian order. Both are exact. The comment on
the table holds the `TableInfo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np

from mivhead._util.optional import need
from mivhead.errors import InputError, NotAvailableError
from mivhead.stores.base import (
    ID,
    LABEL,
    POSITION,
    VIEW_OF,
    Array,
    Columns,
    DatabaseStore,
    Rows,
    Stacker,
    TableInfo,
    strings,
)

_EXTRA = "pgvector"
_VECTORS = ("vector", "halfvec", "_float4", "_float8")  # types that hold a vector
_SEARCHABLE = {"float16": "halfvec", "float32": "vector"}
_MAX_WIDTH = 16_000  # of both
_MARK = "mivhead:"  # prefix of the comment on a table that mivhead created


class PostgresStore(DatabaseStore):
    """A PostgreSQL table; the filter is SQL.

    Keep a password in `~/.pgpass` or `PGPASSWORD`, not in the address. Options are `table`
    (optionally with its schema, `birds.shots`), and those of libpq such as `sslmode`.
    """

    def __init__(self, server: str, options: Mapping[str, str], columns: Columns) -> None:
        parts = urlsplit(server)
        table = options.get("table")
        place = f"postgresql://{parts.hostname or ''}{parts.path}"
        if not table:
            raise InputError(f"{place} needs the name of a table: add `?table=NAME`.")
        super().__init__(f"{place}?table={table}", columns)
        rest = {key: value for key, value in options.items() if key != "table"}
        self._address = f"{server}?{urlencode(rest)}" if rest else server
        self._psycopg = need("psycopg", _EXTRA)
        self._pgvector = need("pgvector.psycopg", _EXTRA)
        self._table_name = self._psycopg.sql.Identifier(*table.split("."))
        self._plain_name = self._table_name.as_string(None)

    @classmethod
    def from_address(
        cls, address: str, options: Mapping[str, str], columns: Columns
    ) -> PostgresStore:
        """Open `postgresql://USER@HOST/DATABASE?table=NAME`."""
        return cls(address, options, columns)

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:
        """Write values, such as predictions, into columns, which are created if needed."""
        sql = self._psycopg.sql
        with self._connection() as connection:
            types = self._types(connection)
            id_column = self.columns.choose_id(list(types))
            if id_column is None:
                raise InputError(f"{self.name} has no column of ids: name one with `id`.")
            for name, column in values.items():
                kind = "text" if column and isinstance(column[0], str) else "double precision"
                statement = "ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} " + kind
                connection.execute(self._sql(statement, sql.Identifier(name)))
            assignment = sql.SQL("{} = %s")
            changes = sql.SQL(", ").join(assignment.format(sql.Identifier(n)) for n in values)
            id_type = sql.Identifier(types[id_column])
            update = self._sql(
                "UPDATE {} SET {} WHERE {} = %s::{}", changes, sql.Identifier(id_column), id_type
            )
            with connection.cursor() as cursor:
                cursor.executemany(update, list(zip(*values.values(), ids, strict=True)))

    def _sql(self, statement: str, *parts: Any) -> Any:
        """Fill in the table and other names, quoted."""
        return self._psycopg.sql.SQL(statement).format(self._table_name, *parts)

    def _exists(self) -> bool:
        with self._connection() as connection:
            return bool(self._types(connection))

    def _types(self, connection: Any) -> dict[str, str]:
        """Return the columns of the table and their types; empty if there is no table."""
        rows = connection.execute(
            "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [self._plain_name],
        )
        return dict(rows.fetchall())

    def _read_info(self) -> TableInfo | None:
        with self._connection() as connection:
            if not self._types(connection):
                raise InputError(f"{self.name} does not exist.")
            query = "SELECT obj_description(to_regclass(%s), 'pg_class')"
            comment = connection.execute(query, [self._plain_name]).fetchone()[0] or ""
        if not comment.startswith(_MARK):
            return None
        return TableInfo.read(comment.removeprefix(_MARK), self.name)

    def _next_position(self) -> int:
        if not self._exists():
            return 0
        with self._connection() as connection:
            last = self._sql("SELECT max({1}) FROM {0}", self._psycopg.sql.Identifier(POSITION))
            position: int | None = connection.execute(last).fetchone()[0]
            return 0 if position is None else position + 1

    def _scan(self, info: TableInfo | None, *, views: bool, batch_size: int) -> Iterator[Rows]:
        with self._connection() as connection:
            types = self._types(connection)
            vectors = self._vectors(
                info, lambda: [name for name, kind in types.items() if kind in _VECTORS]
            )
            id_column = self.columns.choose_id(list(types))
            label = self.columns.choose_label(list(types))
            own = [] if info is None else [VIEW_OF, POSITION]
            selected = [*filter(None, (id_column, label)), *own, *vectors]
            stacker = Stacker(self.name)
            count = 0
            with connection.cursor(name="mivhead", binary=True) as cursor:
                cursor.execute(self._query(selected, info, views, id_column))
                while batch := cursor.fetchmany(batch_size):
                    columns = dict(zip(selected, zip(*batch, strict=True), strict=True))
                    numbers = range(count, count + len(batch))
                    ids = strings(columns[id_column] if id_column else numbers)
                    count += len(batch)
                    kind = None if info is None else info.dtype
                    yield Rows(
                        ids,
                        {
                            name: stacker.stack(name, ids, [_array(v, kind) for v in columns[name]])
                            for name in vectors
                        },
                        strings(columns[label]) if label else None,
                        list(columns[VIEW_OF]) if own else None,
                        list(columns[POSITION]) if own else None,
                    )

    def _query(
        self,
        selected: Sequence[str],
        info: TableInfo | None,
        views: bool,
        id_column: str | None,
    ) -> Any:
        sql = self._psycopg.sql
        names = sql.SQL(", ").join(map(sql.Identifier, selected))
        conditions = []
        if info is not None:
            is_view = "{} IS NOT NULL" if views else "{} IS NULL"
            conditions.append(sql.SQL(is_view).format(sql.Identifier(VIEW_OF)))
        if self.columns.where and not views:
            conditions.append(sql.SQL("({})").format(sql.SQL(self.columns.where)))
        query = self._sql("SELECT {1} FROM {0}", names)
        if conditions:
            query += sql.SQL(" WHERE ") + sql.SQL(" AND ").join(conditions)
        order = POSITION if info is not None else id_column
        return query + sql.SQL(" ORDER BY {}").format(sql.Identifier(order)) if order else query

    def _insert(self, info: TableInfo, batches: Iterator[Rows]) -> None:
        sql = self._psycopg.sql
        parts = list(info.shapes)
        names = [ID, LABEL, VIEW_OF, POSITION, *parts]
        statement = self._sql(
            "INSERT INTO {} ({}) VALUES ({})",
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.SQL(", ").join([sql.Placeholder()] * len(names)),
        )
        replaced = self._sql(
            "DELETE FROM {} WHERE {} = ANY(%s) OR {} = ANY(%s)", *map(sql.Identifier, (ID, VIEW_OF))
        )
        with self._connection() as connection:
            if not self._types(connection):
                self._create(connection, info)
            cursor = connection.cursor()  # after the vector types are registered
            for rows in batches:
                if rows.view_of and rows.view_of[0] is None:  # images: replaced
                    cursor.execute(replaced, [rows.ids, rows.ids])
                stored = [[self._value(part, info) for part in rows.parts[n]] for n in parts]
                labels = rows.labels or [None] * len(rows.ids)
                columns = (rows.ids, labels, rows.view_of or (), rows.positions or (), *stored)
                cursor.executemany(statement, list(zip(*columns, strict=True)))

    def _create(self, connection: Any, info: TableInfo) -> None:
        columns = [f"{{}} {_column_type(info, name)}" for name in info.shapes]
        statement = (
            "CREATE TABLE {} ({} text PRIMARY KEY, {} text, {} text, {} bigint NOT NULL, "
            + ", ".join(columns)
            + ")"
        )
        names = (ID, LABEL, VIEW_OF, POSITION, *info.shapes)
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        self._pgvector.register_vector(connection)
        sql = self._psycopg.sql
        connection.execute(self._sql(statement, *map(sql.Identifier, names)))
        comment = sql.Literal(_MARK + info.to_string())
        connection.execute(self._sql("COMMENT ON TABLE {} IS {}", comment))

    def _value(self, part: Array, info: TableInfo) -> Any:
        """Return one image's part in the form that its column stores."""
        if part.ndim == 1 and part.size <= _MAX_WIDTH and info.dtype in _SEARCHABLE:
            name = "HalfVector" if info.dtype == "float16" else "Vector"
            return getattr(need("pgvector", _EXTRA), name)(part)
        return np.ascontiguousarray(part, _little(info.dtype)).tobytes()

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Connect, commit or roll back, and turn the database's errors into mivhead's."""
        try:
            with self._psycopg.connect(self._address) as connection:
                if self._psycopg.types.TypeInfo.fetch(connection, "vector") is not None:
                    self._pgvector.register_vector(connection)
                yield connection
        except self._psycopg.OperationalError as error:
            raise NotAvailableError(f"{self.name} cannot be reached: {_reason(error)}.") from error
        except self._psycopg.Error as error:
            raise InputError(f"{self.name}: {_reason(error)}.") from error


def _column_type(info: TableInfo, name: str) -> str:
    shape = info.shapes[name]
    if len(shape) == 1 and shape[0] <= _MAX_WIDTH and info.dtype in _SEARCHABLE:
        return f"{_SEARCHABLE[info.dtype]}({int(shape[0])})"
    return "bytea"


def _array(value: Any, dtype: str | None) -> Array | None:
    """Read a value of any type that holds vectors."""
    if value is None:
        return None
    if isinstance(value, bytes) and dtype is not None:
        return np.frombuffer(value, _little(dtype))
    if hasattr(value, "to_numpy"):  # of pgvector
        vector: Array = value.to_numpy()
        return vector
    return np.asarray(value, np.float64)


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
