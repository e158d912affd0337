"""Folding, mirroring and tapping change speed, not results."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mivhead.backbones.efficientnet_lite import ActivatedNorm, SameConv2d, fold_batchnorm, mirror
from mivhead.backbones.taps import Taps
from mivhead.errors import InputError


def network(kernel: int, stride: int, channels: int, seed: int) -> nn.Sequential:
    """SAME convolution, depthwise SAME convolution and projection, with lived-in BatchNorms."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        SameConv2d(3, channels, kernel, stride, bias=False),
        ActivatedNorm(channels),
        SameConv2d(channels, channels, kernel, stride, groups=channels, bias=False),
        ActivatedNorm(channels),
        nn.Conv2d(channels, 5, 3, padding=1, bias=True),
        nn.BatchNorm2d(5),
    ).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.weight, norm.running_mean, norm.running_var, norm.bias):
                nn.init.uniform_(tensor, 0.5, 2)
    return model


@settings(deadline=None, max_examples=40)
@given(
    kernel=st.sampled_from([3, 5]),
    stride=st.sampled_from([1, 2]),
    height=st.integers(6, 33),
    width=st.integers(6, 33),
    seed=st.integers(0, 1000),
)
def test_folded_and_mirrored_equals_plain(
    kernel: int, stride: int, height: int, width: int, seed: int
) -> None:
    plain = network(kernel, stride, 4, seed)
    x = torch.randn(2, 3, height, width)
    with torch.no_grad():
        expected = plain(x)
        folded = copy.deepcopy(plain)
        fold_batchnorm(folded)
        assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
        torch.testing.assert_close(folded(x), expected, rtol=1e-4, atol=1e-4)
        mirror(folded)
        assert not any(isinstance(m, SameConv2d) for m in folded.modules())
        torch.testing.assert_close(folded(x.flip(2, 3)).flip(2, 3), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 4, 2),
        nn.Conv2d(3, 4, 3, stride=3, padding=1),
        nn.Conv2d(3, 4, 1, stride=2),
        nn.Conv2d(3, 4, 3, padding=0),
        nn.Conv2d(3, 4, 3, padding=1, dilation=2),
    ],
)
def test_mirror_refuses_what_it_cannot_do(conv: nn.Conv2d) -> None:
    with pytest.raises(ValueError, match="no mirror image"):
        mirror(nn.Sequential(conv))


def test_taps_are_copies_that_later_layers_cannot_change() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before, after = Taps(model, ["0", "1"])(x)
        assert before.min() < 0 <= after.min()
        torch.testing.assert_close(before, model[0](x))
        torch.testing.assert_close(after, before.relu())


def test_taps_stop_after_the_deepest() -> None:
    class Mine(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("not needed for the taps")

    model = nn.Sequential(nn.ReLU(), Mine())
    assert Taps(model, ["0"])(torch.ones(1))[0] == 1


def test_taps_in_the_wrong_order_are_refused() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with pytest.raises(InputError, match="order in which they run"):
        Taps(model, ["1", "0"])(torch.ones(1))


def test_taps_of_one_model_do_not_disturb_each_other() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    first, second = Taps(model, ["0"]), Taps(model, ["1"])
    assert second(torch.ones(1))[0] == torch.ones(1).tanh()
    assert first(torch.ones(1))[0] == 1
