"""The members of the ensemble: which experts there are, what they predict, and their weights."""

import numpy as np
import pytest

from mivhead import Features
from mivhead.ensemble.descriptors import compute_descriptors
from mivhead.ensemble.ridge import Experts, choose_experts, expected_shapes, fit_ridge
from mivhead.ensemble.stacking import Ensemble, fit_weights, one_shot_scale

LABELS = np.array([0, 0, 0, 1, 1, 2])

LAYOUTS = {
    "two maps": [(6, 5, 4), (9, 3, 3)],
    "three maps": [(4, 15, 9), (6, 5, 4), (9, 3, 3)],
    "wide": [(150, 3, 8)],
    "one patch": [(5, 1, 1)],
    "map, then token": [(6, 4, 4), (8,)],
    "tokens only": [(7,), (8,)],
    "map and token": [{"map": (6, 3, 3), "token": (6,)}] * 2,
}


def features(name: str, images: int = 6, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=(images, *shape)).astype(np.float32)

    return Features(
        [
            {k: normal(s) for k, s in block.items()} if isinstance(block, dict) else normal(block)
            for block in LAYOUTS[name]
        ]
    )


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


CHOSEN = {
    "two maps": "0 second_order, 1 second_order, 0 layout, 1 layout, 1 mean",
    "three maps": "0 second_order, 1 second_order, 2 second_order, 1 layout, 2 layout, 2 mean",
    "wide": "0 second_order, 0 layout, 0 mean",
    "one patch": "0 second_order, 0 layout, 0 mean",
    "map, then token": "0 second_order, 0 layout, 1 mean",
    "tokens only": "1 mean",
    "map and token": "0 second_order, 1 second_order, 0 layout, 1 layout, 1 mean",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_which_experts_there_are(name: str) -> None:
    found = [f"{e.block} {e.kind}" for e in choose_experts(features(name).blocks)]
    assert ", ".join(found) == CHOSEN[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_predictions_are_those_of_each_ridge_and_come_back_from_tensors(name: str) -> None:
    support, queries = features(name), features(name, 4, seed=1)
    experts, left_out = Experts.fit(support, LABELS, 3)
    predictions = experts(queries)
    assert np.isfinite(predictions).all()
    assert np.isfinite(left_out).all()
    for i, expert in enumerate(choose_experts(support.blocks)):
        pca = experts.pcas.get(expert.block)
        x, new = (
            compute_descriptors(each.blocks[expert.block], pca, [expert.kind])[expert.kind]
            for each in (support, queries)
        )
        weights = np.array([2 / 3, 2 / 3, 2 / 3, 1, 1, 2])  # every class counts the same
        ridge, unseen = fit_ridge(x, np.eye(3, dtype=np.float32)[LABELS], 0.1, weights)
        np.testing.assert_allclose(predictions[i], ridge(new), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(left_out[i], unseen, rtol=1e-6, atol=1e-6)
    tensors = experts.tensors()
    assert {k: v.shape for k, v in tensors.items()} == expected_shapes(support.blocks, 3)
    again = Experts.from_tensors(tensors, support.blocks)
    np.testing.assert_array_equal(again(queries), predictions)


def test_without_out_of_fold_predictions_the_weights_are_the_prior() -> None:
    ensemble = Ensemble.fit(features("three maps"), LABELS, range(3), None)
    blocks, second_order, layouts, mean = [0.5, 0.5, 1.0], [1.0, 2.0, 3.0], [1.0, 1.0], [3.0]
    assert ensemble.weights.tolist() == blocks + second_order + layouts + mean


def test_with_one_shot_per_class_second_order_experts_get_most_of_the_weight() -> None:
    support, labels = features("three maps", 3), np.arange(3)
    ensemble = Ensemble.fit(support, labels, range(3), None)
    blocks, second_order, layouts, mean = [0.2, 0.2, 0.4], [2.5, 5.0, 7.5], [1.0, 1.0], [2.5]
    expected = np.array(blocks + second_order + layouts + mean)
    expected *= one_shot_scale(support, labels)
    np.testing.assert_allclose(ensemble.weights, expected, rtol=1e-6)


def test_weights_come_from_out_of_fold_predictions_only() -> None:
    """Predictions of other images have no influence."""
    support = features("two maps")
    predicted = np.array([0, 1, 0, 0, 1, -1])  # folds; the last image is alone in its class
    cosines = drawn(2, 6, 3)
    weights = Ensemble.fit(support, LABELS, range(2), (cosines, predicted)).weights
    assert len(weights) == 2 + 5
    elsewhere = cosines.copy()
    elsewhere[:, 5] = 100.0
    again = Ensemble.fit(support, LABELS, range(2), (elsewhere, predicted)).weights
    np.testing.assert_array_equal(again, weights)
    telling = cosines.copy()
    telling[1, :5] = np.eye(3)[LABELS[:5]]
    larger = Ensemble.fit(support, LABELS, range(2), (telling, predicted)).weights
    assert larger[1] > weights[1] + 0.1


def test_logits_are_the_weighted_sum_of_all_members() -> None:
    support, queries = features("map, then token"), features("map, then token", 4, seed=1)
    ensemble = Ensemble.fit(support, np.array([0, 0, 1, 1, 2, 2]), range(2), None)
    assert ensemble.offsets is None
    cosines = drawn(2, 4, 3)
    found = ensemble.logits(cosines, queries)
    predictions = np.concatenate([cosines, ensemble.experts(queries)]).tolist()
    weights = [0.5, 1.0, 2.0, 1.0, 3.0]  # blocks; block 0 second order and layout; block 1 mean
    for i in range(4):
        for c in range(3):
            expected = sum(w * predictions[v][i][c] for v, w in enumerate(weights))
            assert float(found[i, c]) == pytest.approx(expected, abs=1e-5)


def test_with_unequal_shots_every_class_has_its_own_weights_and_offset() -> None:
    support, queries = features("map, then token"), features("map, then token", 4, seed=1)
    ensemble = Ensemble.fit(support, LABELS, range(2), None)
    cosines = drawn(2, 4, 3)
    found = ensemble.logits(cosines, queries)
    predictions = np.concatenate([cosines, ensemble.experts(queries)])
    assert ensemble.class_weights.shape == (5, 3)
    for i in range(4):
        for c in range(3):
            own = ensemble.class_weights[:, c] @ predictions[:, i, c]
            assert float(found[i, c]) == pytest.approx(own + ensemble.offsets[c], abs=1e-4)
    np.testing.assert_allclose(ensemble.class_weights[:2], [[0.5] * 3, [1.0] * 3])  # untested


def test_the_correction_for_shots_follows_the_predictions_of_left_out_images() -> None:
    """Images of a large class that are taken for a small one weaken it."""
    labels = np.repeat([0, 1, 2], [20, 2, 2])
    support, fold = features("two maps", len(labels)), np.arange(len(labels)) % 2

    def weight_of_shots(name: int) -> float:
        """If the head gives all images of the large class this name."""
        cosines = np.zeros((2, len(labels), 3), np.float32)
        cosines[:, np.arange(len(labels)), np.where(labels == 0, name, labels)] = 0.5
        left_out = Ensemble.fit(support, labels, range(2), (cosines, fold)).left_out
        assert left_out is not None
        given = left_out.members, left_out.labels, left_out.prior
        return float(fit_weights(*given, counts=left_out.counts)[-1])

    assert weight_of_shots(1) < weight_of_shots(0)


def test_tensors_of_an_ensemble_are_those_expected() -> None:
    support = features("two maps")
    ensemble = Ensemble.fit(support, LABELS, range(2), None)
    shapes = Ensemble.expected_shapes(support.blocks, 2, 3, balanced=True)
    assert {k: v.shape for k, v in ensemble.tensors().items()} == shapes
    again = Ensemble.from_tensors(ensemble.tensors(), support.blocks)
    cosines = drawn(2, 6, 3)
    expected = ensemble.logits(cosines, support)
    np.testing.assert_array_equal(again.logits(cosines, support), expected)
