"""Tables that someone else made: their columns, their widths, their gaps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mivhead import Features, FeatureTable, stores
from mivhead.errors import InputError, NotAvailableError

Address = Callable[[str], str]
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(4, 6)).astype(np.float32)
PATCHES = RNG.normal(size=(4, 9, 6)).astype(np.float16)
SPECIES = ["wren", "robin", "wren", "owl"]


def make_lance(address: str, columns: dict[str, Any]) -> None:
    import lancedb
    import pyarrow as pa

    folder, _, table = address.removeprefix("lancedb://").rpartition("/")
    lancedb.connect(folder).create_table(table, pa.table(columns))


def lists(values: np.ndarray, kind: Any, *sizes: int) -> Any:
    import pyarrow as pa

    for size in reversed(sizes):
        kind = pa.list_(kind, size)
    return pa.array(values.tolist(), kind)


def test_lancedb_vectors_and_multi_vectors(lancedb_address: Address) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    columns = {
        "file": [f"{i}.jpg" for i in range(4)],
        "species": SPECIES,
        "vector": lists(VECTORS, pa.float32(), 6),
        "patches": lists(PATCHES, pa.float16(), -1, 6),  # LanceDB's multi-vectors
        "grid": lists(PATCHES, pa.float16(), 9, 6),
    }
    make_lance(uri, columns)
    assert str(columns["patches"].type).startswith("list<")
    store = stores.open(f"{uri}?id=file&label=species&vectors=patches,vector,grid")
    found = store.read()
    assert found.features == Features([PATCHES, VECTORS, PATCHES])
    assert found.features.layout["block0.map"] == (6, 3, 3)
    assert (found.ids, found.labels) == (tuple(columns["file"]), tuple(SPECIES))
    with pytest.raises(InputError, match="vector, patches, grid"):
        stores.open(uri).read()
    with pytest.raises(InputError, match=r"label must be one of .*Did you mean 'species'"):
        stores.open(uri, label="specie", vectors=["vector"]).read()
    with pytest.raises(InputError, match="other data"):
        store.write(FeatureTable(Features(VECTORS), ("a", "b", "c", "d")))


def test_lancedb_ids(lancedb_address: Address) -> None:
    import pyarrow as pa

    vectors = lists(VECTORS, pa.float32(), 6)
    make_lance(lancedb_address("none"), {"embedding": vectors, "n": [1, 2, 3, 4]})
    assert stores.open(lancedb_address("none"), where="n > 1").read().ids == ("0", "1", "2")
    make_lance(lancedb_address("numbers"), {"id": [7, 8, 9, 10], "embedding": vectors})
    assert stores.open(lancedb_address("numbers")).read().ids == ("7", "8", "9", "10")


@pytest.mark.parametrize("last", [[5.0], None])
def test_lancedb_rows_that_do_not_fit_are_named(lancedb_address: Address, last: Any) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    ragged = pa.array([[1.0, 2.0], [3.0, 4.0], last], pa.list_(pa.float32()))
    make_lance(uri, {"id": ["a", "b", "c"], "measures": ragged})
    with pytest.raises(InputError, match="row 'c'"):
        stores.open(uri).read()
    assert len(stores.open(uri, where="id < 'c'").read()) == 2


def run_sql(postgres: str, *statements: str) -> None:
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        for statement in statements:
            connection.execute(statement)


def test_postgres_types_names_and_order(postgres: str, postgres_address: Address) -> None:
    rows = ", ".join(
        f"({i}, '{SPECIES[i]}', '{VECTORS[i].tolist()}', '{VECTORS[i].tolist()}', "
        f"ARRAY{VECTORS[i].tolist()})"
        for i in reversed(range(4))
    )
    run_sql(
        postgres,
        "CREATE SCHEMA zoo",
        'CREATE TABLE zoo."Birds; --" (key int, "the ""name""" text, v vector(6), h halfvec(6), '
        "a real[])",
        f'INSERT INTO zoo."Birds; --" VALUES {rows}',
    )
    try:
        store = stores.open(
            postgres_address("zoo.Birds; --"),
            id="key",
            label='the "name"',
            vectors=["v", "h", "a"],
            where="key < 3",
        )
        found = store.read()
        assert found.ids == ("0", "1", "2")
        assert found.labels == tuple(SPECIES[:3])
        expected = [VECTORS[:3], VECTORS[:3].astype(np.float16), VECTORS[:3].astype(np.float64)]
        assert found.features == Features(expected)
    finally:
        run_sql(postgres, "DROP SCHEMA zoo CASCADE")


def test_postgres_troubles() -> None:
    pytest.importorskip("psycopg", reason="the extra pgvector is not installed")
    with pytest.raises(InputError, match=r"\?table=NAME"):
        stores.open("postgresql://localhost/birds")
    with pytest.raises(NotAvailableError, match="cannot be reached") as error:
        stores.open("postgresql://me:secret@127.0.0.1:1/birds?table=x&connect_timeout=1").read()
    assert "secret" not in str(error.value)
