"""The default recipe as a whole: what must hold for any features and any shots."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead import BlockPreset, Features, MIVClassifier, Recipe

LAYOUTS = {
    "maps": [(64, 5, 5), (96, 3, 3)],
    "a token": [(64,)],
    "wide": [(150, 2, 2)],
    "one patch": [(64, 1, 1)],
    "map and token": [{"map": (64, 4, 4), "token": (64,)}],
}
SHOTS = {"two classes": [3, 3], "single among more": [1, 4, 2], "all single": [1, 1, 1]}


def drawn(layout: str, shots: list[int], seed: int) -> tuple[Features, np.ndarray]:
    """Images around a centre for each class, the same for all seeds."""
    rng, labels = np.random.default_rng(seed), np.repeat(np.arange(len(shots)), shots)

    def part(shape: tuple[int, ...]) -> np.ndarray:
        centres = np.random.default_rng(5).normal(size=(len(shots), *shape))
        noise = rng.normal(size=(len(labels), *shape))
        return (centres[labels] + 0.7 * noise).astype(np.float32)

    blocks = [
        {k: part(s) for k, s in block.items()} if isinstance(block, dict) else part(block)
        for block in LAYOUTS[layout]
    ]
    return Features(blocks), labels


@pytest.mark.parametrize("shots", SHOTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_features_and_shots(layout: str, shots: str) -> None:
    """Images answer alone as together, in any order, from any seed, and right."""
    X, y = drawn(layout, SHOTS[shots], 0)
    queries, truth = drawn(layout, [6] * len(SHOTS[shots]), 1)
    classifier = MIVClassifier(random_state=0).fit(X, y)
    logits = classifier.logits(queries)
    assert np.isfinite(logits).all()
    assert (logits.argmax(axis=1) == truth).mean() > 0.8
    np.testing.assert_allclose(classifier.logits(queries[3]), logits[3:4], atol=1e-4, rtol=1e-4)
    assert classifier.support_ == X  # nothing changed it
    order = np.random.default_rng(2).permutation(len(y))
    names = np.roll(np.arange(len(SHOTS[shots])), 1)  # class c becomes names[c]
    other = MIVClassifier(random_state=1).fit(X[order], names[y[order]])
    np.testing.assert_allclose(other.logits(queries)[:, names], logits, atol=2e-3, rtol=1e-3)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_order_of_shots_and_of_their_views_does_not_matter(shots: list[int], random) -> None:
    X, y = drawn("maps", shots, 0)
    views, view_of = drawn("maps", shots, 3)[0], np.arange(len(y))
    queries, _ = drawn("maps", [4] * len(shots), 1)
    expected = MIVClassifier().fit(X, y, views=views, view_of=view_of).predict_proba(queries)
    order, turn = (random.sample(range(len(y)), len(y)) for _ in range(2))
    place = np.argsort(order)  # of each image in the new order
    again = MIVClassifier().fit(X[order], y[order], views=views[turn], view_of=place[turn])
    np.testing.assert_allclose(again.predict_proba(queries), expected, atol=1e-3)


def test_nothing_is_drawn_at_random() -> None:
    X, y = drawn("maps", [3, 2, 1], 0)
    first, second = (MIVClassifier(random_state=seed).fit(X, y) for seed in (0, 1))
    np.testing.assert_array_equal(first.logits(X), second.logits(X))
    assert first.losses_ == second.losses_


def test_identical_images_and_maps_of_zeros() -> None:
    """Nothing to learn from: every class is as likely as another."""
    for value in (0.0, 1.0):
        X = Features([np.full((6, 4, 3, 3), value, np.float32), np.full((6, 5), value, np.float32)])
        probabilities = MIVClassifier().fit(X, [0, 0, 1, 1, 2, 2]).predict_proba(X)
        np.testing.assert_allclose(probabilities, 1 / 3, atol=1e-4)


def test_the_loss_of_identical_images_is_rounding_but_their_probabilities_are_bounded() -> None:
    """With the self-mask, centred prototypes of identical images are rounding errors, and their
    cosines anything from -1 to 1. The loss is then between 0 and 5 instead of log 4.
    """
    X = np.linspace(0.5, 1.7, 32, dtype=np.float32)[:, None, None] * np.ones((12, 32, 4, 4), "f4")
    classifier = MIVClassifier().fit(X, np.repeat(range(4), 3))
    assert 0 < classifier.losses_[0] < 2 / classifier.head_.recipe.temperature
    assert classifier.losses_[0] != pytest.approx(np.log(4), abs=0.1)
    assert classifier.predict_proba(X).max() < 0.5


def test_a_task_that_cannot_be_learned_is_answered_unsurely_but_not_by_one_class() -> None:
    rng = np.random.default_rng(0)
    X, queries = (rng.normal(size=(n, 20, 2, 2)).astype(np.float32) for n in (8, 40))
    classifier = MIVClassifier().fit([X], np.arange(8) % 2)
    assert (classifier.ensemble_.weights > 0).all()
    assert set(classifier.predict([queries])) == {0, 1}
    assert np.median(classifier.predict_proba([queries]).max(axis=1)) < 0.75


def test_half_precision_features_give_nearly_the_same() -> None:
    X, y = drawn("maps", [3, 2, 1], 0)
    queries, _ = drawn("maps", [4] * 3, 1)
    half, single = (
        MIVClassifier().fit(X.to("float16").to(kind), y).predict_proba(queries.to(kind))
        for kind in ("float16", "float32")
    )
    np.testing.assert_allclose(half, single, atol=0.01)


def test_a_plain_block_is_left_to_the_experts() -> None:
    """Its values reach the head only where there are no experts, or no other blocks."""
    X, y = drawn("maps", [3, 2, 1], 0)
    plain = [BlockPreset(), BlockPreset(plain=True)]
    classifier = MIVClassifier(preset=plain).fit(X, y)
    assert [layer.config.channels for layer in classifier.head_.layers] == [64]
    names = [expert.name for expert in classifier.ensemble_.experts.ridges]
    assert "block1.second_order" in names
    assert "block1.mean" in names
    assert len(classifier.ensemble_.weights) == 1 + len(names)
    assert len(MIVClassifier(Recipe.paper(steps=1), plain).fit(X, y).head_.layers) == 2
    only = MIVClassifier(preset=[replace(each, plain=True) for each in plain]).fit(X, y)
    assert len(only.head_.layers) == 2
