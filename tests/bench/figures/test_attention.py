"""The drawing of attention."""

import numpy as np
import pytest
from PIL import Image

from mivhead.diagnostics.explanation import BlockAttention
from mivhead_bench.figures.attention import draw_attention, shot_weights
from tests.helpers.pictures import ink


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
