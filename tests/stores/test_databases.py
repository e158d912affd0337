"""What every database does alike: rows go in and come out as they were."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from mivhead import Features, FeatureTable, stores
from mivhead.errors import InputError, MivError

Address = Callable[[str], str]

BACKBONE = {"name": "mine", "taps": ["a", "b"]}
HOSTILE = (
    "'; DROP TABLE birds; --",
    '" OR ""=""',
    "\x1b[2J\x1b]0;owned\x07",
    "../../../etc/passwd",
    "two\nlines\r\tand a tab",
    "%s %n {0.__class__} $(id) `id`",
    "null",
    "x" * 5000,
)


def features(count: int, dtype: str = "float16", seed: int = 0) -> Features:
    """Two blocks; all kinds of float16 numbers, the smallest and largest among them."""
    rng = np.random.default_rng(seed)
    maps = rng.normal(size=(count, 6, 2, 3)).astype(dtype)
    tokens = (rng.normal(size=(count, 5)) * 10.0 ** rng.integers(-7, 4)).astype(dtype)
    tokens[0, :4] = np.array([65504.0, 6e-8, -0.0, 1 / 3]).astype(dtype)
    return Features([{"map": maps}, {"map": maps[:, :5] * 2, "token": tokens}])


def table(count: int = 7, dtype: str = "float16") -> FeatureTable:
    return FeatureTable(
        features(count, dtype),
        tuple(f"images/'{i}'.jpg" for i in range(count)),
        tuple(("wren", "robin", "it's")[i % 3] for i in range(count)),
        backbone=BACKBONE,
    )


def assert_same(found: FeatureTable, expected: FeatureTable) -> None:
    assert found.ids == expected.ids
    assert found.labels == expected.labels
    assert found.features == expected.features  # every bit and type
    assert signs(found.features) == signs(expected.features)
    assert found.backbone == expected.backbone


def signs(tensors: Features) -> list[bytes]:
    return [np.signbit(tensor).tobytes() for tensor in tensors.tensors.values()]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_round_trip_is_exact(address: Address, dtype: str) -> None:
    expected = table(dtype=dtype)
    stores.open(address("birds")).write(expected)
    assert_same(stores.open(address("birds")).read(), expected)


def test_without_labels_and_backbone(address: Address) -> None:
    plain = FeatureTable(features(3), ("a", "b", "c"))
    store = stores.open(address("birds"))
    with pytest.raises(InputError, match="exist"):
        store.read()
    store.write(plain)
    assert_same(store.read(), plain)


def test_batches_hold_the_images_in_order(address: Address) -> None:
    store = stores.open(address("birds"))
    store.write(table())
    batches = list(store.iter_batches(batch_size=3))
    assert max(len(batch) for batch in batches) <= 3
    assert [name for batch in batches for name in batch.ids] == list(table().ids)
    assert Features.concat([batch.features for batch in batches]) == table().features
    assert all(batch.backbone == BACKBONE for batch in batches)


def test_a_filter_is_passed_on(address: Address) -> None:
    stores.open(address("birds")).write(table())
    found = stores.open(address("birds"), where="label = 'wren'").read()
    assert found.ids == tuple(table().ids[row] for row in (0, 3, 6))
    assert found.features == table().features[[0, 3, 6]]
    for where in ("label = 'owl'", "nonsense = 1"):
        with pytest.raises(InputError):
            stores.open(address("birds"), where=where).read()


def test_a_second_write_replaces_rows_of_the_same_id(address: Address) -> None:
    first, store = table(), stores.open(address("birds"))
    ids = (first.ids[0], "new")
    changed = FeatureTable(features(2, seed=5), ids, ("owl", "owl"), backbone=BACKBONE)
    store.write(first)
    store.write(changed)
    found = store.read()
    assert sorted(found.ids) == sorted((*first.ids, "new"))
    rows = [found.ids.index(name) for name in (*first.ids[1:], *ids)]
    assert found.features[rows] == Features.concat([first.features[1:], changed.features])


def test_features_of_another_kind_are_not_mixed_in(address: Address) -> None:
    store = stores.open(address("birds"))
    store.write(table())
    for other in (
        replace(table(), backbone={"name": "other"}),
        table(dtype="float32"),
        FeatureTable(Features(np.ones((2, 3), np.float16)), ("x", "y"), backbone=BACKBONE),
        FeatureTable(features(2), ("a", "a")),
    ):
        with pytest.raises(InputError):
            store.write(other)
    assert_same(store.read(), table())


def test_some_of_the_blocks(address: Address) -> None:
    stores.open(address("birds")).write(table())
    found = stores.open(address("birds"), vectors=["block1.token", "block0.map"]).read()
    expected = table().features.tensors
    assert found.features == Features([expected["block1.token"], expected["block0.map"]])
    assert found.backbone is None  # a model of these features is not one of that backbone
    with pytest.raises(InputError, match=r"block1\.map"):
        stores.open(address("birds"), vectors=["block2.map"]).read()


def test_text_is_kept_as_it_is_and_runs_nothing(address: Address) -> None:
    uri, store = address("birds"), stores.open(address("birds"))
    expected = FeatureTable(features(len(HOSTILE)), HOSTILE, HOSTILE[::-1])
    store.write(expected)
    found = store.read()
    assert dict(zip(found.ids, found.labels or (), strict=True)) == dict(
        zip(HOSTILE, HOSTILE[::-1], strict=True)
    )
    for name in HOSTILE:  # whatever a name is taken for, the table is as before
        for how in ({"label": name}, {"id": name}, {"vectors": [name]}, {"where": name}):
            with suppress(MivError):
                stores.open(uri, **how).read()  # type: ignore[arg-type]
    assert len(stores.open(uri).read()) == len(HOSTILE)


@pytest.mark.parametrize(
    "uri", ["lancdb://data/birds", "lancedb://birds", "lancedb://data/birds?lable=x"]
)
def test_wrong_urls(uri: str) -> None:
    with pytest.raises(InputError, match="lancedb"):
        stores.open(uri)
