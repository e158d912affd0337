"""Balance: independent derivations in plain loops, and the properties that users rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mivhead import MIVClassifier
from mivhead.ensemble.balance import (
    ShotLines,
    fold_into_weights,
    left_out_predictions,
    shot_scores,
    shot_weights,
    shots_behind,
)
from mivhead.ensemble.constants import FEW_SHOTS, SHOTS_SCALE, SLOPE_PENALTY, UNTESTED
from mivhead.ensemble.stacking import fit_weights

ALPHA = 0.1


def make_task(shots: list[int], seed: int = 0, queries: int = 20, noise: float = 1.0):
    """Vectors of length 1 around random class centres: shots, labels, queries and their labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(len(shots), 30))

    def draw(labels):
        x = centres[labels] + noise * rng.normal(size=(len(labels), 30))
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    y = np.repeat(np.arange(len(shots)), shots)
    wanted = np.repeat(np.arange(len(shots)), queries)
    return draw(y), y, draw(wanted), wanted


def solve_ridge(x, y, classes, weights):
    """Solve the normal equations with a column of ones that is not penalised."""
    ones = np.hstack([x, np.ones((len(x), 1))])
    penalty = ALPHA * np.diag([1.0] * x.shape[1] + [0.0])
    inner = np.linalg.inv(ones.T @ (weights[:, None] * ones) + penalty)
    return inner @ ones.T @ (weights[:, None] * np.eye(classes)[y]), ones @ inner @ (
        ones.T * weights
    )


def predict(coefficients, x):
    return np.hstack([x, np.ones((len(x), 1))]) @ coefficients


def balanced_names(x, y, queries):
    """Name queries by one balanced ridge expert, as the ensemble does."""
    shots = np.bincount(y)
    coefficients, hat = solve_ridge(x, y, len(shots), shot_weights(y))
    targets = np.eye(len(shots))[y]
    left_out = left_out_predictions(hat, targets, hat @ targets)
    lines = ShotLines.fit(left_out[None], y, shots_behind(y), shots)
    weights, offsets = fold_into_weights([10.0, 0.5 / SHOTS_SCALE], lines, shots)
    return (weights[0] * predict(coefficients, queries) + offsets).argmax(axis=1)


def mean_class_accuracy(names, wanted):
    return np.mean([(names[wanted == c] == c).mean() for c in np.unique(wanted)])


@pytest.mark.parametrize("folds", [None, "rounds", "halves"])
def test_left_out_predictions_equal_refitting(folds):
    x, y, *_ = make_task([1, 2, 4, 6])
    weights = shot_weights(y)
    if folds is not None:
        number = np.concatenate([np.arange(n) for n in np.bincount(y)])  # within its class
        number = np.where(np.bincount(y)[y] > 1, number, -1)
        folds = number if folds == "rounds" else np.where(number < 0, -1, number % 2)
    _, hat = solve_ridge(x, y, 4, weights)
    targets = np.eye(4)[y]
    found = left_out_predictions(hat, targets, hat @ targets, folds)
    for row in range(len(y)):
        alone = folds is None or folds[row] < 0
        kept = np.arange(len(y)) != row if alone else folds != folds[row]
        # The weights stay those of the whole support set.
        coefficients, _ = solve_ridge(x[kept], y[kept], 4, weights[kept])
        assert found[row] == pytest.approx(predict(coefficients, x[row : row + 1])[0], abs=1e-9)


def test_shots_behind_counts_what_is_left():
    labels = np.array([0, 0, 0, 1, 1, 2])
    folds = np.array([0, 1, 0, 0, 1, -1])
    found = shots_behind(labels, folds)
    for row in range(len(labels)):
        kept = folds != folds[row] if folds[row] >= 0 else np.ones(6, bool)
        assert found[row].tolist() == np.bincount(labels[kept], minlength=3).tolist()
    alone = shots_behind(labels)
    assert alone[0].tolist() == [2, 2, 1]
    assert alone[5].tolist() == [3, 2, 0]


def test_lines_equal_penalised_least_squares_in_plain_loops():
    rng = np.random.default_rng(3)
    labels = np.repeat([0, 1, 2], [1, 3, 8])
    scores, behind = rng.normal(size=(2, 12, 3)), shots_behind(labels)
    lines = ShotLines.fit(scores, labels, behind, [1, 3, 8])
    for member in range(2):
        log_n, mean, log_sd = [], [], []
        for c in range(3):
            others = [i for i in range(12) if labels[i] != c]
            values = [scores[member, i, c] for i in others]
            log_n.append(sum(math.log(behind[i, c]) for i in others) / len(others))
            mean.append(float(np.mean(values)))
            log_sd.append(math.log(float(np.std(values))))
        middle = sum(log_n) / 3
        below = sum((v - middle) ** 2 for v in log_n) + SLOPE_PENALTY
        slope = sum((v - middle) * m for v, m in zip(log_n, mean, strict=True)) / below
        spread = sum((v - middle) * s for v, s in zip(log_n, log_sd, strict=True)) / below
        reference = (math.log(1) + math.log(3) + math.log(8)) / 3
        level = sum(mean) / 3 + slope * (reference - middle)
        assert lines.reference == pytest.approx(reference)
        assert (lines.slope[member], lines.spread_slope[member]) == pytest.approx((slope, spread))
        assert lines.level[member] == pytest.approx(level)
        # A score of 0.7 with eight shots behind it.
        away = math.log(8) - reference
        by_hand = level + (0.7 - level - slope * away) * math.exp(-spread * away)
        got = lines(np.full((2, 1, 3), 0.7), [1, 3, 8])[member, 0, 2]
        assert got == pytest.approx(by_hand)


