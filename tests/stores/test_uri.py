"""Addresses of stores, files, and extras that are not installed."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mivhead import Features, stores
from mivhead.errors import InputError, NotAvailableError
from mivhead.stores import FeatureTable
from tests.helpers.extras import Blocked


def table() -> FeatureTable:
    views = Features(np.ones((2, 3), np.float16))
    features = Features(np.arange(15, dtype=np.float16).reshape(5, 3))
    return FeatureTable(
        features, tuple("abcde"), tuple("xyxyx"), views, np.array([0, 4]), {"name": "mine"}
    )


def test_a_file_is_a_store(tmp_path: Path) -> None:
    with stores.open(tmp_path / "features.safetensors") as store:
        store.write(table())
        found = store.read()
        batches = list(store.iter_batches(batch_size=2))
    assert found.features == table().features
    assert found.views == table().views
    assert [each.ids for each in batches] == [("a", "b"), ("c", "d"), ("e",)]
    assert [each.labels for each in batches] == [("x", "y"), ("x", "y"), ("x",)]
    assert Features.concat([each.features for each in batches]) == table().features
    assert all(each.views is None and each.backbone == {"name": "mine"} for each in batches)
    with pytest.raises(InputError, match="cannot hold predictions"):
        store.annotate(["a"], {"name": ["x"]})


def test_a_file_has_no_filter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no filter"):
        stores.open(tmp_path / "features.safetensors", where="id = 'a'")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("lancdb://data/birds", "one of lancedb, postgresql, qdrant; .*Did you mean 'lancedb'"),
        ("lancedb://birds", "lancedb://FOLDER/TABLE"),
        ("lancedb://data/", "lancedb://FOLDER/TABLE"),
        ("qdrant://birds", "qdrant://FOLDER/TABLE"),
        ("lancedb://data/birds?lable=x", "option of lancedb .*Did you mean 'label'"),
    ],
)
def test_wrong_addresses(uri: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        stores.open(uri)


@pytest.mark.parametrize(
    ("uri", "module", "extra"),
    [
        ("lancedb://data/birds", "lancedb", "lancedb"),
        ("postgresql://localhost/db?table=birds", "psycopg", "pgvector"),
        ("postgres://localhost/db?table=birds", "psycopg", "pgvector"),
        ("qdrant://data/birds", "qdrant_client", "qdrant"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, uri: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocked(module), *sys.meta_path])
    with pytest.raises(NotAvailableError) as error:
        stores.open(uri)
    assert f'pip install "mivhead[{extra}]"' in str(error.value)
