"""Unlabelled images: soft labels with equal totals, weighted ridge experts, and the evidence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mivhead import Features, MIVClassifier, Recipe
from mivhead.ensemble.constants import MASS, TAKEN
from mivhead.ensemble.ridge import fit_ridge
from mivhead.ensemble.stacking import Ensemble
from mivhead.ensemble.unlabelled import refine, soft_labels

SIZE = 100
CENTRES = np.random.default_rng(0).normal(size=(3, SIZE)).astype(np.float32)


def images(labels: list[int], seed: int, noise: float = 2.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = CENTRES[labels] + noise * rng.normal(size=(len(labels), SIZE))
    return found.astype(np.float32)


@pytest.mark.parametrize("dimensions", [3, 40])
def test_an_image_of_weight_2_counts_like_two_images(dimensions: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, dimensions)).astype(np.float32)
    targets = rng.normal(size=(7, 2)).astype(np.float32)
    counts = np.array([1, 2, 1, 3, 1, 1, 2])
    repeated, _ = fit_ridge(x.repeat(counts, axis=0), targets.repeat(counts, axis=0), alpha=0.3)
    weighted, _ = fit_ridge(x, targets, 0.3, counts.astype(np.float64))
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(weighted.coefficients, repeated.coefficients, **close)
    np.testing.assert_allclose(weighted.intercepts, repeated.intercepts, **close)


def test_weighted_ridge_minimises_its_objective() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(9, 4)), rng.normal(size=(9, 2))
    w, alpha = rng.uniform(0.1, 2, 9), 0.2
    ridge, _ = fit_ridge(x, y, alpha, w)
    residuals = y - x @ ridge.coefficients - ridge.intercepts
    slope = x.T @ (w[:, None] * residuals) - alpha * ridge.coefficients
    np.testing.assert_allclose(slope, 0, atol=1e-6)  # coefficients in single precision
    np.testing.assert_allclose(w @ residuals, 0, atol=1e-6)


@settings(deadline=None)
@given(
    logits=hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 40), st.integers(2, 6)),
        elements=st.floats(-60, 60),
    )
)
def test_soft_labels_are_labels_with_bounded_weights(logits: np.ndarray) -> None:
    targets, weights = soft_labels(logits)
    count, classes = logits.shape
    assert np.isfinite(targets).all()
    assert (weights > 0).all()
    np.testing.assert_allclose(targets.sum(axis=1), np.ones(count))
    totals = (targets * weights[:, None]).sum(axis=0)  # per class
    assert (totals <= min(MASS, TAKEN * count / classes) + 1e-9).all()
    assert (targets * weights[:, None] <= 1 + 1e-9).all()


def test_every_class_takes_the_same_total_however_frequent_it_is() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 3)) + np.array([4.0, 0, -4.0])
    targets, weights = soft_labels(logits)
    totals = (targets * weights[:, None]).sum(axis=0)
    np.testing.assert_allclose(totals, np.full(3, MASS))


def fitted(unlabelled: np.ndarray | None, shots: int = 1) -> MIVClassifier:
    labels = [c for c in range(3) for _ in range(shots)]
    classifier = MIVClassifier(Recipe(steps=2), random_state=0)
    return classifier.fit(images(labels, seed=1), labels, unlabelled=unlabelled)


def test_unlabelled_images_help() -> None:
    pool = images([0] * 25 + [1] * 11 + [2] * 6, seed=2)  # unbalanced
    foreign = 2.5 * np.random.default_rng(3).normal(size=(18, SIZE)).astype(np.float32)
    truth = [c for c in range(3) for _ in range(60)]
    queries = images(truth, seed=4)
    gains = []
    for seed in range(6):
        shots = images([0, 1, 2], seed=100 + seed)
        plain, classifier = (MIVClassifier(Recipe(steps=2), random_state=0) for _ in range(2))
        plain.fit(shots, [0, 1, 2])
        classifier.fit(shots, [0, 1, 2], unlabelled=np.concatenate([pool, foreign]))
        assert classifier.unlabelled_ is not None
        assert classifier.unlabelled_.images == 60
        assert classifier.unlabelled_.used
        gains.append(classifier.score(queries, truth) - plain.score(queries, truth))
    assert np.mean(gains) > 0.03


def test_predictions_do_not_depend_on_each_other() -> None:
    classifier = fitted(images([0, 1, 2] * 10, seed=2))
    queries = images([0, 1, 2], seed=5)
    together = classifier.predict_proba(queries)
    alone = np.concatenate([classifier.predict_proba(queries[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_evidence_against_the_images_is_heeded() -> None:
    """The head calls every unlabelled image by a wrong name: experts that believe it get worse."""
    labels = np.arange(3).repeat(4)
    shots = Features(images(labels.tolist(), seed=1, noise=0.3))
    truth = np.arange(3).repeat(10)
    pool = Features(images(truth.tolist(), seed=2, noise=0.3))
    ensemble = Ensemble.fit(shots, labels, range(1), None)
    folds = np.tile([0, 1], 6)
    nothing = np.zeros((1, 6, 3), np.float32)

    def use(votes: np.ndarray) -> bool:
        cosines = 30 * np.eye(3, dtype=np.float32)[votes][None]
        evidence = dict.fromkeys((0, 1), (nothing, cosines))
        refined, found = refine(ensemble, shots, labels, pool, cosines, folds, evidence)
        assert (refined is ensemble) == (not found.used)
        return found.used

    assert use(truth)
    assert not use((truth + 1) % 3)


def test_shots_are_left_out_of_the_evidence_as_of_the_fit() -> None:
    classifier = fitted(images([0, 1, 2] * 10, seed=2), shots=4)
    assert classifier.unlabelled_ is not None
    assert classifier.unlabelled_.used
    plain = fitted(None, shots=4)
    np.testing.assert_array_equal(classifier.ensemble_.weights, plain.ensemble_.weights)
    assert not np.array_equal(
        classifier.ensemble_.tensors()["block0.mean.coefficients"],
        plain.ensemble_.tensors()["block0.mean.coefficients"],
    )
