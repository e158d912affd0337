"""Cross-validation on the shots, and suspicious shots."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from mivhead import Features, MIVClassifier, Recipe
from mivhead.diagnostics.cross_validation import (
    MARGIN,
    SHARE,
    cross_validate,
    cross_validate_support,
    find_groups,
    likely_mislabelled,
    mislabelled_group,
)
from mivhead.diagnostics.evaluation import wilson_interval
from mivhead.ensemble.ridge import Experts
from mivhead.ensemble.stacking import OutOfFold, fit_weights
from mivhead.errors import InputError
from mivhead.features import FeatureTable
from mivhead.model.decision import softmax
from mivhead.support import SupportSet
from tests.test_classifier import FAST, clusters


def table(shots: list[int], swap: tuple[int, int] | None = None) -> FeatureTable:
    X, y = clusters(0, shots)
    labels = [f"class {c}" for c in y]
    if swap:
        labels[swap[0]], labels[swap[1]] = labels[swap[1]], labels[swap[0]]
    ids = tuple(f"{i}.jpg" for i in range(len(y)))
    return FeatureTable(X, ids, tuple(labels), X, np.arange(len(y)))


def test_every_shot_is_predicted_by_a_head_that_has_not_seen_it(monkeypatch) -> None:
    data = table([5, 3, 1])
    seen = []
    original = MIVClassifier.fit_support

    def spy(self, support):
        seen.append((support.features, support.views, support.view_rows))
        return original(self, support)

    monkeypatch.setattr(MIVClassifier, "fit_support", spy)
    result = cross_validate(MIVClassifier(Recipe.paper(steps=8)), data, folds=5)
    assert len(seen) == 5
    left_out = []
    for X, views, view_of in seen:
        rows = [i for i in range(9) if any(data.features[i] == X[j] for j in range(len(X)))]
        left_out += sorted(set(range(9)) - set(rows))
        assert views == X[view_of]  # here every view equals its original
    assert sorted(left_out) == list(range(8))  # the class with one shot is never left out
    assert result.tested.tolist() == [True] * 8 + [False]
    right = sum(
        result.classes[result.probabilities[i].argmax()] == data.labels[i] for i in range(8)
    )
    assert result.score.accuracy == right / 8 > 0.5
    assert result.score.interval == wilson_interval(right, 8)
    assert result.folds == 5
    assert not result.leave_one_out  # each fold leaves out up to two shots


def test_swapped_labels_are_suspects() -> None:
    result = cross_validate(
        MIVClassifier(Recipe(steps=20), random_state=0), table([5, 5, 5], swap=(2, 8))
    )
    assert {s.id for s in result.suspects} >= {"2.jpg", "8.jpg"}
    worst = next(s for s in result.suspects if s.id == "2.jpg")
    assert (worst.label, worst.predicted) == ("class 1", "class 0")
    first = [s.id for s in result.suspects[:2]]
    assert set(first) == {"2.jpg", "8.jpg"}  # the most surprising labels
    assert [s.id for s in result.suspects if s.mislabelled] == first


def test_hard_shots_are_not_called_mislabelled() -> None:
    """Labels that are drawn from the predictions themselves are right by construction."""
    rng = np.random.default_rng(0)
    called = shots = 0
    for sharpness in (0.5, 1.0, 2.0, 4.0):
        for _ in range(25):
            p = softmax(sharpness * rng.normal(size=(50, 10)))
            labels = np.array([rng.choice(10, p=row) for row in p])
            called += int(likely_mislabelled(p, labels)[1].sum())
            shots += len(labels)
    assert called / shots < 0.01


def test_swaps_are_called_mislabelled() -> None:
    """The rule in plain loops, and how many of the planted swaps it finds."""
    rng = np.random.default_rng(0)
    found = called = planted = 0
    for _ in range(40):
        p = softmax(3.5 * rng.normal(size=(50, 10)))
        labels = np.array([rng.choice(10, p=row) for row in p])
        wrong = rng.choice(50, 5, replace=False)
        labels[wrong] = (labels[wrong] + rng.integers(1, 10, 5)) % 10
        surprise, mislabelled = likely_mislabelled(p, labels)
        expected = np.zeros(50, bool)
        for t in sorted(surprise[surprise > math.log(8)]):
            hard = sum(
                p[i, c]
                for i in range(50)
                for c in range(10)
                if math.log(p[i].max() / p[i, c]) >= t - 1e-12
            )
            if hard + MARGIN <= SHARE * (surprise >= t).sum():
                expected = (surprise >= t) & ((surprise >= t).sum() <= 6)  # of 50
                break
        np.testing.assert_array_equal(mislabelled, expected)
        called += int(mislabelled.sum())
        found += int(mislabelled[wrong].sum())
        planted += 5
    assert found / called > 0.5
    assert found / planted > 0.25


def test_a_class_that_was_not_tested_is_no_evidence() -> None:
    """A shot that looks like the only shot of another class is called hard, not mislabelled."""
    p = np.array([[0.98, 0.01, 0.01]] * 6 + [[0.01, 0.98, 0.01]] * 6)
    labels = np.repeat([0, 1], 6)
    p[0] = [0.001, 0.998, 0.001]
    assert np.flatnonzero(likely_mislabelled(p, labels)[1]).tolist() == [0]
    p[0] = [0.001, 0.001, 0.998]  # class 2 has a single shot, which is never left out
    surprise, mislabelled = likely_mislabelled(p, labels)
    assert surprise.argmax() == 0
    assert not mislabelled.any()


def test_probabilities_of_other_methods_are_calibrated_first() -> None:
    """Sharper or flatter probabilities do not change which shots are called mislabelled."""
    data = table([6, 6, 6], swap=(2, 8))
    result = cross_validate(MIVClassifier(Recipe(steps=20), random_state=0), data)
    names = [s.id for s in result.suspects if s.mislabelled]
    assert names
    for scale in (0.3, 3.0):
        logs = np.log(np.maximum(result.probabilities, 1e-12))
        other = replace(result, probabilities=softmax(scale * logs), calibrated=False)
        assert [s.id for s in other.suspects if s.mislabelled] == names


def test_nothing_to_test_with_one_shot_per_class() -> None:
    result = cross_validate(MIVClassifier(**FAST), table([1, 1]))
    assert np.isnan(result.accuracy)
    assert result.suspects == []
    assert result.interval == (0.0, 1.0)
    assert all(np.isnan(value) for value in result.per_class.values())


def test_errors() -> None:
    data = table([2, 2])
    with pytest.raises(InputError, match="folds"):
        cross_validate(MIVClassifier(), data, folds=1)
    with pytest.raises(InputError, match="no labels"):
        cross_validate(MIVClassifier(), FeatureTable(data.features, data.ids))


def test_folds_are_as_many_as_shots_at_most() -> None:
    result = cross_validate(MIVClassifier(**FAST), table([3, 2]), folds=5)
    assert (result.folds, result.score.images, result.leave_one_out) == (3, 5, False)
    assert cross_validate(MIVClassifier(**FAST), table([3, 1]), folds=5).leave_one_out


def test_cheap_cross_validation_leaves_the_shot_out_of_everything() -> None:
    """If a shot changes, the heads of the other folds change, and what predicts it does not.

    Its own prediction is that of an ensemble without it: a head of the other folds, experts of the
    other folds, and weights that were fitted without it.
    """
    data = table([4, 5, 3])
    result = cross_validate(MIVClassifier(**FAST), data, folds=3)
    assert result.tested.all()
    assert result.folds == 3
    np.testing.assert_allclose(result.probabilities.sum(axis=1), 1)
    labels = list(data.labels)
    labels[5] = "class 2"  # another label for a shot, which its own prediction must not see
    other = cross_validate(MIVClassifier(**FAST), replace(data, labels=tuple(labels)), folds=3)
    assert other.probabilities[5, 2] < 0.5


def test_cheap_cross_validation_does_not_depend_on_the_order() -> None:
    data = table([4, 5, 3])
    fold = np.arange(12) % 3
    support = SupportSet.read(data.features, data.labels)
    expected = MIVClassifier(**FAST).cross_validated_logits(support, fold)
    rng = np.random.default_rng(1)
    order = np.concatenate([rng.permutation(rows) for rows in np.split(np.arange(12), [4, 9])])
    other = SupportSet.read(data.features[order], data.labels)
    found = MIVClassifier(**FAST).cross_validated_logits(other, fold[order])
    assert (found.argmax(axis=1) == expected[order].argmax(axis=1)).mean() > 0.8
    np.testing.assert_allclose(found, expected[order], atol=0.5)  # other shots test the weights


def test_results_are_in_the_order_of_the_table() -> None:
    data = table([4, 5, 3])
    expected = cross_validate(MIVClassifier(**FAST), data, folds=3)
    order = np.argsort([*range(4), *range(5), *range(3)], kind="stable")  # classes mixed
    views = np.argsort(order)[data.view_of]
    mixed = FeatureTable(
        data.features[order],
        tuple(data.ids[row] for row in order),
        tuple(data.labels[row] for row in order),
        data.views,
        views,
    )
    found = cross_validate(MIVClassifier(**FAST), mixed, folds=3)
    assert (found.ids, found.labels) == (mixed.ids, mixed.labels)
    np.testing.assert_array_equal(found.probabilities, expected.probabilities[order])


def test_classes_that_are_numbers_are_listed_as_text() -> None:
    X, y = clusters(0, [3, 3, 3])
    numbers = SupportSet.read(X, np.array([9, 10, 100])[y])
    names = SupportSet.read(X, np.array(["a", "b", "c"])[y])
    found, expected = (
        cross_validate_support(MIVClassifier(**FAST), each, list("123456789"))
        for each in (numbers, names)
    )
    assert found.classes.tolist() == ["10", "100", "9"]
    assert found.labels == ("9",) * 3 + ("10",) * 3 + ("100",) * 3
    np.testing.assert_array_equal(found.probabilities, expected.probabilities[:, [1, 2, 0]])
    assert found.score == expected.score


def test_cheap_cross_validation_uses_the_heads_of_the_other_folds() -> None:
    """The members' predictions are those of heads and experts that are fitted one by one."""
    X, y = clusters(0, [4, 4])
    fold = np.tile([0, 1], 4)
    seen = {}

    class Spy(OutOfFold):
        def cross_fitted(self):
            seen["members"], seen["rows"] = self.members, self.rows
            return super().cross_fitted()

    with mock.patch("mivhead.ensemble.stacking.OutOfFold", Spy):
        MIVClassifier(**FAST).cross_validated_logits(SupportSet.read(X, y), fold)
    for out in (0, 1):
        kept = np.flatnonzero(fold != out)
        model = MIVClassifier(**FAST).fit(X[kept], y[kept])
        rows = np.flatnonzero(fold == out)
        embedded = model.head_.embed(model.head_.prepare(model.support_))
        cosines = model.head_.cosines(embedded, model.bags_, X[rows])
        found = seen["members"][: len(cosines), rows]
        np.testing.assert_allclose(found, cosines, rtol=1e-5, atol=1e-5)
    others = np.flatnonzero(fold == 1)
    experts, _ = Experts.fit(X[others], y[others], 2)
    mean = experts(X[:1])[-1, 0]  # the PCA of the others sees all images
    np.testing.assert_allclose(seen["members"][-1, 0], mean, atol=1e-3, rtol=1e-3)


