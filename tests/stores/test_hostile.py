"""Tables that a stranger wrote: text is text, and numbers are finite or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mivhead import Features, stores
from mivhead.cli.main import main
from mivhead.errors import InputError, MivError
from mivhead.stores import FeatureTable

Address = Callable[[str], str]
HOSTILE = (
    "'; DROP TABLE birds; --",
    '" OR ""=""',
    "\x1b[2J\x1b]0;owned\x07",
    "../../../etc/passwd",
    "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>",
    "two\nlines\r\tand a tab",
    "%s %n {0.__class__} $(id) `id`",
    "null",
    "\u202egnp.exe",
    "x" * 5000,
    '{"$ref": "file:///etc/passwd"}',
)


def vectors(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)


def test_text_is_kept_as_it_is_and_runs_nothing(address: Address) -> None:
    uri = address("birds")
    table = FeatureTable(Features(vectors(len(HOSTILE))), HOSTILE, tuple(reversed(HOSTILE)))
    with stores.open(uri) as store:
        store.write(table)
    with stores.open(uri) as store:
        found = store.read()
        assert dict(zip(found.ids, found.labels or (), strict=True)) == dict(
            zip(table.ids, table.labels or (), strict=True)
        )
        store.annotate(list(HOSTILE), {"name": list(HOSTILE)})
    with stores.open(uri, label="name") as store:
        named = store.read()
    assert named.ids == named.labels
    assert set(named.ids) == set(HOSTILE)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_columns_and_tables_run_nothing(address: Address, name: str) -> None:
    """Whatever a name is taken for, the table next to it is as before."""
    uri = address("birds")
    table = FeatureTable(Features(vectors(3)), ("a", "b", "c"), ("x", "y", "x"))
    with stores.open(uri) as store:
        store.write(table)
    for how in ({"label": name}, {"id": name}, {"vectors": [name]}, {"where": name}):
        with suppress(MivError), stores.open(uri, **how) as store:  # type: ignore[arg-type]
            store.read()
    with stores.open(uri) as store:
        assert sorted(store.read().ids) == ["a", "b", "c"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(lancedb_address: Address, value: float) -> None:
    import lancedb
    import pyarrow as pa

    uri = lancedb_address("birds")
    rows = vectors(4)
    rows[2, 3] = value
    folder, _, name = uri.removeprefix("lancedb://").rpartition("/")
    column = pa.array(rows.tolist(), pa.list_(pa.float32(), 6))
    lancedb.connect(folder).create_table(name, pa.table({"id": list("abcd"), "v": column}))
    with (
        stores.open(uri) as store,
        pytest.raises(InputError, match=r"NaN or infinity \(first in image 2\)"),
    ):
        store.read()


def test_a_model_of_it_prints_no_control_characters(
    address: Address, tmp_path: Path, capsys: Any
) -> None:
    uri = address("birds")
    labels = [name for name in HOSTILE if len(name) < 100] * 2
    ids = tuple(f"{i} {label}" for i, label in enumerate(labels))
    with stores.open(uri) as store:
        store.write(FeatureTable(Features(vectors(len(ids))), ids, tuple(labels)))
    path = tmp_path / "m.miv"
    code = main(["fit", uri, "-o", str(path), "--method", "ncc"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert main(["predict", str(path), uri]) == 0
    assert main(["info", str(path)]) == 0
    printed = printed.out + printed.err + "".join(capsys.readouterr())
    assert not {c for c in printed if not c.isprintable()} - {"\n"}
