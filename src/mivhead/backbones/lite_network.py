"""EfficientNet-Lite in plain PyTorch, module for module as in timm.

timm has these networks too, and ours has its names, so that taps mean the same. But importing timm
takes longer than extracting the features of a hundred images: it brings torchvision, and that
brings PyTorch's compiler.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

STEM, LAST, CLASSES = 32, 1280, 1000
EXPANSION = 6
KERNELS = (3, 3, 5, 3, 5, 5, 3)  # of the seven stages
STRIDES = (1, 2, 2, 2, 1, 2, 1)


@dataclass(frozen=True)
class Shape:
    """What tells the variants apart, for each of the seven stages."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]


SHAPES = {
    "efficientnet_lite0": Shape((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)),
    "efficientnet_lite1": Shape((16, 24, 40, 80, 112, 192, 320), (1, 3, 3, 4, 4, 5, 1)),
    "efficientnet_lite2": Shape((16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1)),
}


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's "SAME" padding: if it is odd, the end gets one more."""

    def forward(self, x: Tensor) -> Tensor:
        """Pad, then convolve."""
        rows, columns = (self._padding(axis, x.shape[2 + axis]) for axis in (0, 1))
        return super().forward(F.pad(x, (*columns, *rows)))

    def _padding(self, axis: int, size: int) -> tuple[int, int]:
        stride = self.stride[axis]
        outputs = -(-size // stride)
        total = max(0, (outputs - 1) * stride + self.kernel_size[axis] - size)
        return total // 2, total - total // 2


class ActivatedNorm(nn.BatchNorm2d):
    """BatchNorm with the activation after it, so that a tap on it gives the activated map."""

    def __init__(self, channels: int, *, linear: bool = False) -> None:
        super().__init__(channels, eps=1e-3)
        self.act = nn.Identity() if linear else nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then activate."""
        activated: Tensor = self.act(super().forward(x))
        return activated


class Residual(nn.Sequential):
    """A block, added to its input where the shapes allow it."""

    def __init__(self, parts: OrderedDict[str, nn.Module], *, skip: bool) -> None:
        super().__init__(parts)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        """Run the parts, and add the input."""
        out = x
        for part in self:
            out = part(out)
        return out + x if self.skip else out


class EfficientNetLite(nn.Sequential):
    """The ImageNet classifier of a name in `SHAPES`."""

    def __init__(self, name: str) -> None:
        shape = SHAPES[name]
        before = (STEM, *shape.widths[:-1])
        stages = zip(before, shape.widths, shape.depths, KERNELS, STRIDES, strict=True)
        super().__init__(
            OrderedDict(
                conv_stem=_convolution(3, STEM, 3, 2),
                bn1=ActivatedNorm(STEM),
                blocks=nn.Sequential(*(_stage(*stage) for stage in stages)),
                conv_head=_convolution(shape.widths[-1], LAST, 1),
                bn2=ActivatedNorm(LAST),
                global_pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
                classifier=nn.Linear(LAST, CLASSES),
            )
        )


def _stage(before: int, width: int, depth: int, kernel: int, stride: int) -> nn.Sequential:
    blocks = [_block(before, width, kernel, stride)]
    blocks += [_block(width, width, kernel, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def _block(before: int, width: int, kernel: int, stride: int) -> Residual:
    """Expand the channels, convolve each, project; the first block of a network expands nothing."""
    parts: OrderedDict[str, nn.Module]
    if before == STEM:
        parts = OrderedDict(
            conv_dw=_convolution(before, before, kernel, stride, groups=before),
            bn1=ActivatedNorm(before),
            conv_pw=_convolution(before, width, 1),
            bn2=ActivatedNorm(width, linear=True),
        )
    else:
        wide = EXPANSION * before
        parts = OrderedDict(
            conv_pw=_convolution(before, wide, 1),
            bn1=ActivatedNorm(wide),
            conv_dw=_convolution(wide, wide, kernel, stride, groups=wide),
            bn2=ActivatedNorm(wide),
            conv_pwl=_convolution(wide, width, 1),
            bn3=ActivatedNorm(width, linear=True),
        )
    return Residual(parts, skip=stride == 1 and before == width)


def _convolution(
    before: int, after: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    if stride > 1:
        return SameConv2d(before, after, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=False)
