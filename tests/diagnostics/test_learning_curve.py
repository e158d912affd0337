"""The expected accuracy: simulated tasks, and cases that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mivhead.diagnostics.learning_curve import HITS, SLOPE, expected_accuracy


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_equal_shots_move_the_share_along_the_curve():
    right, labels = np.array([1, 1, 0, 1] * 5), np.repeat(np.arange(4), 5)
    found = expected_accuracy(right, labels, np.full(20, 4), [5] * 4)
    theta = math.log(0.75 / 0.25)
    assert found.accuracy == pytest.approx(sigmoid(theta + SLOPE * math.log(5 / 4)))
    assert found.interval[0] < 0.75 < found.interval[1]


def test_classes_count_the_same_and_one_shot_is_expected_to_be_worse():
    # 300 easy shots of one class, and 2 of another that are predicted wrong.
    right = np.r_[np.ones(300), 0, 0]
    labels = np.r_[np.zeros(300, int), 1, 1]
    behind = np.r_[np.full(300, 299), 1, 1]
    found = expected_accuracy(right, labels, behind, [300, 2, 1])
    assert found.accuracy < 0.65
    assert found.per_class[0] > 0.95 > found.per_class[1]
    assert found.tested.tolist() == [300, 2, 0]
    assert found.right.tolist() == [300, 0, 0]
    assert found.interval[1] - found.interval[0] > 0.4  # two shots do not tell much


def test_nothing_to_test_is_unknown():
    found = expected_accuracy([], [], [], [1, 1])
    assert math.isnan(found.accuracy)
    assert found.interval == (0.0, 1.0)


@pytest.mark.parametrize("share", [0, 1])
def test_all_right_or_wrong(share):
    found = expected_accuracy(np.full(10, share), np.repeat([0, 1], 5), np.full(10, 4), [5, 5])
    assert 0 < abs(found.accuracy - share) < 0.05  # the next one may differ
    assert abs(found.interval[share] - share) < 0.05
    assert abs(found.interval[1 - share] - share) > 0.3


def test_probabilities_count_with_the_outcomes():
    labels, behind, shots = np.repeat([0, 1], 5), np.full(10, 4), [5, 5]
    right, sure = np.ones(10), np.full(10, 0.7)
    share = HITS + (1 - HITS) * 0.7
    expected = sigmoid(math.log(share / (1 - share)) + SLOPE * math.log(5 / 4))
    found = expected_accuracy(right, labels, behind, shots, sure)
    assert found.accuracy == pytest.approx(expected)
    assert found.right.tolist() == [5, 5]


def test_an_easy_class_with_many_shots_is_one_class_of_many():
    """Ten classes at 47 %, and 300 easy photos as an eleventh: not 92 %."""
    rng = np.random.default_rng(0)
    labels, shots = np.repeat(np.arange(10), 5), [5] * 10
    right = rng.permutation(np.r_[np.ones(24), np.zeros(26)])
    before = expected_accuracy(right, labels, np.full(50, 4), shots, np.full(50, 0.47))
    after = expected_accuracy(
        np.r_[right, np.ones(300)],
        np.r_[labels, np.full(300, 10)],
        np.r_[np.full(50, 4), np.full(300, 240)],
        [*shots, 300],
        np.r_[np.full(50, 0.47), np.full(300, 0.99)],
    )
    assert before.accuracy < after.accuracy < before.accuracy + 1 / 11 + 0.01
    assert after.per_class[:10].mean() == pytest.approx(before.per_class.mean(), abs=0.03)


def test_300_shots_of_one_class_and_1_of_another_are_unknown():
    """A model that always names the first class would be right as well."""
    given = (np.ones(300), np.zeros(300, int), np.full(300, 240), [300, 1], np.full(300, 0.999))
    assert math.isnan(expected_accuracy(*given).accuracy)
    right, labels = np.r_[np.ones(300), 1, 1], np.r_[np.zeros(300, int), 1, 1]
    behind = np.r_[np.full(300, 240), 1, 1]
    found = expected_accuracy(right, labels, behind, [300, 2, 1], np.full(302, 0.99))
    assert found.accuracy < 1
    assert found.interval[0] < 0.6  # little is known about two thirds of the new images


@pytest.mark.parametrize("shots", [[5] * 8, [1, 1, 2, 3, 5, 8, 12, 12]])
def test_truth_is_inside_the_interval(shots):
    """Tasks that follow the curve, with classes that differ in difficulty."""
    rng = np.random.default_rng(0)
    shots, inside, errors = np.array(shots), [], []
    for _ in range(200):
        theta = rng.normal(0.5, 1) + rng.normal(0, 0.7, len(shots))
        labels = np.repeat(np.arange(len(shots)), shots)
        labels = labels[shots[labels] > 1]
        behind = shots[labels] - 1
        right = rng.random(len(labels)) < 1 / (1 + np.exp(-theta[labels] - SLOPE * np.log(behind)))
        truth = np.mean(1 / (1 + np.exp(-theta - SLOPE * np.log(shots))))
        found = expected_accuracy(right, labels, behind, shots)
        inside.append(found.interval[0] <= truth <= found.interval[1])
        errors.append(found.accuracy - truth)
    assert np.mean(inside) >= 0.93
    assert abs(np.mean(errors)) < 0.02
