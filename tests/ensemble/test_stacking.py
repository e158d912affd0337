"""Weights of members: the optimum of a plain objective, and what must hold for any predictions."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from mivhead._util.arrays import softmax
from mivhead.ensemble.constants import SMALLEST
from mivhead.ensemble.stacking import fit_weights

START = np.array([1.0, 2.0], np.float32)


def some_predictions(members: int, images: int = 30, classes: int = 3, noise: float = 0.5):
    """Predictions that hint at the class, some more than others."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes, size=images)
    hints = np.linspace(0.2, 1.0, members)[:, None, None] * np.eye(classes)[labels]
    predictions = hints + noise * rng.normal(size=(members, images, classes))
    return predictions, labels


def objective(weights, predictions, labels, start, strength: float) -> float:
    """Cross-entropy of every image, and how far the weights went, in units of their mean start."""
    total = 0.0
    for i, label in enumerate(labels.tolist()):
        sums = [
            sum(float(w) * float(predictions[v, i, c]) for v, w in enumerate(weights))
            for c in range(predictions.shape[2])
        ]
        total += math.log(sum(math.exp(s) for s in sums)) - sums[label]
    unit = float(sum(start)) / len(start)
    moved = [(float(w) - float(s)) / unit for w, s in zip(weights, start, strict=True)]
    return total + strength * sum(m * m for m in moved)


@pytest.mark.parametrize("strength", [0.1, 5.0])
def test_several_weights_are_those_of_scipys_optimiser(strength: float) -> None:
    """It knows the plain objective only, without a gradient."""
    predictions, labels = some_predictions(4)
    predictions = np.concatenate([predictions, -predictions[:1]])  # whose weight ends at its bound
    start = np.array([0.5, 1.0, 3.0, 2.0, 1.0])
    found = fit_weights(predictions, labels, start, strength)
    expected = minimize(
        lambda w: objective(w, predictions, labels, start, strength),
        start,
        method="L-BFGS-B",
        bounds=[(SMALLEST * s, None) for s in start],
        options={"ftol": 1e-14, "gtol": 1e-7},
    )
    np.testing.assert_allclose(found, expected.x, atol=2e-4)
    loss = objective(found, predictions, labels, start, strength)
    assert loss < expected.fun + 1e-6


def test_a_member_that_misleads_is_all_but_silenced_and_none_is_negative() -> None:
    predictions, labels = some_predictions(2, images=60)
    both = np.concatenate([predictions, -predictions[1:]])
    weights = fit_weights(both, labels, np.ones(3))
    assert weights[2] == pytest.approx(SMALLEST)
    assert (weights > 0).all()
    assert weights[1] > 1


def test_where_all_members_mislead_the_start_still_decides() -> None:
    """Without certainty, but not by the order of the classes."""
    predictions, labels = some_predictions(2, images=60)
    weights = fit_weights(-predictions, labels, START)
    np.testing.assert_allclose(weights, SMALLEST * START, rtol=1e-6)
    new = np.random.default_rng(0).normal(size=(2, 50, 3))
    ours, plain = (np.einsum("v,vnc->nc", w, new) for w in (weights, START))
    np.testing.assert_array_equal(ours.argmax(axis=1), plain.argmax(axis=1))
    assert softmax(ours).max() < 0.34


def test_without_evidence_the_weights_stay() -> None:
    nothing = np.zeros((2, 0, 3)), np.zeros(0, np.int64)
    np.testing.assert_array_equal(fit_weights(*nothing, START), START)
    undecided = np.full((2, 9, 3), 0.7)
    found = fit_weights(undecided, np.arange(9) % 3, START)
    np.testing.assert_allclose(found, START, rtol=1e-6)


def test_more_evidence_goes_further() -> None:
    predictions, labels = some_predictions(2, images=24)
    moved = [
        float(np.linalg.norm(fit_weights(predictions[:, :n], labels[:n], START) - START))
        for n in (1, 4, 24)
    ]
    assert moved[0] < moved[1] < moved[2]
    firm = fit_weights(predictions, labels, START, strength=1e6)
    np.testing.assert_allclose(firm, START, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("images", "strength"), [(5, 9.0), (10, 2.25), (47, (15 / 47) ** 2), (48, 0.1)]
)
def test_the_prior_is_stronger_the_fewer_images_there_are(images: int, strength: float) -> None:
    predictions, labels = some_predictions(2, images=images)
    expected = fit_weights(predictions, labels, START, strength)
    np.testing.assert_array_equal(fit_weights(predictions, labels, START), expected)
    assert not np.array_equal(fit_weights(predictions, labels, START, 2 * strength), expected)


def test_order_of_images_classes_and_members_does_not_matter() -> None:
    predictions, labels = some_predictions(3)
    start = np.array([1.0, 2.0, 3.0])
    expected = fit_weights(predictions, labels, start)
    images = np.random.default_rng(0).permutation(len(labels))
    close = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(
        fit_weights(predictions[:, images], labels[images], start), expected, **close
    )
    names = np.array([2, 0, 1])  # class c becomes names[c]
    renamed = np.empty_like(predictions)
    renamed[:, :, names] = predictions
    np.testing.assert_allclose(fit_weights(renamed, names[labels], start), expected, **close)
    members = [2, 0, 1]
    turned = fit_weights(predictions[members], labels, start[members])
    np.testing.assert_allclose(turned, expected[members], **close)


def calibration_error(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean gap of confidence and accuracy over ten bins of confidence, weighted by their size."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == labels
    total = 0.0
    for low in np.arange(0, 1, 0.1):
        inside = (confidence > low) & (confidence <= low + 0.1)
        if inside.any():
            gap = abs(confidence[inside].mean() - right[inside].mean())
            total += gap * inside.sum() / len(labels)
    return total


@pytest.mark.parametrize("scale", [0.3, 8.0], ids=["too unsure", "too sure"])
def test_stacked_probabilities_are_calibrated(scale: float) -> None:
    predictions, labels = some_predictions(3, images=2060, noise=1.0)
    predictions *= scale
    start = np.ones(3)
    weights = fit_weights(predictions[:, :60], labels[:60], start)
    new, truth = predictions[:, 60:], labels[60:]
    before, after = (
        calibration_error(np.einsum("v,vnc->nc", w, new), truth) for w in (start, weights)
    )
    assert before > 0.1
    assert after < 0.06
