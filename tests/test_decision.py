"""Decisions: the formulas again in plain loops, what must always hold, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mivhead import MIVClassifier, Recipe
from mivhead.decision import (
    ENERGY,
    FAR,
    NONE,
    PRIOR_SCORES,
    UNSURE,
    USUAL_FAR,
    Calibration,
    DecisionRule,
    Thresholds,
    class_frequencies,
)
from mivhead.errors import InputError
from mivhead.prediction import predictions


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def rule(seed: int = 0, shots: int = 12, classes: int = 3, background: int = 5) -> DecisionRule:
    rng = np.random.default_rng(seed)
    labels = np.sort(np.arange(shots) % classes)
    logits = rng.normal(size=(shots, classes)) * 2
    made = DecisionRule.fit(unit(rng.normal(size=(shots, 8))), labels, logits, np.arange(shots))
    return made.with_background(unit(rng.normal(size=(background, 8))))


def test_the_score_in_plain_loops() -> None:
    made, rng = rule(), np.random.default_rng(1)
    logits, vectors = rng.normal(size=(4, 3)), unit(rng.normal(size=(4, 8)))
    for row, found in enumerate(made.unknown(logits, vectors)):
        near = max(float(vectors[row] @ shot) for shot in made.shots)
        far = max(float(vectors[row] @ image) for image in made.background)
        energy = math.log(sum(math.exp(value) for value in logits[row]))
        assert found == pytest.approx(FAR * far - near - ENERGY * energy, abs=1e-6)


def test_a_held_out_shot_is_not_compared_with_itself() -> None:
    made = rule()
    for place, row in enumerate(made.rows):
        near = max(float(made.shots[row] @ s) for i, s in enumerate(made.shots) if i != row)
        far = max(float(made.shots[row] @ image) for image in made.background)
        expected = FAR * far - near - ENERGY * float(made.energy[place])
        assert made.held_out[place] == pytest.approx(expected, abs=1e-6)


def test_thresholds_in_plain_loops() -> None:
    made = rule(shots=19, classes=2)  # ten shots and nine
    found = made.calibration.thresholds(reject=0.1, max_errors=0.1)
    assert found.unknown == sorted(made.held_out)[18 - 1]  # ceil(20 * 0.9)
    ten, five = 1 - 0.1 / 0.225, 1 - 0.1 / 0.29
    assert found.probability == pytest.approx((ten, 1 - 0.1 / (0.225 + 0.065 / 5)))
    few = Calibration((0.0,), (5, 3, 1, 40), calibrated=True).thresholds()
    assert few.probability == pytest.approx((five, 1 - 0.1 / 0.43, 1 - 0.1 / 0.60, ten))


def test_classes_with_one_shot_lower_what_may_be_rejected() -> None:
    scores = tuple(float(score) for score in range(19))
    equal, unequal = Calibration(scores, (10, 9), True), Calibration(scores, (10, 9, 1, 1), True)
    assert equal.thresholds().unknown == 17
    assert unequal.thresholds().unknown == 18  # ceil(20 * 0.95) - 1
    assert Calibration(scores, (1, 1), True).thresholds().unknown == 17


@given(st.integers(0, 10**6), st.floats(0.01, 0.49), st.floats(1.01, 2.0))
def test_more_is_rejected_or_unsure_if_more_is_allowed(
    seed: int, share: float, factor: float
) -> None:
    made = rule(seed)
    few, many = (
        made.calibration.thresholds(share, share),
        made.calibration.thresholds(share * factor, share * factor),
    )
    assert many.unknown <= few.unknown
    assert many.probability <= few.probability
    assert made.calibration.thresholds(0).unknown == math.inf
    assert made.calibration.thresholds(max_errors=None).probability == ()


@pytest.mark.parametrize(("shots", "reject"), [(9, 0.1), (30, 0.2), (45, 0.05)])
def test_known_images_are_rejected_no_more_often_than_allowed(shots: int, reject: float) -> None:
    rng = np.random.default_rng(shots)
    trials, rejected = 4000, 0
    for _ in range(trials):
        scores = rng.normal(size=shots + 1)
        # Equal shots, no background: the score is FAR * USUAL_FAR - 1 - ENERGY * energy.
        vectors = np.eye(2, dtype=np.float32)[[0] * shots]
        energy = (-scores[:-1] / ENERGY).astype(np.float32)
        rows = np.arange(shots)
        made = DecisionRule(vectors, rows * 0, vectors[:0], rows, energy)
        rejected += scores[-1] + FAR * USUAL_FAR - 1 > made.calibration.thresholds(reject).unknown
    share = (shots + 1 - math.ceil(round((shots + 1) * (1 - reject), 9))) / (shots + 1)
    expected = share if math.ceil((shots + 1) * (1 - reject)) <= shots else 1 / (shots + 1)
    assert rejected / trials == pytest.approx(expected, abs=0.02)
    assert expected <= reject + 1e-9


@pytest.mark.parametrize("name", ["reject", "max_errors"])
@pytest.mark.parametrize("value", [1.5, -0.1, "5%"])
def test_shares_outside_zero_and_one(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} must be between 0 and 1"):
        rule().calibration.thresholds(**{name: value})


def test_background_of_another_backbone() -> None:
    with pytest.raises(InputError, match=r"shape \(3, 9\), expected \(images, 8\)"):
        rule().with_background(np.ones((3, 9), np.float32))


def test_a_prediction_without_thresholds_has_its_class_as_decision() -> None:
    classes, p = np.array(["cat", "dog"]), np.array([[0.2, 0.8], [0.6, 0.4]])
    plain = predictions(["x", "y"], classes, p)
    assert [each.decision for each in plain] == ["dog", "cat"]
    assert [each.unknown for each in plain] == [None, None]
    strict = Thresholds(unknown=0.0, probability=(0.7, 0.7))
    decided = predictions(["x", "y"], classes, p, np.array([-1.0, -1.0]), strict)
    assert [each.decision for each in decided] == ["dog", UNSURE]
    foreign = predictions(["x", "y"], classes, p, np.array([1.0, 1.0]), strict)
    assert {each.decision for each in foreign} == {NONE}


def data(seed: int = 0, ways: int = 4, shots: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(ways, 32))
    y = np.repeat(np.arange(ways), shots)
    return (centres[y] + 0.4 * rng.normal(size=(len(y), 32))).astype(np.float32), y


@pytest.mark.parametrize("recipe", ["mivhead", "paper", "experts"])
def test_foreign_vectors_are_none_of_these(recipe: str) -> None:
    X, y = data()
    names = np.array(["ant", "bee", "cat", "dog"])
    classifier = MIVClassifier(recipe, random_state=0).fit(X, names[y])
    new, truth = data(seed=1, shots=30)
    decisions = decide(classifier, new)
    given = ~np.isin(decisions, [NONE, UNSURE])
    assert given.mean() > 0.75
    assert (decisions[given] == names[truth][given]).mean() > 0.95
    foreign = np.random.default_rng(5).normal(size=(100, 32)).astype(np.float32)
    assert (decide(classifier, foreign) == NONE).mean() > 0.9
    assert not (decide(classifier, foreign, reject=None) == NONE).any()


def decide(classifier: MIVClassifier, X: np.ndarray, **thresholds: Any) -> np.ndarray:
    return np.array([each.decision for each in classifier.classify(X, **thresholds)])


def test_scores_do_not_depend_on_the_batch() -> None:
    X, y = data()
    classifier = MIVClassifier(Recipe(steps=2), random_state=0).fit(X, y)
    p, whole = classifier.score_unknown(X)
    assert np.array_equal(p, classifier.predict_proba(X))
    alone = [classifier.score_unknown(X[i : i + 1])[1][0] for i in range(len(X))]
    assert whole == pytest.approx(alone, abs=1e-6)


def test_one_shot_thresholds_follow_from_how_alike_the_shots_are() -> None:
    classifier = MIVClassifier(Recipe(steps=1), random_state=0)
    X, y = data(shots=1)
    apart = classifier.fit(X, y).decision_.calibration.thresholds()
    alike = classifier.fit(X + 5 * X[0], y).decision_.calibration.thresholds()
    assert alike.unknown < apart.unknown < math.inf
    assert apart.probability == pytest.approx((1 - 0.1 / 0.60,) * 4)


def test_expected_scores_of_one_shot_models_in_plain_loops() -> None:
    rng = np.random.default_rng(3)
    shots, background = unit(rng.normal(size=(4, 8))), unit(rng.normal(size=(5, 8)))
    rule = DecisionRule.fit(shots, np.arange(4))
    without = rule.calibration.thresholds().unknown  # computed before there is a background
    made = rule.with_background(background)
    far = near = 0.0
    for i, shot in enumerate(shots):
        far += max(float(shot @ other) for other in made.background) / 4
        near += max(float(shot @ other) for j, other in enumerate(shots) if j != i) / 4
    expected = [value + 0.5 * far - 0.9 * near for value in PRIOR_SCORES]
    assert made.held_out == pytest.approx(expected, abs=1e-5)
    assert made.calibration.thresholds().unknown != without == rule.calibration.thresholds().unknown


# A class that stands for everything else.


def test_the_rule_without_the_shots_of_the_other_class() -> None:
    rng = np.random.default_rng(2)
    vectors, labels = unit(rng.normal(size=(9, 8))), np.repeat([0, 1, 2], 3)
    logits = rng.normal(size=(9, 3))
    whole = DecisionRule.fit(vectors, labels, logits, np.arange(9))
    made = whole.with_other(1)
    assert np.array_equal(made.shots, vectors[[0, 1, 2, 6, 7, 8]])
    assert made.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert made.background == pytest.approx(vectors[3:6], abs=1e-3)
    expected = [math.log(math.exp(a) + math.exp(c)) for a, _, c in logits[[0, 1, 2, 6, 7, 8]]]
    assert made.energy == pytest.approx(expected, abs=1e-6)
    queries = unit(rng.normal(size=(2, 8)))
    high = np.array([[0.0, 50.0, 1.0], [0.0, -50.0, 1.0]])  # of no importance: not a name
    first, second = made.unknown(high, queries), made.unknown(high[::-1], queries)
    assert first == pytest.approx(second)


def test_other_is_never_a_name() -> None:
    classes, p = np.array(["cat", "dog", "other"]), np.array([[0.1, 0.2, 0.7], [0.5, 0.1, 0.4]])
    found = predictions(["x", "y"], classes, p, None, Thresholds(other=2))
    assert [each.label for each in found] == ["dog", "cat"]
    assert [each.decision for each in found] == [NONE, "cat"]
    assert found[0].probabilities["other"] == 0.7


def test_a_prior_may_leave_a_class_that_seemed_impossible() -> None:
    exported = np.array([[1.0, 0.0]], np.float32)  # in which small probabilities are 0
    assert Thresholds(prior=(0.0, 2.0)).adjust(exported).tolist() == [[0.0, 1.0]]


def test_priors_are_plain_bayes() -> None:
    shots = {"a": 4, "b": 2, "c": 2}
    prior = class_frequencies("shots", shots)
    assert prior == (1.5, 0.75, 0.75) == class_frequencies({"c": 1, "a": 2, "b": 1}, shots)
    p = np.array([[0.5, 0.3, 0.2]])
    expected = p * [0.5, 0.25, 0.25] / (p * [0.5, 0.25, 0.25]).sum()
    assert Thresholds(prior=prior).adjust(p) == pytest.approx(expected)
    assert class_frequencies("uniform", shots) is None is class_frequencies("shots", {1: 3, 2: 3})
    assert class_frequencies({"1": 5e-324, "2": 0}, {1: 3, 2: 3}) == (2.0, 0.0)


@pytest.mark.parametrize(
    "prior",
    [
        "equal",
        {"cat": 1, "cow": 2},
        {"cat": 1},
        {"cat": 1, "dog": float("nan")},
        {"cat": 1, "dog": -1},
        {"cat": 1, "dog": "2"},
        {"cat": 1e308, "dog": 1e308},
        {"cat": 0, "dog": 0},
    ],
    ids=str,
)
def test_unusable_priors_are_refused(prior: Any) -> None:
    with pytest.raises(InputError, match="class"):
        class_frequencies(prior, {"cat": 5, "dog": 5})
