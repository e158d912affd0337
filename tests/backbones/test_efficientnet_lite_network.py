"""The network equals timm's, and folding and mirroring change its speed, not its results."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mivhead.backbones.efficientnet_lite import SHAPES, list_taps
from mivhead.backbones.efficientnet_lite_network import (
    ActivatedNorm,
    EfficientNetLite,
    SameConv2d,
    fold_batchnorm,
    mirror,
)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_timm(name: str) -> None:
    timm = pytest.importorskip("timm", reason="the extra timm is not installed")
    torch.manual_seed(0)
    theirs = timm.create_model(f"tf_{name}", pretrained=False).eval()
    ours = EfficientNetLite(name).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert set(list_taps(name)) <= dict(ours.named_modules()).keys()
    assert set(list_taps(name)) <= dict(theirs.named_modules()).keys()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 65, 98)
    with torch.no_grad():
        expected = theirs(x)
        assert expected.std() > 0
        torch.testing.assert_close(ours(x), expected)
    norms = [m for m in ours.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    others = [m for m in theirs.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert [(m.eps, m.momentum) for m in norms] == [(m.eps, m.momentum) for m in others]


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(8, 8), (9, 8), (7, 12)])
def test_same_padding_equals_timm(kernel: int, stride: int, size: tuple[int, int]) -> None:
    layers = pytest.importorskip("timm.layers", reason="the extra timm is not installed")
    ours = SameConv2d(2, 2, kernel, stride)
    theirs = layers.Conv2dSame(2, 2, kernel, stride)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 2, *size)
    torch.testing.assert_close(ours(x), theirs(x))


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
