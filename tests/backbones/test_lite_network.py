"""Our EfficientNet-Lite is timm's: the same names, shapes, sizes and numbers."""

from __future__ import annotations

import pytest
import torch

from mivhead.backbones.efficientnet_lite import SHAPES, EfficientNetLite, SameConv2d, tap_names

timm = pytest.importorskip("timm", reason="the extra timm is not installed")


@pytest.mark.parametrize("name", SHAPES)
def test_equals_timm(name: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(f"tf_{name}", pretrained=False).eval()
    ours = EfficientNetLite(name).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert tap_names(ours) == tap_names(theirs)
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
    ours = SameConv2d(2, 2, kernel, stride)
    theirs = timm.layers.Conv2dSame(2, 2, kernel, stride)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 2, *size)
    torch.testing.assert_close(ours(x), theirs(x))