def test_weights_of_the_estimate_are_fitted_without_the_image() -> None:
    """One member knows the label of the first shot alone, which must not help that shot."""
    labels = np.arange(2).repeat(5)
    members = np.zeros((2, 10, 2), np.float32)
    members[0] = np.eye(2)[labels] * 0.1
    members[1, 0, 0] = 10.0
    prior = np.array([1.0, 0.01], np.float32)
    nothing = np.zeros((10, 2), np.float32)
    left_out = OutOfFold(np.arange(10), labels, members, prior, np.ones(10), prior, nothing)
    first = left_out.cross_fitted()[0]
    assert abs(first[0] - first[1]) < 0.5
    assert fit_weights(members, labels, prior)[1] > 5 * prior[1]  # with the shot, it helps


def with_wrong_group(seed: int, wrong: int) -> FeatureTable:
    """Make four classes of eight shots; the first ones of "a" show a "c"."""
    rng = np.random.default_rng(seed)
    centres, labels = rng.normal(size=(4, 16)), np.repeat(np.arange(4), 8)
    shown = labels.copy()
    shown[:wrong] = 2
    x = centres[shown] + 0.25 * rng.normal(size=(32, 16))
    names = tuple("abcd"[number] for number in labels)
    return FeatureTable(Features(x.astype(np.float32)), tuple(map(str, range(32))), names)


