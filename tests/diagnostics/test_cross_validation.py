"""Cross-validation on the shots, and suspicious shots."""

import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from mivhead import MIVClassifier, Recipe
from mivhead._util.arrays import wilson_interval
from mivhead.cli.fit import _describe_estimate
from mivhead.diagnostics.cross_validation import (
    RATIO,
    CrossValidation,
    cross_validate,
)
from mivhead.ensemble.ridge import Experts
from mivhead.ensemble.stacking import OutOfFold, fit_weights
from mivhead.errors import InputError
from mivhead.features import FeatureTable, SupportSet
from tests.test_classifier import FAST, clusters


def table(shots: list[int], swap: tuple[int, int] | None = None) -> FeatureTable:
    X, y = clusters(0, shots)
    labels = [f"class {c}" for c in y]
    if swap:
        labels[swap[0]], labels[swap[1]] = labels[swap[1]], labels[swap[0]]
    ids = tuple(f"{i}.jpg" for i in range(len(y)))
    return FeatureTable(X, ids, tuple(labels), X, np.arange(len(y)))


def check(model: MIVClassifier, data: FeatureTable, *, folds: int = 5) -> CrossValidation:
    """Cross-validate a table, as a model does with its shots; the result has the table's order."""
    support = SupportSet.read(data.features, data.labels, data.views, data.view_of)
    order = np.argsort(np.asarray(data.labels), kind="stable")  # that of the support set
    result = cross_validate(model, support, data.ids, folds=folds)
    return replace(
        result,
        labels=data.labels,
        probabilities=result.probabilities[np.argsort(order)],
    )


def test_every_shot_is_predicted_by_a_head_that_has_not_seen_it(monkeypatch) -> None:
    data = table([5, 3, 1])
    seen = []
    original = MIVClassifier.fit_support

    def spy(self, support):
        seen.append((support.features, support.views, support.view_rows))
        return original(self, support)

    monkeypatch.setattr(MIVClassifier, "fit_support", spy)
    result = check(MIVClassifier(Recipe.paper(steps=8)), data, folds=5)
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


def test_swapped_labels_are_suspects() -> None:
    result = check(MIVClassifier(Recipe(steps=20), random_state=0), table([5, 5, 5], swap=(2, 8)))
    assert {s.id for s in result.suspects} >= {"2.jpg", "8.jpg"}
    worst = next(s for s in result.suspects if s.id == "2.jpg")
    assert (worst.label, worst.predicted) == ("class 1", "class 0")
    first = [s.id for s in result.suspects[:2]]
    assert set(first) == {"2.jpg", "8.jpg"}  # the most surprising labels
    assert set(called(result)) <= set(first)


def predictions(p: np.ndarray, labels: str, **more: object) -> CrossValidation:
    ids = tuple(str(row) for row in range(len(p)))
    classes = np.array(list("abc"[: p.shape[1]]))
    return CrossValidation(ids, tuple(labels), classes, p, 5, calibrated=True, **more)


def called(result: CrossValidation) -> list[str]:
    return [mistake.id for mistake in result.suspects if mistake.mislabelled]


def test_a_label_is_looked_at_again_if_another_is_far_more_probable() -> None:
    p = np.array([[0.98, 0.01, 0.01]] * 6 + [[0.01, 0.98, 0.01]] * 6)
    tiny = 0.999 / (RATIO + 1)
    p[0] = [tiny, 0.999 - tiny, 0.001]
    assert called(predictions(p, "a" * 6 + "b" * 6)) == ["0"]
    assert called(predictions(p, "a" * 6 + "b" * 6, other="a")) == []  # never suspect
    assert called(replace(predictions(p, "a" * 6 + "b" * 6), calibrated=False)) == []
    p[0] = [1.1 * tiny, 0.999 - 1.1 * tiny, 0.001]  # just hard
    hard = predictions(p, "a" * 6 + "b" * 6)
    assert ([m.id for m in hard.suspects], called(hard)) == (["0"], [])
    p[0] = [0.001, 0.001, 0.998]  # class c has a single shot, which is never left out
    assert called(predictions(p, "a" * 6 + "b" * 6)) == []


def test_a_task_of_which_many_labels_seem_wrong_is_hard() -> None:
    p = np.array([[0.999, 0.001]] * 20)
    assert len(called(predictions(p, "a" * 18 + "b" * 2))) == 2
    assert called(predictions(p, "a" * 15 + "b" * 5)) == []


def test_images_of_other_things_do_not_count() -> None:
    p = np.array([[0.9, 0.05, 0.05]] * 4 + [[0.05, 0.9, 0.05]] * 4 + [[0.9, 0.05, 0.05]] * 4)
    result = predictions(p, "a" * 4 + "b" * 4 + "c" * 4, other="c")
    assert (result.score.images, result.score.right) == (8, 8)
    assert result.estimate.tested == 8
    assert result.suspects == []
    assert not re.search(r"^c +4", _describe_estimate(result), re.M)
    assert str(result).startswith("Of 100 new photos like these, about ")


def test_nothing_to_test_with_one_shot_per_class() -> None:
    result = check(MIVClassifier(**FAST), table([1, 1]))
    assert np.isnan(result.accuracy)
    assert result.suspects == []
    assert result.interval == (0.0, 1.0)
    assert result.estimate.right_names is None


def test_errors() -> None:
    data = table([2, 2])
    with pytest.raises(InputError, match="folds"):
        check(MIVClassifier(), data, folds=1)


def test_folds_are_as_many_as_shots_at_most() -> None:
    result = check(MIVClassifier(**FAST), table([3, 2]), folds=5)
    assert (result.folds, result.score.images) == (3, 5)


def test_cheap_cross_validation_leaves_the_shot_out_of_everything() -> None:
    """If a shot changes, the heads of the other folds change, and what predicts it does not.

    Its own prediction is that of an ensemble without it: a head of the other folds, experts of the
    other folds, and weights that were fitted without it.
    """
    data = table([4, 5, 3])
    result = check(MIVClassifier(**FAST), data, folds=3)
    assert result.tested.all()
    assert result.folds == 3
    np.testing.assert_allclose(result.probabilities.sum(axis=1), 1)
    labels = list(data.labels)
    labels[5] = "class 2"  # another label for a shot, which its own prediction must not see
    other = check(MIVClassifier(**FAST), replace(data, labels=tuple(labels)), folds=3)
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


def test_classes_that_are_numbers_are_listed_as_text() -> None:
    X, y = clusters(0, [3, 3, 3])
    numbers = SupportSet.read(X, np.array([9, 10, 100])[y])
    names = SupportSet.read(X, np.array(["a", "b", "c"])[y])
    found, expected = (
        cross_validate(MIVClassifier(**FAST), each, list("123456789")) for each in (numbers, names)
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
        embedded = model.head_.embed(model.support_)
        cosines = model.head_.cosines(embedded, model.starts_, X[rows])
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
    left_out = OutOfFold(np.arange(10), labels, members, prior, np.ones(10), prior)
    first = left_out.cross_fitted()[0]
    assert abs(first[0] - first[1]) < 0.5
    assert fit_weights(members, labels, prior)[1] > 5 * prior[1]  # with the shot, it helps
