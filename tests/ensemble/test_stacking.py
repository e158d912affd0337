"""Weights of members: the optimum of a plain objective, and what must hold for any predictions."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import check_grad

from mivhead.ensemble.stacking import SMALLEST, fit_weights

START = torch.tensor([1.0, 2.0])


def some_predictions(members: int, images: int = 30, classes: int = 3, noise: float = 0.5):
    """Predictions that hint at the class, some more than others."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes, size=images)
    hints = np.linspace(0.2, 1.0, members)[:, None, None] * np.eye(classes)[labels]
    predictions = hints + noise * rng.normal(size=(members, images, classes))
    return torch.tensor(predictions), torch.tensor(labels)


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
def test_two_weights_are_the_best_of_a_fine_grid(strength: float) -> None:
    predictions, labels = some_predictions(2)
    found = fit_weights(predictions, labels, START, strength)
    best = objective(found, predictions, labels, START, strength)
    for radius in (1.0, 0.1, 0.02):
        for angle in np.linspace(0, 2 * math.pi, 12, endpoint=False):
            near = found.double().numpy() + radius * np.array([math.cos(angle), math.sin(angle)])
            if (near >= SMALLEST * START.numpy()).all():
                assert objective(near, predictions, labels, START, strength) > best - 1e-6
    coarse = min(
        objective((a, b), predictions, labels, START, strength)
        for a in np.linspace(0.1, 12, 12)
        for b in np.linspace(0.1, 12, 12)
    )
    assert best < coarse + 1e-6


def test_the_gradient_equals_finite_differences(monkeypatch) -> None:
    predictions, labels = some_predictions(4)
    start = torch.tensor([0.5, 1.0, 3.0, 2.0])
    seen = []

    class Found:
        x = start.numpy()

    def spy(loss, *_, **__):
        seen.append(loss)
        return Found

    monkeypatch.setattr("scipy.optimize.minimize", spy)
    fit_weights(predictions, labels, start, 0.1)
    (loss,) = seen
    for point in np.random.default_rng(0).uniform(0, 4, size=(3, 4)):
        assert loss(point)[0] == pytest.approx(objective(point, predictions, labels, start, 0.1))
        assert check_grad(lambda w: loss(w)[0], lambda w: loss(w)[1], point) < 1e-4


def test_a_member_that_misleads_is_all_but_silenced_and_none_is_negative() -> None:
    predictions, labels = some_predictions(2, images=60)
    both = torch.cat([predictions, -predictions[1:]])
    weights = fit_weights(both, labels, torch.ones(3))
    assert weights[2] == pytest.approx(SMALLEST)
    assert (weights > 0).all()
    assert weights[1] > 1


def test_where_all_members_mislead_the_start_still_decides() -> None:
    """Without certainty, but not by the order of the classes."""
    predictions, labels = some_predictions(2, images=60)
    weights = fit_weights(-predictions, labels, START)
    torch.testing.assert_close(weights, SMALLEST * START)
    new = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))
    ours, plain = (torch.einsum("v,vnc->nc", w, new) for w in (weights, START))
    assert torch.equal(ours.argmax(1), plain.argmax(1))
    assert torch.softmax(ours, dim=1).max() < 0.34


def test_without_evidence_the_weights_stay() -> None:
    nothing = torch.zeros(2, 0, 3), torch.zeros(0, dtype=torch.long)
    assert torch.equal(fit_weights(*nothing, START), START)
    undecided = torch.full((2, 9, 3), 0.7)
    torch.testing.assert_close(fit_weights(undecided, torch.arange(9) % 3, START), START)


def test_more_evidence_goes_further() -> None:
    predictions, labels = some_predictions(2, images=24)
    moved = [
        float((fit_weights(predictions[:, :n], labels[:n], START) - START).norm())
        for n in (1, 4, 24)
    ]
    assert moved[0] < moved[1] < moved[2]
    firm = fit_weights(predictions, labels, START, strength=1e6)
    torch.testing.assert_close(firm, START, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("images", "strength"), [(5, 9.0), (10, 2.25), (47, (15 / 47) ** 2), (48, 0.1)]
)
def test_the_prior_is_stronger_the_fewer_images_there_are(images: int, strength: float) -> None:
    predictions, labels = some_predictions(2, images=images)
    expected = fit_weights(predictions, labels, START, strength)
    assert torch.equal(fit_weights(predictions, labels, START), expected)
    assert not torch.equal(fit_weights(predictions, labels, START, 2 * strength), expected)


def test_order_of_images_classes_and_members_does_not_matter() -> None:
    predictions, labels = some_predictions(3)
    start = torch.tensor([1.0, 2.0, 3.0])
    expected = fit_weights(predictions, labels, start)
    images = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    close = {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(
        fit_weights(predictions[:, images], labels[images], start), expected, **close
    )
    names = torch.tensor([2, 0, 1])  # class c becomes names[c]
    renamed = torch.empty_like(predictions)
    renamed[:, :, names] = predictions
    torch.testing.assert_close(fit_weights(renamed, names[labels], start), expected, **close)
    members = [2, 0, 1]
    turned = fit_weights(predictions[members], labels, start[members])
    torch.testing.assert_close(turned, expected[members], **close)


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
    start = torch.ones(3)
    weights = fit_weights(predictions[:, :60], labels[:60], start)
    new, truth = predictions[:, 60:].numpy(), labels[60:].numpy()
    before, after = (
        calibration_error(np.einsum("v,vnc->nc", w.numpy(), new), truth) for w in (start, weights)
    )
    assert before > 0.1
    assert after < 0.06