def test_several_wrong_shots_of_one_thing_are_called_mislabelled() -> None:
    together, alone = 0, 0
    for seed in range(4):
        result = cross_validate(MIVClassifier("experts"), with_wrong_group(seed, 3), verbose=False)
        called = [each for each in result.suspects if each.mislabelled]
        assert {each.id for each in called} <= {"0", "1", "2"}
        assert {each.predicted for each in called} <= {"c"}
        together += len(called)
        without = replace(result, without_group=None)
        alone += sum(each.mislabelled for each in without.suspects)
    assert together >= 9 > 2 * alone  # each of the three confirms the others


def test_right_shots_that_form_a_group_are_not_called_mislabelled() -> None:
    groups = 0
    for seed in range(4):
        result = cross_validate(MIVClassifier("experts"), with_wrong_group(seed, 0), verbose=False)
        groups += result.without_group is not None
        assert not any(each.mislabelled for each in result.suspects)
    assert groups


def test_groups_are_the_smaller_part_of_a_class() -> None:
    rng = np.random.default_rng(0)
    x = np.repeat(np.eye(4)[[0, 1, 2, 0]], [6, 3, 4, 7], axis=0) + 0.01 * rng.normal(size=(20, 4))
    labels = np.repeat([0, 1, 2], [9, 4, 7])  # the second is too small
    groups = find_groups(x, labels)
    assert groups[0].tolist() == [6, 7, 8]
    assert 1 not in groups
    assert all(2 <= len(rows) < (labels == number).sum() / 2 for number, rows in groups.items())


