"""Class names as a member: the formulas once more in plain loops, and what must always hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mivhead import MIVClassifier
from mivhead.ensemble.constants import SPREADS
from mivhead.ensemble.names import (
    NameScores,
    name_cosines,
)
from mivhead.errors import InputError
from mivhead.features import Block, Features

CLASSES, WIDTH = 8, 32


class World:
    """Classes around means in one space; vectors of names that are near the means, or anywhere."""

    def __init__(self, seed: int, *, image_noise: float = 1.2, text_noise: float = 1.6) -> None:
        self.rng = np.random.default_rng(seed)
        means = self.rng.normal(size=(CLASSES, WIDTH))
        self.means = means / np.linalg.norm(means, axis=1, keepdims=True)
        self._image_noise = image_noise / math.sqrt(WIDTH)
        self.vectors = self.means + self.rng.normal(0, text_noise / math.sqrt(WIDTH), means.shape)

    def draw(self, counts: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        labels = np.repeat(np.arange(len(counts)), counts)
        noise = self.rng.normal(0, self._image_noise, (len(labels), WIDTH))
        return (self.means[labels] + noise).astype(np.float32), labels

    def by_label(self) -> dict[int, np.ndarray[Any, Any]]:
        return dict(enumerate(self.vectors))


def accuracies(world: World, counts: list[int]) -> dict[str, float]:
    """Accuracy of names alone, of shots alone (on the classes that have some) and of both."""
    X, y = world.draw(counts)
    Q, q = world.draw([25] * CLASSES)
    both = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.by_label())
    shots = MIVClassifier(random_state=0).fit(X, y)
    unit = world.vectors / np.linalg.norm(world.vectors, axis=1, keepdims=True)
    alone = name_cosines(Block(token=Q), unit).argmax(axis=1)
    found = {"both": both.predict(Q), "shots": shots.predict(Q), "names": alone}
    return {name: float((labels == q).mean()) for name, labels in found.items()}


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


@pytest.mark.parametrize(
    "counts",
    [[1] * CLASSES, [5] * CLASSES, [2, 1, 5, 2, 1, 5, 2, 5]],
    ids=["one shot", "five shots", "one to five"],
)
def test_names_and_shots_are_better_than_either(counts: list[int]) -> None:
    found = mean_of([accuracies(World(seed), counts) for seed in range(6)])
    assert found["both"] >= max(found["shots"], found["names"]) + 0.005, found


@pytest.mark.parametrize("shots", [1, 2, 5])
def test_useless_vectors_do_no_harm(shots: int) -> None:
    runs = []
    for seed in range(8):
        world = World(seed)
        world.vectors = np.random.default_rng(1000 + seed).normal(size=(CLASSES, WIDTH))
        runs.append(accuracies(world, [shots] * CLASSES))
    found = mean_of(runs)
    assert found["names"] < 0.25
    assert found["both"] > found["shots"] - 0.01, found


def test_equal_vectors_are_not_used() -> None:
    world = World(0)
    world.vectors = np.ones((CLASSES, WIDTH))
    X, y = world.draw([2] * CLASSES)
    with_names = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.by_label())
    without = MIVClassifier(random_state=0).fit(X, y)
    names = with_names.ensemble_.names  # type: ignore[union-attr]
    assert names is not None
    assert not names.used
    np.testing.assert_array_equal(with_names.logits(X), without.logits(X))


def test_the_scale_is_the_posterior_mean() -> None:
    rng = np.random.default_rng(3)
    labels = np.array([0, 0, 1, 2])
    cosines = rng.normal(0.2, 0.03, (4, 3))
    cosines[np.arange(4), labels] += 0.05
    found = NameScores.fit(cosines, labels)
    weights = [4 / 3 / 2, 4 / 3 / 2, 4 / 3, 4 / 3]  # every class counts the same
    cosines -= sum(w * row for w, row in zip(weights, cosines, strict=True)) / 4 / 2
    centred = [[c - sum(row) / 3 for c in row] for row in cosines.tolist()]
    spread = math.sqrt(sum(c * c for row in centred for c in row) / 12)
    likelihoods = []
    for wanted in SPREADS:
        total = 0.0
        for row, label, weight in zip(centred, labels.tolist(), weights, strict=True):
            powers = [math.exp(wanted / spread * c) for c in row]
            total += weight * math.log(powers[label] / sum(powers))
        likelihoods.append(math.exp(total))
    mean = sum(p * s for p, s in zip(likelihoods, SPREADS, strict=True)) / sum(likelihoods)
    assert found.spread == pytest.approx(spread)
    assert found.scale == pytest.approx(mean / spread)
    others = sum(likelihoods[1:]) / (len(SPREADS) - 1)
    assert found.evidence == pytest.approx(math.log(others / likelihoods[0]))


def test_the_prior_weight_falls_with_the_shots() -> None:
    scores = NameScores.fit(0.2 + 0.1 * np.eye(4), np.arange(4))
    weights = [scores.prior_weight(np.full(4, n)) for n in (1, 2, 5, 10)]
    assert weights == pytest.approx([weights[0] / n for n in (1, 2, 5, 10)])
    mixed = scores.prior_weight(np.array([1, 10, 1, 10]))
    assert weights[0] > mixed > weights[3]


def test_half_of_the_mean_is_subtracted() -> None:
    world = World(4)
    X, y = world.draw([3, 1, 2, 2, 1, 1, 1, 1])
    model = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.by_label())
    names = model.ensemble_.names  # type: ignore[union-attr]
    assert names is not None
    raw = name_cosines(Block(token=X), names.vectors)
    means = [np.mean([raw[y == c, k].mean() for c in np.unique(y)]) for k in range(CLASSES)]
    found = names.cosines(Features(X))
    np.testing.assert_allclose(found, raw - 0.5 * np.array(means), atol=1e-6)


def fit(vectors: Any, **how: Any) -> MIVClassifier:
    X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    return MIVClassifier(random_state=0, **how).fit(X, list("aabb"), class_vectors=vectors)


def test_a_recipe_without_experts_takes_no_vectors() -> None:
    with pytest.raises(InputError, match="class vectors"):
        fit(np.ones((2, 6)), recipe="paper")


def test_patches_have_a_mean_vector() -> None:
    maps = np.random.default_rng(0).normal(size=(3, 4, 2, 2))
    vectors = np.eye(4)[:2]
    of_map = name_cosines(Features([maps]).blocks[0], vectors)
    of_token = name_cosines(Block(token=maps.mean(axis=(2, 3))), vectors)
    np.testing.assert_allclose(of_map, of_token, rtol=1e-5)
