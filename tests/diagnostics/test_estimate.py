"""Held-out estimates, suspects, attention."""

import numpy as np
import pytest
import torch

from mivhead import MIVClassifier, Recipe
from mivhead.diagnostics.attention import explain
from mivhead.diagnostics.estimate import held_out, wilson_interval
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
    result = held_out(MIVClassifier(**FAST), data, folds=5)
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


def test_swapped_labels_are_suspects() -> None:
    result = held_out(
        MIVClassifier(Recipe(steps=20), random_state=0), table([5, 5, 5], swap=(1, 7))
    )
    assert {s.id for s in result.suspects} >= {"1.jpg", "7.jpg"}
    worst = next(s for s in result.suspects if s.id == "1.jpg")
    assert (worst.label, worst.predicted) == ("class 1", "class 0")
    assert [s.probability for s in result.suspects] == sorted(
        (s.probability for s in result.suspects), reverse=True
    )


def test_nothing_to_test_with_one_shot_a_class() -> None:
    result = held_out(MIVClassifier(**FAST), table([1, 1]))
    assert np.isnan(result.accuracy)
    assert result.suspects == []
    assert all(np.isnan(bound) for bound in result.interval)


def test_held_out_errors() -> None:
    data = table([2, 2])
    with pytest.raises(InputError, match="folds"):
        held_out(MIVClassifier(), data, folds=1)
    with pytest.raises(InputError, match="no labels"):
        held_out(MIVClassifier(), FeatureTable(data.features, data.ids))


def test_wilson_interval_solves_its_equation() -> None:
    for k, n in ((0, 5), (3, 7), (50, 50)):
        for bound in wilson_interval(k, n):
            assert (k / n - bound) ** 2 == pytest.approx(
                1.96**2 * bound * (1 - bound) / n, abs=1e-9
            )


def test_attention_sums_to_one_per_image_and_per_class() -> None:
    X, y = clusters(0, [3, 1, 2])
    classifier = MIVClassifier(**FAST).fit(X, y)
    queries, _ = clusters(1, [2, 2, 2])
    blocks = explain(classifier, queries)
    assert [b.patches.shape[1:] for b in blocks] == [(4, 4), (2, 2)]
    for block in blocks:
        np.testing.assert_allclose(block.patches.sum(axis=(1, 2)), 1, rtol=1e-5)
        assert block.shots.shape == (6, 6)
        for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
            np.testing.assert_allclose(block.shots[:, rows].sum(axis=1), 1, rtol=1e-5)


def test_a_shot_attends_most_to_itself() -> None:
    X, y = clusters(0, [3, 3])
    classifier = MIVClassifier(Recipe(steps=0, eta=5.0), random_state=0).fit(X, y)
    shots = explain(classifier, X)[0].shots
    assert all(shots[i, i] == shots[i, (i // 3) * 3 : (i // 3) * 3 + 3].max() for i in range(6))


def test_attention_without_maps_or_cross_attention() -> None:
    X, y = np.eye(6, 8), [0, 0, 0, 1, 1, 1]
    classifier = MIVClassifier(Recipe.paper(cross_attention=False, steps=1)).fit(X, y)
    (block,) = explain(classifier, X)
    assert block.patches is None
    torch.testing.assert_close(torch.tensor(block.shots[0]), torch.full((6,), 1 / 3))