def test_a_group_is_predicted_without_all_of_it() -> None:
    shots = with_wrong_group(0, 3)
    result = cross_validate(MIVClassifier("experts"), shots, verbose=False)
    kept = np.arange(3, 32)
    assert shots.labels is not None
    model = MIVClassifier("experts").fit(shots.features[kept], np.asarray(shots.labels)[kept])
    assert result.without_group is not None
    expected = model.predict_proba(shots.features[np.arange(3)])
    # The weights of stacking differ: they are fitted on all shots, whatever their group.
    assert np.abs(result.without_group[:3] - expected).max() < 0.1
    assert np.isnan(result.without_group[3:8]).all()


def test_one_group_at_most_is_called() -> None:
    p = np.full((12, 3), 1 / 3)
    p[:2], p[4:6] = (0.002, 0.99, 0.008), (0.01, 0.01, 0.98)
    labels = np.repeat([0, 1, 2], 4)
    assert mislabelled_group(p, labels).tolist() == []  # shots of the same class are a group
    p[2:4] = p[6:] = np.nan
    assert mislabelled_group(p, labels).tolist() == [0, 1]
    p[1] = (0.06, 0.9, 0.04)  # not sure enough of one shot
    assert mislabelled_group(p, labels).tolist() == [4, 5]


def divide_plainly(x: np.ndarray) -> set[int]:
    """Divide vectors in two by k-means, from every vector and the one least like it."""
    divisions = []
    for start in x:
        centres = [start, min(x, key=lambda other: float(start @ other))]
        for _ in range(11):
            first = {
                i
                for i, v in enumerate(x)
                if sum((v - centres[0]) ** 2) < sum((v - centres[1]) ** 2)
            }
            parts = [sorted(first), sorted(set(range(len(x))) - first)]
            if not all(parts):
                break
            centres = [x[part].mean(axis=0) for part in parts]
        else:
            apart = sum(((x[p] - c) ** 2).sum() for p, c in zip(parts, centres, strict=True))
            divisions.append((apart, first))
    return min(divisions, key=lambda each: each[0])[1]


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_the_smaller_part_of_the_tightest_division(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.abs(rng.normal(size=(20, 6)))
    x[: 3 + seed] += [0, 0, 0, 2, 2, 2]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x, labels = x[rng.permutation(20)], np.repeat([0, 1], [9, 11])
    for number, rows in ((0, np.arange(9)), (1, np.arange(9, 20))):
        first = divide_plainly(x[rows])
        smaller = min(first, set(range(len(rows))) - first, key=len)
        expected = {int(rows[i]) for i in smaller} if len(smaller) > 1 else set()
        assert set(find_groups(x, labels).get(number, [])) == expected
