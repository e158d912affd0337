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

from mivhead._util.imports import need
from mivhead.errors import InputError, NotAvailableError, reason_of
from mivhead.features import FeatureTable
from mivhead.stores.base import ID, LABEL, Array, Columns, TableInfo, TableStore

_VECTORS = ("vector", "halfvec", "_float4", "_float8")  # types that hold a vector
_SEARCHABLE = {"float16": "halfvec", "float32": "vector"}
_MAX_WIDTH = 16_000  # of both
_MARK = "mivhead:"  # prefix of the comment on a table that mivhead created


class PostgresStore(TableStore):
    """A PostgreSQL table; the filter is SQL.

    Keep a password in `~/.pgpass` or `PGPASSWORD`, not in the URL. Options are `table` (optionally
    with its schema, `birds.shots`), and those of libpq such as `sslmode`.
    """

    def __init__(self, server: str, options: Mapping[str, str], columns: Columns) -> None:
        parts = urlsplit(server)
        table = options.get("table")
        place = f"postgresql://{parts.hostname or ''}{parts.path}"
        if not table:
            raise InputError(f"{place} needs the name of a table: add `?table=NAME`.")
        super().__init__(f"{place}?table={table}", columns)
        rest = {key: value for key, value in options.items() if key != "table"}
        self._url = f"{server}?{urlencode(rest)}" if rest else server
        self._psycopg = need("psycopg")
        self._pgvector = need("pgvector.psycopg")
        self._table_name = self._psycopg.sql.Identifier(*table.split("."))
        self._plain_name = self._table_name.as_string(None)

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

    def _scan(self, info: TableInfo | None, batch_size: int) -> Iterator[dict[str, Any]]:
        sql = self._psycopg.sql
        dtype = None if info is None else info.dtype
        with self._connection() as connection:
            types = self._types(connection)
            vectors = [name for name, kind in types.items() if kind in _VECTORS]
            chosen = self._choose(list(types), vectors, info)
            names = sql.SQL(", ").join(map(sql.Identifier, chosen.values()))
            query = self._sql("SELECT {1} FROM {0}", names)
            if self.columns.where:
                query += sql.SQL(" WHERE ") + sql.SQL(self.columns.where)
            if ID in chosen:
                query += sql.SQL(" ORDER BY {}").format(sql.Identifier(chosen[ID]))
            with connection.cursor(name="mivhead", binary=True) as cursor:
                cursor.execute(query)
                while batch := cursor.fetchmany(batch_size):
                    columns = zip(chosen, zip(*batch, strict=True), strict=True)
                    yield {
                        role: cells if role in (ID, LABEL) else [_array(v, dtype) for v in cells]
                        for role, cells in columns
                    }

    def _insert(self, info: TableInfo, table: FeatureTable) -> None:
        sql = self._psycopg.sql
        names = [ID, LABEL, *info.shapes]
        kinds = ["text PRIMARY KEY", "text", *(_kind(s, info.dtype) for s in info.shapes.values())]
        identifiers = [sql.Identifier(name) for name in names]
        statement = self._sql(
            "INSERT INTO {} ({}) VALUES ({})",
            sql.SQL(", ").join(identifiers),
            sql.SQL(", ").join([sql.Placeholder()] * len(names)),
        )
        with self._connection() as connection:
            if not self._types(connection):
                columns = ", ".join(f"{{}} {kind}" for kind in kinds)
                comment = sql.Literal(_MARK + info.to_string())
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                connection.execute(self._sql(f"CREATE TABLE {{}} ({columns})", *identifiers))
                connection.execute(self._sql("COMMENT ON TABLE {} IS {}", comment))
                self._pgvector.register_vector(connection)
            cursor = connection.cursor()  # after the vector types are registered
            cursor.execute(self._sql(f"DELETE FROM {{}} WHERE {ID} = ANY(%s)"), [list(table.ids)])
            parts = [
                map(_bytes, part) if kind == "bytea" else part
                for kind, part in zip(kinds[2:], table.features.tensors.values(), strict=True)
            ]
            labels = table.labels or (None,) * len(table)
            cursor.executemany(statement, zip(table.ids, labels, *parts, strict=True))

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Connect, commit or roll back, and turn the database's errors into mivhead's."""
        try:
            with self._psycopg.connect(self._url) as connection:
                if self._psycopg.types.TypeInfo.fetch(connection, "vector") is not None:
                    self._pgvector.register_vector(connection)
                yield connection
        except self._psycopg.OperationalError as error:
            reason = reason_of(error)
            raise NotAvailableError(f"{self.name} cannot be reached: {reason}.") from error
        except self._psycopg.Error as error:
            raise InputError(f"{self.name}: {reason_of(error)}.") from error


def _kind(shape: Sequence[int], dtype: str) -> str:
    """Return the type of the column for a part of this shape."""
    searchable = len(shape) == 1 and shape[0] <= _MAX_WIDTH and dtype in _SEARCHABLE
    return f"{_SEARCHABLE[dtype]}({int(shape[0])})" if searchable else "bytea"


def _bytes(row: Array) -> bytes:
    return np.ascontiguousarray(row, row.dtype.newbyteorder("<")).tobytes()


def _array(value: Any, dtype: str | None) -> Array | None:
    """Read a value of any type that holds vectors."""
    if value is None:
        return None
    if isinstance(value, bytes) and dtype is not None:
        return np.frombuffer(value, np.dtype(dtype).newbyteorder("<"))
    if hasattr(value, "to_numpy"):  # of pgvector
        vector: Array = value.to_numpy()
        return vector
    return np.asarray(value, np.float64)
