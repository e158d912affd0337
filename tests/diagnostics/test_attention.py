"""Attention of the MIV-head, and its drawing."""

import numpy as np
import pytest
from PIL import Image

from mivhead import MIVClassifier, Recipe
from mivhead.diagnostics.attention import BlockAttention, draw_attention, explain, shot_weights
from tests.helpers.extras import needs
from tests.helpers.pictures import ink
from tests.test_classifier import FAST, clusters

pytestmark = needs("matplotlib", "plot")


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
    classifier = MIVClassifier(Recipe(cross_attention=False, steps=1)).fit(X, y)
    (block,) = explain(classifier, X)
    assert block.patches is None
    np.testing.assert_allclose(block.shots[0], np.full(6, 1 / 3), rtol=1e-6)


def attention(shots: int) -> list[BlockAttention]:
    rng = np.random.default_rng(0)
    heat = rng.random((1, 4, 4))
    weights = np.array([[0.7, 0.3, *([1 / (shots - 2)] * (shots - 2))]])
    return [BlockAttention(heat, weights), BlockAttention(None, weights)]


def test_weights_are_averaged_over_blocks():
    one, two = np.array([[0.8, 0.2]]), np.array([[0.4, 0.6]])
    blocks = [BlockAttention(None, one), BlockAttention(None, two), BlockAttention(None, None)]
    np.testing.assert_allclose(shot_weights(blocks), [0.6, 0.4])
    assert shot_weights(blocks[2:]) is None


@pytest.mark.parametrize("with_pictures", [False, True])
def test_attention_is_drawn(with_pictures, tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    classes = [
        ("cat $", 0.9, np.array([0, 1])),
        ("a very long name of a class", 0.1, np.arange(2, 5)),
    ]
    pictures = [image] * 5 if with_pictures else None
    path = tmp_path / "attention.png"
    draw_attention(image, attention(5), classes, path, title="cat $", pictures=pictures)
    assert ink(path) > 5


def test_a_head_without_attention_shows_the_image(tmp_path):
    image = Image.new("RGB", (8, 8))
    classes = [("cat", 1.0, np.array([0]))]
    draw_attention(image, [BlockAttention(None, None)], classes, tmp_path / "a.png", title="cat")
    assert (tmp_path / "a.png").stat().st_size


def test_what_is_not_drawn_is_said(tmp_path):
    image = Image.new("RGB", (8, 8))
    classes = [
        (f"a rather long name, number {i}", 0.02, np.arange(10 * i, 10 * i + 10)) for i in range(50)
    ]
    shares = np.full((1, 500), 0.1)
    shares[0, :10] = [0.55, *[0.05] * 9]
    blocks = [BlockAttention(None, shares)]
    words = [t.get_text() for t in draw_attention(image, blocks, classes, title="t").texts]
    assert any("the 12 most probable of 50 classes" in text for text in words)
    assert any("at most 5.5 times that" in text for text in words)
    pictures = [image] * 500
    figure = draw_attention(image, blocks, classes, title="t", pictures=pictures)
    assert any("the 8 shots of each class with the most" in t.get_text() for t in figure.texts)
    names = {text.get_text().replace("\n", " ") for axes in figure.axes for text in axes.texts}
    assert "a rather long name, number 11 2 %" in names  # not cut