def test_equal_shots_change_nothing_at_all():
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(4), 5)
    scores = rng.normal(size=(3, 20, 4))
    shots = np.full(4, 5)
    lines = ShotLines.fit(scores, labels, shots_behind(labels), shots)
    weights, offsets = fold_into_weights([0.5, 1.0, 3.0, 4.0], lines, shots)
    assert (weights == np.array([[0.5], [1.0], [3.0]])).all()
    assert (offsets == 0).all()
    assert (lines(scores, shots) == scores).all()
    assert (lines(scores, shots_behind(labels)) == scores).all()  # one shot less of the own class
    assert (shot_weights(labels) == 1).all()


def test_fold_into_weights_is_the_sum_of_balanced_scores():
    rng = np.random.default_rng(2)
    labels, shots = np.repeat([0, 1, 2], [2, 5, 9]), np.array([2, 5, 9])
    scores, members = rng.normal(size=(3, 16, 3)), np.array([0.2, 1.0, 2.0])
    lines = ShotLines.fit(scores, labels, shots_behind(labels), shots)
    weights, offsets = fold_into_weights([*members, 3.0], lines, shots)
    new = rng.normal(size=(3, 7, 3))
    expected = np.tensordot(members, lines(new, shots), axes=1)
    expected -= 3.0 * SHOTS_SCALE * (np.log(shots) - np.log(shots).mean())
    assert np.einsum("mc,mic->ic", weights, new) + offsets == pytest.approx(expected)


def test_balance_makes_up_for_unequal_shots():
    before, after = [], []
    for seed in range(10):
        x, y, queries, wanted = make_task([1, 1, 2, 5, 12], seed)
        coefficients, _ = solve_ridge(x, y, 5, np.ones(len(y)))
        before.append(mean_class_accuracy(predict(coefficients, queries).argmax(axis=1), wanted))
        after.append(mean_class_accuracy(balanced_names(x, y, queries), wanted))
    assert np.mean(after) > np.mean(before) + 0.05


@pytest.mark.parametrize("shots", [[3, 3, 3, 3], [2, 4, 8, 1]], ids=str)
def test_copies_of_all_shots_of_a_class_change_few_names(shots):
    """Copies count as shots although they teach nothing; the bounds hold for hard tasks."""
    changed, lost = [], []
    for seed in range(3):
        x, y, queries, wanted = make_task(shots, seed, noise=1.5)
        names = MIVClassifier("experts", random_state=0).fit(x, y).predict(queries)
        for label in range(len(shots)):
            rows = np.concatenate([np.arange(len(y)), np.flatnonzero(y == label)])
            model = MIVClassifier("experts", random_state=0).fit(x[rows], y[rows])
            again = model.predict(queries)
            changed.append((again != names).mean())
            lost.append((names == wanted).mean() - (again == wanted).mean())
    assert np.mean(changed) < 0.15
    assert np.mean(lost) < 0.05


def test_the_starting_weight_of_the_shots_divides_probabilities_by_their_number():
    shots = np.array([1, 2, 30])
    logits = np.array([0.3, -0.2, 1.0])
    corrected = np.exp(logits + shot_scores(shots, shots) / SHOTS_SCALE)
    expected = np.exp(logits) / shots
    assert corrected / corrected.sum() == pytest.approx(expected / expected.sum())
    assert shot_scores(shots, shots).sum() == pytest.approx(0)
    # Out of fold, one shot less; a class without any counts like one shot.
    assert shot_scores([0, 1], [1, 1]).tolist() == [0, 0]
    assert shot_scores([4, 5], [5, 5])[0] > shot_scores([4, 5], [5, 5])[1] == 0


@pytest.mark.parametrize(
    "shots", [[2, 1], [5, 1], [60, 1], [300, 1], [1, 1, 80, 1], [60, 1, 1, 1, 1]], ids=str
)
def test_every_class_is_named_if_only_one_has_several_shots(shots):
    recalls = []
    for seed in range(3):
        x, y, queries, wanted = make_task(shots, seed)
        names = MIVClassifier("experts").fit(x, y).predict(queries)
        recalls.append([(names[wanted == c] == c).mean() for c in range(len(shots))])
    assert np.mean(recalls, axis=0).min() > 0.6


def test_logits_shrink_with_the_share_of_classes_that_cannot_be_tested():
    for shots in ([1, 1, 4, 6], [3, 3, 4, 6], [4, 4, 4, 4]):
        x, y, *_ = make_task(shots)
        ensemble = MIVClassifier("experts").fit(x, y).ensemble_
        left = ensemble.left_out
        counts = shot_weights(y)[left.rows]
        fitted = fit_weights(left.members, left.labels, left.prior, counts=counts)
        scale = math.exp(-UNTESTED * np.mean(np.array(shots) == 1))
        scale *= 1 - FEW_SHOTS * np.mean([1 / count for count in shots])
        assert left.weights == pytest.approx(scale * fitted)
        assert ensemble.weights == pytest.approx(left.weights[: len(ensemble.weights)])


def test_the_head_has_no_say_if_only_one_class_has_several_shots():
    x, y, *_ = make_task([6, 1, 1])
    ensemble = MIVClassifier(random_state=0).fit(x, y).ensemble_
    head = ensemble.weights[: len(ensemble.weights) - len(ensemble.experts.ridges)]
    assert len(head) > 0
    assert head.max() < 0.01 * ensemble.weights.max()
