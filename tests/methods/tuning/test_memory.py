"""What a step costs, in activations and passes, and that training works at default settings."""

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mivhead.backbones import load_backbone
from mivhead.methods import METHODS, make_method
from mivhead.methods.tuning.base import chunk_size
from mivhead.model.readers import network_of
from tests.helpers.small_networks import digits, network, resnet, vit

TUNERS = tuple(name for name, method in METHODS.items() if method.needs == "images")


class Activations:
    """Counts the bytes that are kept for backward passes, and the most of them at any time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def keep(self, tensor: Tensor) -> "Kept":
        return Kept(self, tensor)


class Kept:
    """One kept tensor; gone when the graph that holds it is."""

    def __init__(self, all_: Activations, tensor: Tensor) -> None:
        self.all, self.tensor = all_, tensor
        self.bytes = tensor.nbytes if tensor.ndim == 4 else 0  # maps, and kernels: small here
        all_.now += self.bytes
        all_.most = max(all_.most, all_.now)

    def __del__(self) -> None:
        self.all.now -= self.bytes


def most_kept(method: str, images_at_once: int | None) -> int:
    X, y = digits(16)
    tuner = make_method(method, steps=1, images_at_once=images_at_once)
    net = network(resnet())
    kept = Activations()
    with saved_tensors_hooks(kept.keep, lambda each: each.tensor):
        tuner.attach(net).fit(X, y)
    return kept.most


@pytest.mark.parametrize("method", ["tsa", "finetune"])
def test_one_chunk_of_activations_is_kept_at_a_time(method: str) -> None:
    whole, half, quarter = (most_kept(method, count) for count in (None, 24, 12))  # of 48
    constant = 2 * quarter - half  # kernels, which do not depend on the images
    assert half - constant == pytest.approx((whole - constant) / 2, rel=0.05)
    assert quarter < half < whole


@pytest.mark.parametrize("method", TUNERS)
def test_a_step_is_one_pass_of_all_images(method: str) -> None:
    X, y = digits(2)

    def passed(steps: int) -> int:
        net = network(resnet() if method == "tsa" else vit())
        seen: list[int] = []
        net.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        make_method(method, steps=steps).attach(net).fit(X, y)
        return sum(seen)

    votes = 9 if method == "finetune-vote" else 1
    assert passed(3) - passed(0) == votes * 3 * len(X)


def test_images_at_once_follow_from_their_size() -> None:
    """500 images of 84 px, as in large tasks, are more than one chunk; 25 of 224 px are not."""
    for size, images in ((224, 32), (84, 227), (2000, 1)):
        net = network(resnet())
        net.size = size
        assert chunk_size(net, None) == images
        assert chunk_size(net, 5) == 5


@pytest.mark.parametrize("method", TUNERS)
def test_default_settings_lower_the_loss_on_real_images(method: str) -> None:
    X, y = digits(4)
    model = resnet() if method == "tsa" else vit()
    losses = make_method(method, random_state=0).attach(network(model)).fit(X, y).losses_
    assert losses[-1] < losses[0]


def test_default_rate_lowers_the_loss_of_a_pretrained_network() -> None:
    """Weights of ImageNet are what fine-tuning is for; four of its forty steps must be felt."""
    net = network_of(load_backbone("efficientnet_lite0", device="cpu"), "finetune")
    X, y = digits(2)
    large = np.stack([np.asarray(Image.fromarray(x).resize((net.size, net.size))) for x in X])
    losses = make_method("finetune", steps=4).attach(net).fit(large, y).losses_
    assert all(after < 0.8 * before for before, after in pairwise(losses))
