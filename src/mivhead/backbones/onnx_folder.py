"""ViTs in the layout of transformers.js, run by onnxruntime: DINOv2 and others without PyTorch.

Such a repository or folder (`hf-onnx:OWNER/NAME` or `hf-onnx:./FOLDER`) has `config.json`,
`preprocessor_config.json` and `onnx/model.onnx` (`onnx/vision_model.onnx` beside a text tower). Its
graph outputs the last block only. The other blocks, `blocks.0`, `blocks.1`, ..., are found by the
shape of the graph: every block adds something computed from the residual stream to the stream
itself, so the stream is the longest chain of additions in which one summand is computed from the
other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.runtime import parse_graph, tensors_of
from mivhead._util.schema import parse_json
from mivhead.backbones import hub
from mivhead.backbones.base import Identity, Parts, check_taps
from mivhead.backbones.onnx_model import OnnxBackbone, image_input, read_content, read_with_outputs
from mivhead.backbones.preset import (
    BlockPreset,
    Preprocessing,
    Preset,
    as_vit,
    near_usual_size,
    spread_taps,
)
from mivhead.errors import InputError, NotAvailableError, check_file, reading

SCHEME = "hf-onnx:"
GRAPHS = ("onnx/vision_model.onnx", "onnx/model.onnx")  # by preference
SETTINGS = ("config.json", "preprocessor_config.json")
FILES = (*SETTINGS, *GRAPHS, *(f"{name}_data*" for name in GRAPHS))  # to download
MAX_NODES = 20_000
_PASSED = ("Identity", "Cast", "Dropout")  # operations that do not change the stream
_SKIPPED = ("Shape", "Size")  # a tensor's shape does not make another one depend on its values

# Scale, bias and epsilon of a LayerNorm
Norm: TypeAlias = "tuple[NDArray[np.float32], NDArray[np.float32], np.float32]"


class OnnxFolderBackbone(OnnxBackbone):
    """A ViT whose blocks were found in its graph; `prefix` tokens come before the patches.

    The final norm is applied to every block, except in CLIP, whose norm is for [CLS] only.
    """

    norm: Norm | None = None
    token = True  # whether [CLS] is the first token
    prefix = 0

    def read(self, output: NDArray[Any], tap: str) -> Parts:
        """Turn a tapped tensor into the parts of a block."""
        values = output.astype(np.float32, copy=False)  # (n, tokens, C)
        count = values.shape[1] - self.prefix
        side = math.isqrt(max(0, count))
        if values.ndim != 3 or side < 1 or side * side != count:
            raise InputError(f"The tap {tap!r} of shape {values.shape} is not a grid of patches.")
        if self.norm is not None:
            scale, bias, epsilon = self.norm
            values = values - values.mean(-1, keepdims=True)
            spread = np.sqrt((values * values).mean(-1, keepdims=True) + epsilon)
            values = values / spread * scale + bias
        patches = values[:, self.prefix :].transpose(0, 2, 1)  # (n, C, patches)
        parts = {"map": np.ascontiguousarray(patches).reshape(len(values), -1, side, side)}
        return parts | ({"token": values[:, 0]} if self.token else {})


def load(
    spec: str,
    *,
    preset: Preset | None,
    device: Any,
    dtype: Any,
    image_size: int | None = None,
) -> OnnxFolderBackbone:
    """Load a model from a folder or the hub; see `mivhead.backbones.load_backbone`."""
    file, folder = find_graph(spec.removeprefix(SCHEME))
    content = read_content(file)
    model = parse_graph(content, file)
    sha256 = _hash(content, model, file)
    config = _read_json(folder / SETTINGS[0])
    kind, settings = str(config.get("model_type")), config.get("vision_config", config)
    tensors = find_blocks(model, settings.get("num_hidden_layers"), file)
    source = image_input(model, file)
    chosen = preset
    if chosen is None:
        usual = _read_preprocessing(folder)
        near = near_usual_size(usual.size, settings.get("patch_size", 16))
        usual = replace(usual, size=image_size or source.size or near)
        taps = spread_taps(list(tensors))
        chosen = Preset(taps, (BlockPreset(),) * len(taps), usual)
    check_taps(spec, chosen.taps, list(tensors))
    backbone = OnnxFolderBackbone(
        Identity(spec, sha256, chosen.preprocessing, chosen.taps),
        chosen,
        partial(read_with_outputs, file, [tensors[tap] for tap in chosen.taps]),
        source,
        dtype,
        tensors=tensors,
        device=device or "cpu",
        folder=str(file.parent),
    )
    if not kind.startswith("clip"):
        backbone.norm = _final_norm(model, list(tensors.values())[-1], file)
    backbone.token = not kind.startswith("siglip")
    backbone.prefix = int(backbone.token) + int(settings.get("num_register_tokens", 0))
    if preset is None:
        backbone.preset = replace(chosen, blocks=as_vit(backbone.suggest_blocks()))
    return backbone


def find_graph(name: str) -> tuple[Path, Path]:
    """Return the file of the graph and the folder of its settings, downloaded if needed."""
    folder = Path(name).expanduser()
    if hub.is_repository(name):
        config = hub.find(name, SETTINGS[0])
        folder = config.parent if config else hub.download(name, FILES)
    for graph in GRAPHS:
        if (folder / graph).is_file():
            return folder / graph, folder
    raise NotAvailableError(f"{folder} has no onnx/model.onnx in the layout of transformers.js.")


def _hash(content: bytes, model: Any, file: Path) -> str:
    """Hash the graph and the file next to it that may hold its weights; refuse all others."""
    digest = hashlib.sha256(content)
    entries = [entry for tensor in tensors_of(model) for entry in tensor.external_data]
    for name in sorted({entry.value for entry in entries if entry.key == "location"}):
        if not name.startswith(f"{file.name}_data") or Path(name).name != name:
            raise InputError(f"{file} stores weights in {name!r:.80}, which is not read.")
        check_file(file.parent / name)
        with reading(file.parent / name), (file.parent / name).open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    with reading(path, ValueError):
        document = parse_json(path.read_bytes())
    if not isinstance(document, dict):
        raise InputError(f"{path} does not contain a JSON object.")
    return document


def _read_preprocessing(folder: Path) -> Preprocessing:
    """Read size, mean and std; images are resized without a crop, as for all backbones."""
    config = _read_json(folder / SETTINGS[1])
    cropped = config.get("do_center_crop", "crop_size" in config)
    size: Any = config.get("crop_size" if cropped else "size")
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    if config.get("do_normalize") is False:
        config |= {"image_mean": (0, 0, 0), "image_std": (1, 1, 1)}
    try:
        mean: Any = tuple(map(float, config["image_mean"]))
        std: Any = tuple(map(float, config["image_std"]))
        return Preprocessing(int(size), mean, std)
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{folder} has no usable {SETTINGS[1]}.") from error


def find_blocks(model: Any, depth: int | None, file: Path) -> dict[str, str]:
    """Find the tensor of every tap."""
    stream = residual_stream(model.graph.node)
    depth = depth or len(stream) // 2
    if len(stream) >= 2 * depth > 0:
        stream = stream[-2 * depth :][1::2]  # attention, then MLP
    elif not stream or len(stream) != depth:  # one addition per block, if both run in parallel
        raise _not_found(file)
    return {f"blocks.{i}": name for i, name in enumerate(stream)}


def _not_found(file: Path) -> InputError:
    return InputError(
        f"The blocks of {file} or their final norm cannot be found. If it was optimized or "
        "quantized, use the plain onnx/model.onnx."
    )


def residual_stream(nodes: Sequence[Any]) -> list[str]:
    """Return the longest chain of residual additions in a graph, as tensors in their order.

    An addition is residual if one of its summands is computed from the other one.
    """
    if len(nodes) > MAX_NODES:
        raise InputError(f"The graph has {len(nodes):,} nodes; at most {MAX_NODES:,} are searched.")
    made_by = {name: i for i, node in enumerate(nodes) for name in node.output}
    ancestors: list[int] = []  # of every node, as the bits of a number
    chains: dict[int, list[str]] = {}  # of tensors, up to each addition

    def source(name: str) -> int | None:
        """Return the node that computes a tensor, seen through those that only pass it on."""
        maker = made_by.get(name)
        while maker is not None and nodes[maker].op_type in _PASSED:
            maker = made_by.get(nodes[maker].input[0])
        return maker

    for i, node in enumerate(nodes):
        bits = 0
        for name in () if node.op_type in _SKIPPED else node.input:
            maker = made_by.get(name)
            if maker is not None and maker < i:
                bits |= ancestors[maker] | 1 << maker
        ancestors.append(bits)
        if node.op_type != "Add":
            continue
        left, right = map(source, node.input)
        if left is None or right is None or left == right:
            continue
        for kept, added in ((left, right), (right, left)):
            if ancestors[added] >> kept & 1:
                chains[i] = [*chains.get(kept, ()), node.output[0]]
    return max(reversed(chains.values()), key=len, default=[])


def _final_norm(model: Any, tensor: str, file: Path) -> Norm:
    """Find the LayerNorm that follows a tensor, as one operation or as its parts."""
    from onnx import numpy_helper

    nodes = model.graph.node
    constants = {constant.name: constant for constant in model.graph.initializer}
    for node in nodes:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    made_by = {name: node for node in nodes for name in node.output}

    def following(name: str, operation: str) -> list[Any]:
        passed = {n.output[0] for n in nodes if n.op_type in _PASSED and name in n.input} | {name}
        return [n for n in nodes if n.op_type == operation and passed & set(n.input)]

    def value(name: str) -> NDArray[np.float32]:
        array: NDArray[Any] = numpy_helper.to_array(constants[name], str(file.parent))
        return array.astype(np.float32)

    def constant(node: Any) -> NDArray[np.float32]:
        """Return the constant that a node takes."""
        return value(next(name for name in node.input if name in constants))

    try:
        for node in following(tensor, "LayerNormalization"):
            epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
            return value(node.input[1]), value(node.input[2]), np.float32(epsilon)
        for centred in following(tensor, "Sub"):
            for divided in following(centred.output[0], "Div"):
                (scaled,) = following(divided.output[0], "Mul")
                (shifted,) = following(scaled.output[0], "Add")
                variance = made_by[divided.input[1]]
                while variance.op_type != "Add":  # the root of the variance and epsilon
                    variance = made_by[variance.input[0]]
                return constant(scaled), constant(shifted), np.float32(constant(variance))
    except (ValueError, KeyError, StopIteration):  # something else that starts like a norm
        pass
    raise _not_found(file)
