"""What to expect of new images: the formulas in plain loops, simulated tasks, hand-made cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mivhead.decision import Calibration
from mivhead.diagnostics.cross_validation import HITS, SLOPE, expect


def probabilities(best: np.ndarray, largest: np.ndarray | float, classes: int) -> np.ndarray:
    """Rows with this largest probability at the best class, the rest spread evenly."""
    largest = np.broadcast_to(np.asarray(largest, float), len(best))
    rows = np.repeat(((1 - largest) / (classes - 1))[:, None], classes, axis=1)
    rows[np.arange(len(best)), best] = largest
    return rows


def predicted(right: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """The label if a prediction is right, else the next class."""
    return np.where(right, labels, (labels + 1) % classes)


def test_the_formula_in_plain_loops():
    rng = np.random.default_rng(0)
    shots = np.array([4, 2, 1])
    labels, behind = np.array([0, 0, 0, 0, 1, 1]), np.array([3, 3, 3, 3, 1, 1])
    p = rng.dirichlet(np.ones(3), 6)
    thresholds = Calibration((), (4, 2, 1), True).thresholds(reject=None).probability
    accuracy = [0.0, 0.0]  # with the shots of the class, and with one
    right_names, wrong_names, total = [0.0, 0.0], [0.0, 0.0], 0.0
    for row, label, count in zip(p, labels, behind, strict=True):
        weight, best = 1 / shots[label], int(row.argmax())
        total += weight
        for place, n in enumerate((shots[label], 1)):
            odds = row[best] / (1 - row[best]) * math.exp(SLOPE * math.log(n / count))
            sure = odds / (1 + odds)
            right = HITS * (best == label) + (1 - HITS) * sure
            accuracy[place] += weight * right
            if sure >= thresholds[best]:
                right_names[place] += weight * right
                wrong_names[place] += weight * (1 - right)
    found = expect(p, labels, behind, shots)
    pairs = (accuracy, right_names, wrong_names)
    expected = [(2 * tested + single) / 3 / total for tested, single in pairs]  # one class of three
    values = found.accuracy, found.right_names, found.wrong_names
    assert values == pytest.approx(expected)


def test_classes_count_the_same():
    """Ten classes at 47%, and 300 easy photos as an eleventh: not 92%."""
    rng = np.random.default_rng(0)
    labels, shots = np.repeat(np.arange(10), 5), np.full(10, 5)
    right = rng.permutation(np.arange(50) < 24)
    p = probabilities(predicted(right, labels, 11), 0.47, 11)
    before = expect(p, labels, np.full(50, 4), np.append(shots, 1)).accuracy
    easy = probabilities(np.full(300, 10), 0.99, 11)
    after = expect(
        np.concatenate([p, easy]),
        np.append(labels, np.full(300, 10)),
        np.append(np.full(50, 4), np.full(300, 240)),
        np.append(shots, 300),
    ).accuracy
    assert before < after < before + 0.1


def test_too_little_to_test_is_unknown():
    """With one tested class, a model that always names it would be right as well."""
    none = expect(np.empty((0, 2)), np.empty(0, int), np.empty(0, int), np.array([1, 1]))
    one_class = expect(np.full((3, 2), 0.5), np.zeros(3, int), np.full(3, 2), np.array([3, 1]))
    for found in (none, one_class):
        assert math.isnan(found.accuracy)
        assert found.interval == (0.0, 1.0)


@pytest.mark.parametrize("share", [0, 1])
def test_all_right_or_wrong_is_never_certain(share):
    labels = np.repeat([0, 1], 5)
    p = probabilities(predicted(np.full(10, share == 1), labels, 2), 0.999, 2)
    found = expect(p, labels, np.full(10, 4), np.array([5, 5]), calibrated=False)
    values = found.accuracy, found.right_names, 1 - found.wrong_names
    assert values == pytest.approx((share,) * 3)
    assert found.interval[share] == share
    assert abs(found.interval[1 - share] - share) > 0.2


def test_a_class_that_stands_for_everything_else_is_left_out():
    labels, behind = np.repeat([0, 1], 5), np.full(10, 4)
    p = probabilities(labels, 0.9, 3)
    p[0] = [0.05, 0.05, 0.9]  # taken for something else: left to people
    shots, named = np.array([5, 5, 30]), np.array([True, True, False])
    found = expect(p, labels, behind, shots, named)
    assert found.right_names + found.wrong_names == pytest.approx(0.9)


@pytest.mark.parametrize("shots", [[5] * 8, [1, 1, 2, 3, 5, 8, 12, 12]])
def test_truth_is_inside_the_interval(shots):
    """Tasks that follow the curve, with classes that differ in difficulty."""
    rng = np.random.default_rng(0)
    shots, inside, errors = np.array(shots), [], []
    for _ in range(200):
        ease = rng.normal(0.5, 1) + rng.normal(0, 0.5, len(shots))
        labels = np.repeat(np.arange(len(shots)), shots)
        labels = labels[shots[labels] > 1]
        behind = shots[labels] - 1
        p = 1 / (1 + np.exp(-ease[labels] - SLOPE * np.log(behind) + rng.normal(0, 0.5)))
        right = rng.random(len(labels)) < p
        rows = probabilities(predicted(right, labels, len(shots)), np.maximum(p, 0.2), len(shots))
        found = expect(rows, labels, behind, shots)
        truth = np.mean(1 / (1 + np.exp(-ease - SLOPE * np.log(shots))))
        inside.append(found.interval[0] <= truth <= found.interval[1])
        errors.append(found.accuracy - truth)
    assert np.mean(inside) >= 0.93
    assert abs(np.mean(errors)) < 0.03
