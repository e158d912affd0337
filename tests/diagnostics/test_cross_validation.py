"""Cross-validation on the shots, and suspicious shots."""

import numpy as np
import pytest

from mivhead import MIVClassifier, Recipe
from mivhead.diagnostics.cross_validation import cross_validate
from mivhead.diagnostics.evaluation import wilson_interval
from mivhead.errors import InputError
from mivhead.features import FeatureTable
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
    original = MIVClassifier.fit

    def spy(self, X, y, *, views=None, view_of=None):
        seen.append((X, views, view_of))
        return original(self, X, y, views=views, view_of=view_of)

    monkeypatch.setattr(MIVClassifier, "fit", spy)
    result = cross_validate(MIVClassifier(**FAST), data, folds=5)
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
    assert result.accuracy == right / 8 > 0.5
    assert result.interval == wilson_interval(right, 8)
    assert result.folds == 5
    assert not result.leave_one_out  # each fold leaves out up to two shots


def test_swapped_labels_are_suspects() -> None:
    result = cross_validate(
        MIVClassifier(Recipe(steps=20), random_state=0), table([5, 5, 5], swap=(1, 7))
    )
    assert {s.id for s in result.suspects} >= {"1.jpg", "7.jpg"}
    worst = next(s for s in result.suspects if s.id == "1.jpg")
    assert (worst.label, worst.predicted) == ("class 1", "class 0")
    assert [s.probability for s in result.suspects] == sorted(
        (s.probability for s in result.suspects), reverse=True
    )


def test_nothing_to_test_with_one_shot_per_class() -> None:
    result = cross_validate(MIVClassifier(**FAST), table([1, 1]))
    assert np.isnan(result.accuracy)
    assert result.suspects == []
    assert all(np.isnan(bound) for bound in result.interval)


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
