"""Tables that someone else made: their columns, their widths, their gaps."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mivhead import Features, stores
from mivhead.errors import InputError, NotAvailableError
from mivhead.stores import FeatureTable

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
    with pytest.raises(InputError, match="not created by mivhead"):
        store.write(FeatureTable(Features(VECTORS), ("a", "b", "c", "d")))


def test_lancedb_rows_without_ids_are_counted(lancedb_address: Address) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    make_lance(uri, {"embedding": lists(VECTORS, pa.float32(), 6), "n": [1, 2, 3, 4]})
    assert stores.open(uri, where="n > 1").read().ids == ("0", "1", "2")
    with pytest.raises(InputError, match="no column of ids"):
        stores.open(uri).annotate(["0"], {"name": ["x"]})


def test_lancedb_numbers_as_ids(lancedb_address: Address) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    make_lance(uri, {"id": [7, 8, 9, 10], "embedding": lists(VECTORS, pa.float32(), 6)})
    store = stores.open(uri)
    assert store.read().ids == ("7", "8", "9", "10")
    store.annotate(["9", "7"], {"name": ["nine", "seven"]})
    found = stores.open(uri, label="name", where="name IS NOT NULL").read()
    assert dict(zip(found.ids, found.labels or (), strict=True)) == {"7": "seven", "9": "nine"}


def test_lancedb_mixed_widths_name_the_row(lancedb_address: Address) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    ragged = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0]], pa.list_(pa.float32()))
    make_lance(uri, {"id": ["a", "b", "c"], "measures": ragged})
    message = r"row 'c' of lancedb://.* has 1 values in the column 'measures', .* have 2"
    with pytest.raises(InputError, match=message):
        stores.open(uri).read()
    with pytest.raises(InputError, match=message):  # also if it comes in a later batch
        list(stores.open(uri).iter_batches(batch_size=1))
    assert len(stores.open(uri, where="id < 'c'").read()) == 2


def test_lancedb_gaps_name_the_row(lancedb_address: Address) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    holes = pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))
    make_lance(uri, {"id": ["a", "b"], "label": ["x", None], "embedding": holes})
    with pytest.raises(InputError, match=r"row 'b' .* has no vector"):
        stores.open(uri).read()


def test_lancedb_a_wrong_filter(lancedb_address: Address) -> None:
    import pyarrow as pa

    uri = lancedb_address("birds")
    make_lance(uri, {"embedding": lists(VECTORS, pa.float32(), 6)})
    with pytest.raises(InputError, match=r"lancedb://.*nonsense"):
        stores.open(uri, where="nonsense = 1").read()


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
        store.annotate(["1"], {'x"; DROP TABLE y': ["a"]})
        assert stores.open(
            f"{postgres_address('zoo.Birds; --')}&id=key&vectors=v&where=key=1",
            label='x"; DROP TABLE y',
        ).read().labels == ("a",)
    finally:
        run_sql(postgres, "DROP SCHEMA zoo CASCADE")


def test_postgres_mixed_widths_name_the_row(postgres: str, postgres_address: Address) -> None:
    run_sql(
        postgres,
        "CREATE TABLE birds (id text, v vector)",
        "INSERT INTO birds VALUES ('a', '[1,2]'), ('b', '[1,2,3]')",
    )
    with pytest.raises(InputError, match=r"row 'b' .* has 3 values .* have 2"):
        stores.open(postgres_address("birds")).read()


def test_postgres_troubles(postgres_address: Address) -> None:
    with pytest.raises(InputError, match=r"\?table=NAME"):
        stores.open("postgresql://localhost/birds")
    with pytest.raises(NotAvailableError, match="cannot be reached") as error:
        stores.open("postgresql://me:secret@127.0.0.1:1/birds?table=x&connect_timeout=1").read()
    assert "secret" not in str(error.value)
    store = stores.open(postgres_address("birds"), where="nonsense = 1")
    store.write(FeatureTable(Features(VECTORS), ("a", "b", "c", "d")))
    with pytest.raises(InputError, match=r"column \"nonsense\" does not exist"):
        store.read()


def make_qdrant(address: str, distance: str, named: bool) -> None:
    from qdrant_client import QdrantClient, models

    folder, _, collection = address.removeprefix("qdrant://").rpartition("/")
    client = QdrantClient(path=folder)
    params = models.VectorParams(size=6, distance=models.Distance[distance])
    client.create_collection(collection, {"clip": params} if named else params)
    points = [
        models.PointStruct(
            id=i + 10,
            vector={"clip": row.tolist()} if named else row.tolist(),
            payload={"species": SPECIES[i]},
        )
        for i, row in enumerate(VECTORS)
    ]
    client.upsert(collection, points)
    client.close()


@pytest.mark.parametrize("named", [False, True])
def test_qdrant_collections(qdrant_address: Address, named: bool) -> None:
    uri = qdrant_address("birds")
    make_qdrant(uri, "EUCLID", named)
    with stores.open(uri, label="species") as store:
        found = store.read()
        assert found.ids == ("10", "11", "12", "13")
        assert found.labels == tuple(SPECIES)
        assert found.features == Features(VECTORS)
        store.annotate(found.ids, {"name": ["a", "b", "c", "d"]})
    with stores.open(f"{uri}?label=name") as store:
        assert store.read().labels == ("a", "b", "c", "d")


def test_qdrant_cosine_is_told(qdrant_address: Address, caplog: pytest.LogCaptureFixture) -> None:
    make_qdrant(qdrant_address("birds"), "COSINE", named=False)
    with stores.open(qdrant_address("birds")) as store:
        found = store.read()
    norms = np.linalg.norm(found.features.tensors["block0.token"], axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)
    assert "normalised" in caplog.records[-1].message
    assert caplog.records[-1].levelno == logging.WARNING
    with (
        stores.open(qdrant_address("birds")) as store,
        pytest.raises(InputError, match="not created by mivhead"),
    ):
        store.write(FeatureTable(Features(VECTORS), ("a", "b", "c", "d")))


# Qdrant's client leaves the lock file open that it could not lock.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_qdrant_troubles(qdrant_address: Address) -> None:
    with pytest.raises(InputError, match="must be a Qdrant filter"):
        stores.open(qdrant_address("birds"), where="label = 'x'")
    with stores.open(qdrant_address("birds")) as store:
        with pytest.raises(InputError, match="float64"):
            store.write(FeatureTable(Features(VECTORS.astype(np.float64)), ("a", "b", "c", "d")))
        store.write(FeatureTable(Features(VECTORS), ("a", "b", "c", "d")))
        with pytest.raises(NotAvailableError, match="already"):
            stores.open(qdrant_address("birds")).read()
    with pytest.raises(NotAvailableError, match="cannot be reached"):
        stores.open("qdrant://http://127.0.0.1:1/birds").read()
