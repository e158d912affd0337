"""What every backbone must do, whatever is behind it; each adapter's tests call these checks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mivhead import Features
from mivhead.backbones.base import Backbone, Identity
from mivhead.errors import InputError


def photos(count: int) -> list[np.ndarray]:
    """Different crops of the two real photos that scikit-learn carries, of uneven sizes."""
    from sklearn.datasets import load_sample_images

    pair = load_sample_images().images
    return [pair[i % 2][20 * i :, 30 * i : 70 * i + 150] for i in range(count)]


def run(code: str) -> str:
    """Output of a few lines of Python in a process of their own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def assert_close(found: Features, expected: Features, atol: float = 0.02) -> None:
    """Equal up to the last bits of float16, which depend on how many images share a kernel."""
    assert found.layout == expected.layout
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        np.testing.assert_allclose(found.tensors[name], tensor, rtol=5e-3, atol=atol)


def check(backbone: Backbone) -> None:
    """Run every check on one backbone."""
    images = photos(5)
    whole = backbone.extract(images)
    check_result(backbone, whole)
    check_batches(backbone, images, whole)
    check_kinds_of_images(backbone, images[:2], whole[:2])
    check_refusals(backbone)


def check_result(backbone: Backbone, whole: Features) -> None:
    assert isinstance(backbone, Backbone)
    assert len(whole) == 5
    assert len(whole.blocks) == len(backbone.preset.taps) == len(backbone.preset.blocks)
    assert all(t.dtype == np.float16 for t in whole.tensors.values())
    assert Identity.from_json(backbone.identity.as_json()) == backbone.identity
    assert backbone.identity.taps == backbone.preset.taps
    assert backbone.identity.preprocessing == backbone.preset.preprocessing
    for tensor in whole.tensors.values():  # different images, different features
        assert not np.array_equal(tensor[0], tensor[1])


def check_batches(backbone: Backbone, images: list[np.ndarray], whole: Features) -> None:
    assert backbone.extract(images) == whole, "the same batch must give the same bits"
    for size in (1, 2):
        parts = [backbone.extract(images[i : i + size]) for i in range(0, 5, size)]
        assert_close(Features.concat(parts), whole)
    assert_close(backbone.extract(images[::-1]), whole[[4, 3, 2, 1, 0]])


def check_kinds_of_images(backbone: Backbone, images: list[np.ndarray], whole: Features) -> None:
    assert backbone.extract([Image.fromarray(i) for i in images]) == backbone.extract(images)
    assert_close(backbone.extract(images), whole)
    grey = images[0][:, :, 0]
    assert backbone.extract([grey]) == backbone.extract([np.stack([grey] * 3, axis=-1)])


def check_refusals(backbone: Backbone) -> None:
    with pytest.raises(InputError, match="no images"):
        backbone.extract([])
    with pytest.raises(InputError, match="Image 1"):
        backbone.extract([photos(1)[0], np.ones((9, 9, 3))])
