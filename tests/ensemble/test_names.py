"""Class names as a member: the formulas once more in plain loops, and what must always hold."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead import MIVClassifier
from mivhead.ensemble.names import (
    SPREADS,
    STRENGTH,
    WEAK,
    Names,
    NameScores,
    fit_unseen,
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
    [[1] * CLASSES, [5] * CLASSES, [0, 1, 5, 0, 1, 5, 0, 5], [0] * 4 + [2] * 4],
    ids=["one shot", "five shots", "none, one and five", "none and two"],
)
def test_names_and_shots_are_better_than_either(counts: list[int]) -> None:
    found = mean_of([accuracies(World(seed), counts) for seed in range(6)])
    assert found["both"] >= max(found["shots"], found["names"]) + 0.005, found


@pytest.mark.parametrize("counts", [[0] * CLASSES, [5] + [0] * (CLASSES - 1)])
def test_names_alone_are_as_good_as_their_cosines(counts: list[int]) -> None:
    world = World(0)
    X, y = world.draw(counts)
    Q, _ = world.draw([5] * CLASSES)
    model = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.by_label())
    unit = world.vectors / np.linalg.norm(world.vectors, axis=1, keepdims=True)
    cosines = name_cosines(Block(token=Q), unit)
    np.testing.assert_array_equal(model.predict(Q), cosines.argmax(axis=1))
    powers = np.exp(100 * (cosines - cosines.max(axis=1, keepdims=True)))  # CLIP's own scale
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(Q), expected, atol=1e-4)


def test_a_class_without_shots_is_found_and_takes_nothing_from_the_others() -> None:
    counts, right, alone = [0, 0, 0, 0, 5, 5, 5, 5], [], []
    for seed in range(6):
        world = World(seed)
        X, y = world.draw(counts)
        Q, q = world.draw([25] * CLASSES)
        model = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.by_label())
        ok = model.predict(Q) == q
        right.append([ok[q < 4].mean(), ok[q >= 4].mean()])
        unit = world.vectors / np.linalg.norm(world.vectors, axis=1, keepdims=True)
        by_name = name_cosines(Block(token=Q), unit).argmax(axis=1) == q
        alone.append([by_name[q < 4].mean(), by_name[q >= 4].mean()])
    unseen, seen = np.mean(right, axis=0)
    of_names = np.mean(alone, axis=0)
    assert unseen > of_names[0] - 0.1
    assert seen > of_names[1] + 0.1
    assert unseen + seen > of_names.sum() + 0.05


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
    centred = [[c - sum(row) / 3 for c in row] for row in cosines.tolist()]
    spread = math.sqrt(sum(c * c for row in centred for c in row) / 12)
    weights = [4 / 3 / 2, 4 / 3 / 2, 4 / 3, 4 / 3]  # every class counts the same
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


def test_what_stands_for_a_class_without_shots_minimises_its_loss() -> None:
    rng = np.random.default_rng(5)
    labels = np.arange(4).repeat(3)
    logits = rng.normal(size=(12, 4)) + 2 * np.eye(4)[labels]
    cosines = rng.normal(0.2, 0.05, (12, 4)) + 0.1 * np.eye(4)[labels]
    scale = 20.0
    a, b = fit_unseen(logits, cosines, labels, scale)
    centre, spread = cosines.mean(), cosines.std()

    def loss(slope: float, level: float) -> float:
        """In plain loops: every class is hidden once, and told from the others."""
        total = STRENGTH / 2 * ((slope - scale) * spread) ** 2
        total += WEAK / 2 * (level + slope * centre) ** 2
        for image, label in enumerate(labels.tolist()):
            for hidden in range(4):
                # A model that does not know the class: the mean of the others is the mean of all.
                rest = [logits[image, c] for c in range(4) if c != hidden]
                shift = sum(logits[image]) / 4 - sum(rest) / 3
                rivals = sum(math.exp(each + shift) for each in rest)
                own = math.exp(slope * cosines[image, hidden] + level)
                p = own / (own + rivals)
                total -= math.log(p if hidden == label else 1 - p)
        return total

    least = loss(a, b)
    for da, db in ((0.3, 0), (-0.3, 0), (0, 0.03), (0, -0.03), (0.2, -0.04), (-0.2, 0.04)):
        assert loss(a + da, b + db) > least


def test_many_classes_take_little_memory() -> None:
    labels = np.arange(150).repeat(2)
    logits = np.random.default_rng(0).normal(size=(300, 150))
    tracemalloc.start()
    fit_unseen(logits, 0.01 * logits, labels, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * logits.nbytes  # not images x classes x classes


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 3), min_size=4, max_size=6))
def test_logits_add_up(seed: int, counts: list[int]) -> None:
    """The votes of all members add up to the logits, and so does the graph of an export."""
    rng = np.random.default_rng(seed)
    seen = np.flatnonzero(counts)
    vectors = rng.normal(size=(len(counts), 5))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names = Names(vectors, np.zeros(len(counts)), seen, 3.0, 7.0, -0.5)
    others, weights = rng.normal(size=(2, 4, len(seen))), np.array([0.5, 2.0])
    found = name_cosines(Block(token=rng.normal(size=(4, 5))), vectors)
    logits = np.tensordot(weights, others, axes=1)
    if len(seen) < 2:
        return
    scores, all_weights = names.votes(others, weights, found)
    total = np.tensordot(all_weights, scores, axes=1)
    np.testing.assert_allclose(total, names.add(logits, found), rtol=1e-6, atol=1e-6)


def test_half_of_the_mean_is_subtracted() -> None:
    world = World(4)
    X, y = world.draw([3, 1, 0, 2, 1, 1, 1, 1])
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


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.ones((2, 5)), r"'a' has the shape \(5,\), expected \(6,\)"),
        (np.ones((3, 6)), "3 vectors for 2 classes"),
        ({"a": np.ones(6)}, "no vector for the class 'b'"),
        ({"a": np.ones(6), "b": np.zeros(6)}, "'b' has no direction"),
        ({"a": np.ones(6), "b": np.full(6, np.nan)}, "'b' has no direction"),
        ({"a": np.ones(6), "b": ["x"] * 6}, "'b' must be a list of numbers"),
        ({0: np.ones(6), 1: np.ones(6)}, "no vector for the class 'a'"),
        ({"a": np.ones(6), "b": np.ones(6), "c": np.ones(7)}, "'c' has the shape"),
    ],
)
def test_bad_vectors(vectors: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(vectors)


def test_one_class_is_no_classification() -> None:
    X = np.ones((2, 6), np.float32)
    with pytest.raises(InputError, match="1 class"):
        MIVClassifier().fit(X, list("aa"), class_vectors={"a": np.ones(6)})
    with pytest.raises(InputError, match="1 class"):
        MIVClassifier().fit(X, list("aa"), class_vectors=np.ones((1, 6)))


def test_a_recipe_without_experts_takes_no_vectors() -> None:
    with pytest.raises(InputError, match="cannot learn from class vectors"):
        fit(np.ones((2, 6)), recipe="paper")


def test_an_array_is_in_the_order_of_the_labels() -> None:
    world = World(1)
    X, y = world.draw([2] * CLASSES)
    by_label = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.by_label())
    in_order = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.vectors)
    np.testing.assert_array_equal(by_label.logits(X), in_order.logits(X))


def test_lengths_do_not_matter() -> None:
    world = World(2)
    X, y = world.draw([1] * CLASSES)
    once = MIVClassifier(random_state=0).fit(X, y, class_vectors=world.vectors)
    more = MIVClassifier(random_state=0).fit(X, y, class_vectors=8 * world.vectors)
    np.testing.assert_allclose(once.logits(X), more.logits(X), rtol=1e-5)


def test_patches_have_a_mean_vector() -> None:
    maps = np.random.default_rng(0).normal(size=(3, 4, 2, 2))
    vectors = np.eye(4)[:2]
    of_map = name_cosines(Features([maps]).blocks[0], vectors)
    of_token = name_cosines(Block(token=maps.mean(axis=(2, 3))), vectors)
    np.testing.assert_allclose(of_map, of_token)
