"""Pictures of an episode: that they are drawn, of everything, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mivhead.diagnostics.attention import BlockAttention, draw_attention, shot_weights
from mivhead.diagnostics.tsne import Episode, draw_tsne, place
from tests.helpers.extras import needs

pytestmark = needs("matplotlib", "plot")


def episode(classes: int, shots: int = 3, title: str = "block 1 of 2") -> Episode:
    rng = np.random.default_rng(0)
    centres = 10 * rng.normal(size=(classes, 6))
    labels = np.repeat(np.arange(classes), shots)
    points = centres[labels] + rng.normal(size=(len(labels), 6))
    return Episode(title, points, labels, centres, centres[0] + 0.1)


def test_neighbours_stay_neighbours():
    plane = place(episode(4, shots=6), seed=0)
    assert plane.shape == (24 + 4 + 1, 2)
    distances = np.linalg.norm(plane[24:28] - plane[28], axis=1)
    assert distances.argmin() == 0  # the query lies by the prototype it was made from


def test_the_same_seed_gives_the_same_plane():
    np.testing.assert_array_equal(place(episode(3), seed=1), place(episode(3), seed=1))


def ink(path) -> float:
    """How much is drawn: the spread of the picture's greys."""
    with Image.open(path) as image:
        return float(np.asarray(image.convert("L")).std())


@pytest.mark.parametrize("classes", [2, 30])
def test_tsne_is_drawn(classes, tmp_path):
    names = [f"class $1_{i}" for i in range(classes)]
    panels = [episode(classes, shots=1), episode(classes, title="nearest centroids")]
    truth = names[1] if classes > 2 else None
    draw_tsne(panels, names, tmp_path / "t.png", title="a $", truth=truth)
    assert ink(tmp_path / "t.png") > 5


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
