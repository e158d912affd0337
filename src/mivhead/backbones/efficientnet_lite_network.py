"""EfficientNet-Lite as a PyTorch module: for GPUs, and for methods that tune the backbone.

Its description and its weights are in `mivhead.backbones.efficientnet_lite`, which runs the same
network in onnxruntime. From top to bottom: how it is loaded, the network, and what makes it fast.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from mivhead.backbones.efficientnet_lite import (
    CLASSES,
    EXPANSION,
    KERNELS,
    LAST,
    SHAPES,
    STEM,
    STRIDES,
    WEIGHTS,
    read_weights,
)
from mivhead.backbones.module import ModuleBackbone
from mivhead.backbones.preset import Preset


def load_module(
    name: str, preset: Preset, device: str | torch.device, dtype: np.dtype[np.floating]
) -> ModuleBackbone:
    """Load the backbone in PyTorch, optimised for speed."""
    model = build(name)
    fold_batchnorm(model)
    mirror(model)
    return ModuleBackbone(
        name,
        model,
        WEIGHTS[name].sha256,
        preset,
        device=torch.device(device),
        dtype=dtype,
        mirrored=True,
        rebuild=partial(build, name),
    )


def build(name: str) -> nn.Module:
    """Build the ImageNet classifier as it was trained, with the weights of its package."""
    arrays = read_weights(name)
    # Many tensors are stored in TensorFlow's memory order, which would change the rounding.
    tensors = {key: torch.from_numpy(array.copy(order="C")) for key, array in arrays.items()}
    with torch.device("meta"):  # allocates and initialises nothing: the weights are replaced
        model = EfficientNetLite(name)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's "SAME" padding: odd padding puts the extra pixel at the end."""

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
    """BatchNorm followed by the activation, so that a tap on it gives the activated map."""

    def __init__(self, channels: int, *, linear: bool = False) -> None:
        super().__init__(channels, eps=1e-3)
        self.act = nn.Identity() if linear else nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then activate."""
        activated: Tensor = self.act(super().forward(x))
        return activated


class Residual(nn.Sequential):
    """A block whose input is added to its output if the shapes allow it."""

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
    """The ImageNet classifier, by a name in `SHAPES`; module for module as in timm."""

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
    """Expand the channels, convolve each, project; the first block does not expand."""
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


def fold_batchnorm(model: nn.Module) -> None:
    """Fold every BatchNorm into the convolution directly before it, in place.

    The BatchNorm is replaced by its activation (timm's and our activated norms have one) or by the
    identity, under the same name, so that a tap on it keeps its meaning. This is valid for models
    whose modules are listed in the order in which they run, such as EfficientNets.
    """
    for parent in list(model.modules()):
        children = list(parent.named_children())
        for (conv_name, conv), (norm_name, norm) in pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, getattr(norm, "act", nn.Identity()))


def mirror(model: nn.Module) -> None:
    """Rotate all kernels of a folded network by 180 degrees, so that it needs no padded copies.

    TensorFlow's "SAME" convolution with stride 2 pads the right and the bottom more than the left
    and the top. PyTorch's own padding of (k - 1) / 2 does the opposite, so a SAME convolution
    first copies every map into a larger one, which takes a fifth of the time on a CPU. The two
    paddings are mirror images of each other: with rotated kernels and plain convolutions, the
    network maps a rotated image to exactly the rotated maps.
    """
    for parent in list(model.modules()):
        for name, conv in list(parent.named_children()):
            if isinstance(conv, nn.Conv2d):
                setattr(parent, name, _mirrored(conv))


def _mirrored(conv: nn.Conv2d) -> nn.Conv2d:
    height, width = conv.kernel_size
    padding = (height // 2, width // 2)
    if (
        not (height % 2 and width % 2)
        or not max(conv.stride) <= min(2, height, width)
        or max(conv.dilation) > 1
        or not (isinstance(conv, SameConv2d) or conv.padding == padding)
    ):
        raise ValueError(f"the padding of this convolution has no mirror image: {conv}")
    with torch.device("meta"):  # allocates and initialises nothing: the weights are replaced
        rotated = nn.Conv2d(
            conv.in_channels,
            conv.out_channels,
            (height, width),
            (conv.stride[0], conv.stride[1]),
            padding=padding,
            groups=conv.groups,
            bias=conv.bias is not None,
        )
    rotated.weight = nn.Parameter(conv.weight.detach().flip(2, 3))
    rotated.bias = conv.bias
    return rotated
