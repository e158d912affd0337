"""What every database does alike: rows go in and come out as they were."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mivhead import Features, stores
from mivhead.errors import InputError
from mivhead.stores import FeatureTable

Address = Callable[[str], str]

FILTERS = {
    "lancedb": "label = 'wren'",
    "postgresql": "label = 'wren'",
    "qdrant": '{"must": [{"key": "label", "match": {"value": "wren"}}]}',
}
BACKBONE = {"name": "mine", "taps": ["a", "b"]}


def features(count: int, dtype: str = "float16", seed: int = 0) -> Features:
    """Two blocks; all kinds of float16 numbers, the smallest and largest among them."""
    rng = np.random.default_rng(seed)
    maps = rng.normal(size=(count, 6, 2, 3)).astype(dtype)
    tokens = (rng.normal(size=(count, 5)) * 10.0 ** rng.integers(-7, 4)).astype(dtype)
    tokens[0, :4] = np.array([65504.0, 6e-8, -0.0, 1 / 3]).astype(dtype)
    return Features([{"map": maps}, {"map": maps[:, :5] * 2, "token": tokens}])


def table(count: int = 7, dtype: str = "float16") -> FeatureTable:
    names = ("wren", "robin", "it's")
    return FeatureTable(
        features(count, dtype),
        tuple(f"images/{chr(122 - i)} '{i}'.jpg" for i in range(count)),  # not in alphabetic order
        tuple(names[i % 3] for i in range(count)),
        features(4, dtype, seed=1),
        np.array([0, 0, 3, 5]),
        BACKBONE,
    )


def assert_same(found: FeatureTable, expected: FeatureTable) -> None:
    assert found.ids == expected.ids
    assert found.labels == expected.labels
    assert found.features == expected.features  # every bit and type
    assert signs(found.features) == signs(expected.features)
    assert found.backbone == expected.backbone
    assert (found.views is None) == (expected.views is None)
    if found.views is not None:
        assert found.views == expected.views
        np.testing.assert_array_equal(found.view_of, expected.view_of)


def signs(each: Features) -> list[bytes]:
    return [np.signbit(t).tobytes() for t in each.tensors.values()]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_round_trip_is_exact(address: Address, dtype: str) -> None:
    expected = table(dtype=dtype)
    with stores.open(address("birds")) as store:
        store.write(expected)
        assert_same(store.read(), expected)
    with stores.open(address("birds")) as again:
        assert_same(again.read(), expected)


def test_without_labels_views_and_backbone(address: Address) -> None:
    plain = FeatureTable(features(3), ("a", "b", "c"))
    with stores.open(address("birds")) as store:
        store.write(plain)
        assert_same(store.read(), plain)


def test_batches_hold_the_images_in_order(address: Address) -> None:
    with stores.open(address("birds")) as store:
        store.write(table())
        batches = list(store.iter_batches(batch_size=3))
    assert max(len(each) for each in batches) <= 3
    found = {i: f for each in batches for i, f in zip(each.ids, each.features, strict=True)}
    assert set(found) == set(table().ids)
    assert all(found[i] == f for i, f in zip(table().ids, table().features, strict=True))
    assert all(each.views is None and each.backbone == BACKBONE for each in batches)


def test_a_filter_is_passed_on_and_views_follow_their_images(address: Address) -> None:
    uri = address("birds")
    with stores.open(uri) as store:
        store.write(table())
    with stores.open(uri, where=FILTERS[uri.partition("://")[0]]) as store:
        found = store.read()
        batches = list(store.iter_batches())
    rows = [0, 3, 6]
    assert found.ids == tuple(table().ids[row] for row in rows)
    assert found.features == table().features[rows]
    assert found.views is not None
    assert found.view_of is not None
    assert found.view_of.tolist() == [0, 0, 1]
    assert found.views == features(4, seed=1)[:3]
    assert sum(map(len, batches)) == 3


def test_a_filter_that_leaves_nothing(address: Address) -> None:
    uri = address("birds")
    with stores.open(uri) as store:
        store.write(table())
    none = FILTERS[uri.partition("://")[0]].replace("wren", "owl")
    with (
        stores.open(uri, where=none) as store,
        pytest.raises(InputError, match="no rows that match the filter"),
    ):
        store.read()


def test_a_second_write_replaces_rows_of_the_same_id_and_their_views(address: Address) -> None:
    first = table()
    changed = FeatureTable(
        features(2, seed=5), (first.ids[0], "new"), ("owl", "owl"), backbone=BACKBONE
    )
    with stores.open(address("birds")) as store:
        store.write(first)
        store.write(changed)
        found = store.read()
    assert found.ids == (*first.ids[1:], first.ids[0], "new")
    assert found.features == Features.concat([first.features[1:], changed.features])
    assert found.view_of is not None
    assert found.view_of.tolist() == [2, 4]


def test_features_of_another_kind_are_not_mixed_in(address: Address) -> None:
    with stores.open(address("birds")) as store:
        store.write(table())
        for other in (
            replace(table(), backbone={"name": "other"}),
            table(dtype="float32"),
            FeatureTable(Features(np.ones((2, 3), np.float16)), ("x", "y"), backbone=BACKBONE),
        ):
            with pytest.raises(InputError, match="another backbone, type or shape"):
                store.write(other)
        assert_same(store.read(), table())


def test_ids_must_be_distinct(address: Address) -> None:
    with (
        stores.open(address("birds")) as store,
        pytest.raises(InputError, match="ids are not unique"),
    ):
        store.write(FeatureTable(features(2), ("a", "a")))


def test_a_table_that_is_not_there(address: Address) -> None:
    with stores.open(address("birds")) as store, pytest.raises(InputError, match="does not exist"):
        store.read()


def test_other_labels(address: Address) -> None:
    uri = address("birds")
    with stores.open(uri) as store:
        store.write(table())
        ids = table().ids
        store.annotate(ids[:4], {"family": ["a", "b", "c", "it's"], "weight": [1.5, 2.0, 3.0, 4.0]})
        store.annotate(ids[3:], {"family": ["d", "e", "f", "g"]})
        assert_same(store.read(), table())  # still in order, still without the new columns
    with stores.open(uri, label="family") as store:
        found = store.read()
    assert found.labels == ("a", "b", "c", "d", "e", "f", "g")
    assert found.ids == ids
    with stores.open(uri, label="weight") as store, pytest.raises(InputError, match="has no label"):
        store.read()


def test_some_of_the_blocks(address: Address) -> None:
    uri = address("birds")
    with stores.open(uri) as store:
        store.write(table())
    with stores.open(uri, vectors=["block1.token", "block0.map"]) as store:
        found = store.read()
    expected = table().features.tensors
    assert found.features == Features([expected["block1.token"], expected["block0.map"]])
    assert found.backbone is None  # a model of these features is not one of that backbone
    with stores.open(uri, vectors=["block2.map"]) as store, pytest.raises(InputError) as error:
        store.read()
    assert "block1.map" in str(error.value)
