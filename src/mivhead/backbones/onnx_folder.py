"""Models in the layout of transformers.js, run by onnxruntime: DINOv2 and others without PyTorch.

Such a repository or folder has `config.json`, `preprocessor_config.json` and `onnx/model.onnx`
(`onnx/vision_model.onnx` if there is a text tower as well). Its graph outputs the last block only.
The other blocks are found by the shape of the graph: every block adds something computed from the
residual stream to the stream itself, so the stream is the longest chain of additions in which one
summand is computed from the other. Taps have the names that `mivhead.backbones.transformers` uses,
`blocks.0`, `blocks.1`, ..., and their features are equal to it.

A specification is `hf-onnx:OWNER/NAME`, `hf-onnx:FOLDER` or `hf-onnx:FILE.onnx`. Neither the
package onnx nor PyTorch is needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.onnx_reader import GraphNode, OnnxFile, with_outputs
from mivhead._util.runtime import CPU, CUDA, Session
from mivhead._util.schema import from_json, parse_json
from mivhead._util.threads import thread_count
from mivhead.backbones import hub
from mivhead.backbones.base import Identity
from mivhead.backbones.hub_folders import FAMILIES, Family, read_json, read_preprocessing
from mivhead.backbones.preprocessing import DecodedImage, normalise
from mivhead.backbones.preset import (
    MAX_SIZE,
    BlockPreset,
    Preprocessing,
    Preset,
    near_usual_size,
    spread_taps,
)
from mivhead.backbones.taps import EMBEDDING, POOLED
from mivhead.errors import InputError, NotAvailableError, reading
from mivhead.features import Features

SCHEME = "hf-onnx:"
METADATA_KEY = "mivhead"  # of files that `miv backbones export` wrote
# Where the graph is, by preference; quantized ones are used only if their file is named.
GRAPHS = ("onnx/vision_model.onnx", "onnx/model.onnx", "vision_model.onnx", "model.onnx")
# What is downloaded; alternatives are separated by bars, and a question mark means "if it exists".
FILES = (
    "config.json",
    "?preprocessor_config.json",
    "?processor_config.json",
    "|".join(GRAPHS),
    "?" + "|".join(f"{name}_data*" for name in GRAPHS),
)
MAX_BYTES = 2 * 2**30  # of a graph
MAX_NODES = 20_000
MAX_PREFIX = 5  # tokens before the patches, where the kind of model does not say how many
_CHUNK = 8  # images per run on a CPU: a compromise between speed and memory
_FLOATS = {1: np.float32, 10: np.float16}  # codes of element types
_PASSED = ("Identity", "Cast", "Dropout")  # operations that do not change the stream
_SKIPPED = ("Shape", "Size")  # a tensor's shape does not make another one depend on its values


class OnnxFolderBackbone:
    """A frozen model whose blocks were found in its graph."""

    def __init__(
        self, identity: Identity, preset: Preset, graph: _Graph, session: Any, dtype: Any
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self._graph = graph
        self._session = session

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        x = normalise(images, self.preset.preprocessing, channels_first=True)  # (n, 3, R, R)
        graph = self._graph
        step = graph.batch or _CHUNK
        parts = [
            _run(self._session, graph, self.preset.taps, x[i : i + step])
            for i in range(0, len(x), step)
        ]
        kind = np.dtype(str(self.dtype).removeprefix("torch."))
        blocks = [
            {part: np.concatenate([each[part] for each in block]).astype(kind) for part in block[0]}
            for block in zip(*parts, strict=True)
        ]
        return Features(blocks)


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: Any,
    dtype: Any,
    image_size: int | None = None,
) -> OnnxFolderBackbone:
    """Load a model from a folder, a file or the hub; see `mivhead.backbones.load_backbone`."""
    if weights is not None:
        raise InputError(f"{spec} has its own weights: omit weights.")
    file, folder = find_graph(spec.removeprefix(SCHEME))
    content = _read(file)
    model = OnnxFile(content, str(file))
    digest = hashlib.sha256(content)
    for name in _external_files(model, file):
        with (file.parent / name).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    model.folder = file.parent
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    described = _described(model, file)
    graph = _Graph.of(model, config, str(file))
    chosen = preset or described
    preprocessing = chosen.preprocessing if chosen else _preprocessing(folder, graph, image_size)
    if described and image_size not in (None, preprocessing.size):
        raise InputError(f"{file} was exported for {preprocessing.size} px: omit image_size.")
    if graph.size not in (None, preprocessing.size):
        raise InputError(f"{file} requires images of {graph.size} px, not {preprocessing.size}.")
    start = _Starter(content, file.parent, device, str(file))
    if not graph.names:
        graph = graph.with_maps(_find_maps(model, graph, start, preprocessing.size))
    taps = chosen.taps if chosen else graph.usual_taps()
    graph.check(taps, spec)
    session = start([name for tap in taps for name in graph.names[tap]])
    if chosen is None:
        black = np.zeros((1, 3, preprocessing.size, preprocessing.size), np.float32)
        blocks = _suggest(graph, taps, Features(_run(session, graph, taps, black)))
        chosen = Preset(taps, blocks, preprocessing)
    identity = Identity(spec, digest.hexdigest(), chosen.preprocessing, chosen.taps)
    return OnnxFolderBackbone(identity, chosen, graph, session, dtype)


def _suggest(graph: _Graph, taps: Sequence[str], features: Features) -> tuple[BlockPreset, ...]:
    from mivhead.head.blocks import derive_presets

    vector = taps[-1] in (EMBEDDING, POOLED)
    own = Features(list(features.blocks[:-1])) if vector and len(taps) > 1 else features
    blocks = derive_presets(own)
    if graph.is_vit:  # also without [CLS]
        blocks = tuple(replace(block, form="vit", tau=200.0) for block in blocks)
    return (*blocks, BlockPreset(form="vit", tau=200.0, pooled=True)) if vector else blocks


def find_graph(name: str) -> tuple[Path, Path]:
    """Return the file of the graph and the folder of its settings, downloaded if needed."""
    path = Path(name).expanduser()
    if path.suffix == ".onnx":
        if not path.is_file():
            raise InputError(f"The ONNX file {path} does not exist.")
        above = path.parent.parent if path.parent.name == "onnx" else path.parent
        return path, above if (above / "config.json").is_file() else path.parent
    if not path.is_dir():
        if not hub.is_repository(name):
            raise InputError(f"{name} is neither a folder nor a name of a model on the hub.")
        for each in GRAPHS:
            if (found := hub.find(name, each)) is not None:
                return found, found.parents[each.count("/")]
        path = hub.download(name, FILES)
    for each in GRAPHS:
        if (path / each).is_file():
            return path / each, path
    others = sorted(each.relative_to(path).as_posix() for each in path.rglob("*.onnx"))[:8]
    there = f"; name one of its files, {', '.join(others)}" if others else ""
    raise NotAvailableError(
        f"{path} has no onnx/model.onnx in the layout of transformers.js{there}."
    )


def _read(file: Path) -> bytes:
    with reading(file):
        if file.stat().st_size > MAX_BYTES:
            raise InputError(f"{file} is larger than {MAX_BYTES:,} bytes, the limit of ONNX files.")
        return file.read_bytes()


def _external_files(model: OnnxFile, file: Path) -> list[str]:
    """Return the files next to the graph that hold its weights; others are refused."""
    for name in model.external:
        if not name.startswith(f"{file.stem}.onnx_data") or Path(name).name != name:
            raise InputError(
                f"{file} stores weights in {name!r}; only {file.stem}.onnx_data next to it is "
                "read, as an untrusted model could name any file on this machine."
            )
        if (file.parent / name).is_symlink() and not _in_hub_cache(file):
            raise InputError(f"{file.parent / name} is a link, which is not followed.")
        if not (file.parent / name).is_file():
            raise NotAvailableError(f"{file} needs {name} next to it: download it as well.")
    return sorted(model.external)


def _in_hub_cache(file: Path) -> bool:
    """Return whether huggingface_hub made the folder: there, all files are links to blobs."""
    return file.absolute().is_relative_to(hub.cache_folder().absolute())


def _described(model: OnnxFile, file: Path) -> Preset | None:
    """Return the preset in a file that `miv backbones export` wrote."""
    if METADATA_KEY not in model.metadata:
        return None
    try:
        document = parse_json(model.metadata[METADATA_KEY])
        return from_json(Preset, document["preset"], "preset")
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} cannot be used as a backbone: {error}") from error


def _preprocessing(folder: Path, graph: _Graph, image_size: int | None) -> Preprocessing:
    found = read_preprocessing(folder)
    size = image_size or graph.size
    if size is None:
        size = near_usual_size(found.size, graph.patch) if graph.patch else found.size
    return replace(found, size=size)


@dataclass(frozen=True)
class _Norm:
    """A LayerNorm, applied to every block, as the model applies it to its last one."""

    scale: NDArray[np.float32]
    bias: NDArray[np.float32]
    epsilon: float

    def __call__(self, tokens: NDArray[np.float32]) -> NDArray[np.float32]:
        centred = tokens - tokens.mean(-1, keepdims=True)
        spread = np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(self.epsilon))
        normed: NDArray[np.float32] = centred / spread * self.scale + self.bias
        return normed


@dataclass(frozen=True)
class _Graph:
    """What is known of a graph: its input, the tensor of every tap, and how tensors are read."""

    source: str  # the image input
    kind: Any  # its element type
    batch: int | None
    size: int | None  # of the input images; None: any
    patch: int | None
    names: dict[str, tuple[str, ...]]  # tap -> its tensor, or block{i}.map and block{i}.token
    exported: bool  # whether `miv backbones export` wrote it
    is_vit: bool
    token: bool | None  # whether [CLS] is the first token; None: if there are prefix tokens
    prefix: int | None  # tokens before the patches; None: as their number tells
    norm: _Norm | None

    @classmethod
    def of(cls, model: OnnxFile, config: dict[str, Any], file: str) -> _Graph:
        """Find the image input and the blocks."""
        images = [each for each in model.inputs if len(each.shape) == 4]
        if len(model.inputs) != 1 or len(images) != 1 or images[0].kind not in _FLOATS:
            found = ", ".join(f"{each.name} {each.shape}" for each in model.inputs) or "none"
            raise InputError(
                f"{file} must have one input, a float batch of images; it has {found}. If the "
                "model has a text tower, use onnx/vision_model.onnx."
            )
        (image,) = images
        batch, channels, height, width = image.shape
        too_large = height is not None and height > MAX_SIZE
        if channels not in (3, None) or height != width or too_large:
            raise InputError(f"The input of {file} must be (n, 3, R, R), got {image.shape}.")
        vision = config.get("vision_config")
        settings = vision if isinstance(vision, dict) else config
        family = FAMILIES.get(str(config.get("model_type")))
        if family is not None and family.model == "DINOv3ConvNextModel":
            family = None
        names, norm = _exported_parts(model), None
        exported = bool(names)
        if not exported and (family is not None or _number(settings, "num_hidden_layers")):
            names, norm = _find_blocks(model, settings, family, file)
            names |= _find_vector(model, family)
        registers = _number(settings, "num_register_tokens") or 0
        return cls(
            source=image.name,
            kind=_FLOATS[image.kind],
            batch=batch,
            size=height,
            patch=_number(settings, "patch_size"),
            names=names,
            exported=exported,
            is_vit=bool(names) and not exported,
            token=None if family is None else family.token,
            prefix=None if family is None else int(family.token) + registers,
            norm=norm,
        )

    def with_maps(self, names: dict[str, tuple[str, ...]]) -> _Graph:
        """Return the graph of a CNN, whose stages have been found."""
        return replace(self, names=names)

    def usual_taps(self) -> tuple[str, ...]:
        """Return the default taps."""
        layers = [tap for tap in self.names if tap not in (EMBEDDING, POOLED)]
        taps = spread_taps(layers) if self.is_vit else tuple(layers[-2:])
        return taps + tuple(tap for tap in (EMBEDDING, POOLED) if tap in self.names)

    def check(self, taps: Sequence[str], spec: str) -> None:
        """Raise an error for an unknown tap."""
        for tap in taps:
            if tap not in self.names:
                known = ", ".join(self.names)
                raise InputError(f"{spec} has no tap {tap!r}; its taps are {known}.")

    def read(self, tap: str, tensors: Sequence[NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
        """Turn tapped tensors into the parts of a block."""
        names = self.names[tap]
        if self.exported:
            pairs = zip(names, tensors, strict=True)
            return {name.partition(".")[2]: tensor for name, tensor in pairs}
        values = tensors[0].astype(np.float32, copy=False)
        if values.ndim == 2:
            return {"token": values}
        if values.ndim == 4:
            return {"map": values}
        if values.ndim != 3:
            raise InputError(f"The tap {tap!r} has the shape {values.shape}: tap another block.")
        count = values.shape[1]
        prefix = count - math.isqrt(count) ** 2 if self.prefix is None else self.prefix
        side = math.isqrt(max(0, count - prefix))
        if side * side != count - prefix or side < 1 or prefix > max(MAX_PREFIX, self.prefix or 0):
            raise InputError(f"The {count} tokens of the tap {tap!r} do not form a square grid.")
        if self.norm is not None:
            values = self.norm(values)
        patches = values[:, prefix:].transpose(0, 2, 1)  # (n, C, patches)
        parts = {"map": np.ascontiguousarray(patches).reshape(len(values), -1, side, side)}
        token = prefix > 0 if self.token is None else self.token
        return parts | ({"token": np.ascontiguousarray(values[:, 0])} if token else {})


def _number(settings: dict[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return value if type(value) is int and 0 <= value < 2**16 else None


def _exported_parts(model: OnnxFile) -> dict[str, tuple[str, ...]]:
    """Return the taps of a file that `miv backbones export` wrote; none of any other."""
    if METADATA_KEY not in model.metadata:
        return {}
    outputs = {each.name for each in model.outputs}
    taps = parse_json(model.metadata[METADATA_KEY])["preset"]["taps"]  # checked by `_described`
    return {
        tap: tuple(part for part in (f"block{i}.map", f"block{i}.token") if part in outputs)
        for i, tap in enumerate(taps)
    }


def _find_vector(model: OnnxFile, family: Family | None) -> dict[str, tuple[str, ...]]:
    """Return the tap of the vector that describes a whole image, if the graph outputs it."""
    outputs = {each.name for each in model.outputs}
    if family is not None and family.embeds:
        for name in ("image_embeds", "pooler_output"):
            if name in outputs and (name == "image_embeds" or family.pooler is None):
                return {EMBEDDING: (name,)}
    if family is not None and family.pooler and "pooler_output" in outputs:
        return {POOLED: ("pooler_output",)}
    return {}


def _find_blocks(
    model: OnnxFile, settings: dict[str, Any], family: Family | None, file: str
) -> tuple[dict[str, tuple[str, ...]], _Norm | None]:
    """Find the residual stream after every block, and the final norm if it is for patches too."""
    depth = _number(settings, "num_hidden_layers")
    stream = residual_stream(model.nodes)
    if depth is None:
        depth = len(stream) // 2
    if len(stream) >= 2 * depth > 0:
        stream = stream[-2 * depth :][1::2]  # attention, then MLP
    elif len(stream) != depth or not depth:  # one addition per block, if both run in parallel
        raise InputError(
            f"The blocks of {file} cannot be found: it adds to its residual stream {len(stream)} "
            f"times, but config.json says that it has {depth} layers. If the file was optimized "
            "or quantized, use the plain onnx/model.onnx."
        )
    norm = None
    if family is None or family.norm is not None:
        norm = _final_norm(model, stream[-1])
        if norm is None and family is not None:
            raise InputError(f"The final norm of {file} cannot be found: use onnx/model.onnx.")
    return {f"blocks.{i}": (name,) for i, name in enumerate(stream)}, norm


def residual_stream(nodes: Sequence[GraphNode]) -> list[str]:
    """Return the longest chain of residual additions in a graph, as tensors in their order.

    An addition is residual if one of its summands is computed from the other one.

    >>> nodes = [
    ...     GraphNode("Mul", ("x", "a"), ("x0",), {}),
    ...     GraphNode("Mul", ("x0", "b"), ("branch",), {}),
    ...     GraphNode("Add", ("x0", "branch"), ("x1",), {}),
    ...     GraphNode("Relu", ("x1",), ("branch1",), {}),
    ...     GraphNode("Add", ("branch1", "x1"), ("x2",), {}),
    ...     GraphNode("Add", ("x2", "bias"), ("y",), {}),
    ... ]
    >>> residual_stream(nodes)
    ['x1', 'x2']
    """
    before, length = _residual_additions(nodes)
    if not length:
        return []
    last: int | None = max(length, key=lambda i: (length[i], i))
    chain = []
    while last is not None:
        chain.append(nodes[last].outputs[0])
        last = before[last]
    return chain[::-1]


def _residual_additions(
    nodes: Sequence[GraphNode], passed: Sequence[str] = _PASSED
) -> tuple[dict[int, int | None], dict[int, int]]:
    """Return, by residual addition, the one before it in its chain and its place in the chain."""
    if len(nodes) > MAX_NODES:
        raise InputError(f"The graph has {len(nodes):,} nodes; at most {MAX_NODES:,} are searched.")
    made_by = {name: i for i, node in enumerate(nodes) for name in node.outputs}
    ancestors: list[int] = []  # of every node, as the bits of a number
    before: dict[int, int | None] = {}
    length: dict[int, int] = {}

    def source(name: str) -> int | None:
        """Return the node that computes a tensor, seen through those that only pass it on."""
        found = made_by.get(name)
        while found is not None and nodes[found].operation in passed and nodes[found].inputs:
            found = made_by.get(nodes[found].inputs[0])
        return found

    for i, node in enumerate(nodes):
        found = 0
        if node.operation not in _SKIPPED:
            for name in node.inputs:
                j = made_by.get(name)
                if j is not None and j < i:
                    found |= ancestors[j] | 1 << j
        ancestors.append(found)
        if node.operation != "Add" or len(node.inputs) != 2:
            continue
        left, right = map(source, node.inputs)
        if left is None or right is None or left == right:
            continue
        kept = left if ancestors[right] >> left & 1 else right
        if not (ancestors[right] >> left & 1 or ancestors[left] >> right & 1):
            continue
        before[i] = kept if kept in length else None
        length[i] = 1 + length.get(kept, 0)
    return before, length


def _final_norm(model: OnnxFile, tensor: str) -> _Norm | None:
    """Find the LayerNorm that follows a tensor, as one operation or as its parts."""
    after: dict[str, list[GraphNode]] = {}
    for node in model.nodes:
        for name in node.inputs:
            after.setdefault(name, []).append(node)

    def following(name: str, operation: str) -> list[GraphNode]:
        passed = [
            n for node in after.get(name, ()) if node.operation in _PASSED for n in node.outputs
        ]
        found = [node for each in (name, *passed) for node in after.get(each, ())]
        return [node for node in found if node.operation == operation]

    def other(node: GraphNode, name: str) -> NDArray[Any] | None:
        """Return the constant that a node combines with a tensor."""
        rest = [each for each in node.inputs if each != name and model.is_constant(each)]
        return model.constant(rest[0]) if rest else None

    for node in following(tensor, "LayerNormalization"):
        values = [model.constant(name) for name in node.inputs[1:3]]
        if values and values[0] is not None:
            bias = values[1] if len(values) > 1 else np.zeros_like(values[0])
            if bias is not None:
                return _norm(values[0], bias, float(node.attributes.get("epsilon") or 1e-5))
    for minus in following(tensor, "Sub"):
        (centred,) = minus.outputs
        for divided in following(centred, "Div"):
            for scaled in following(divided.outputs[0], "Mul"):
                for shifted in following(scaled.outputs[0], "Add"):
                    scale = other(scaled, divided.outputs[0])
                    bias = other(shifted, scaled.outputs[0])
                    epsilon = _epsilon(model, divided)
                    if scale is not None and bias is not None and epsilon is not None:
                        return _norm(scale, bias, epsilon)
    return None


def _epsilon(model: OnnxFile, divided: GraphNode) -> float | None:
    """Return the number that is added to the variance before its root is taken."""
    made_by = {name: node for node in model.nodes for name in node.outputs}
    node = made_by.get(divided.inputs[1])
    while node is not None and node.operation in ("Sqrt", "Pow", "Cast", "Identity"):
        node = made_by.get(node.inputs[0])
    if node is None or node.operation != "Add":
        return None
    found = [model.constant(name) for name in node.inputs if model.is_constant(name)]
    return float(found[0].ravel()[0]) if found and found[0] is not None and found[0].size else None


def _norm(scale: NDArray[Any], bias: NDArray[Any], epsilon: float) -> _Norm | None:
    if scale.ndim != 1 or scale.shape != bias.shape or not 0 <= epsilon < 1:
        return None
    return _Norm(scale.astype(np.float32), bias.astype(np.float32), epsilon)


def _find_maps(
    model: OnnxFile, graph: _Graph, start: _Starter, size: int
) -> dict[str, tuple[str, ...]]:
    """Find the stages of a CNN: the last residual addition of every resolution."""
    activations = ("Relu", "Clip", "HardSwish")
    before, _ = _residual_additions(model.nodes, (*_PASSED, *activations))
    activated = {n.inputs[0]: n.outputs[0] for n in model.nodes if n.operation in activations}
    names = [model.nodes[i].outputs[0] for i in sorted(before)]
    names = list(dict.fromkeys(activated.get(name, name) for name in names))
    session = start(names)
    black = np.zeros((graph.batch or 1, 3, size, size), graph.kind)
    arrays = session.run(names, {graph.source: black})
    last = {
        array.shape[1:]: name
        for name, array in zip(names, arrays, strict=True)
        if array.ndim == 4 and array.shape[2] == array.shape[3] > 1
    }
    if not last:
        raise InputError(
            f"{start.name} has no blocks that can be found: list its tensors with `miv backbones "
            "inspect FILE.onnx --all`, and tap some with `miv backbones export FILE.onnx`."
        )
    return {f"stages.{i}": (name,) for i, name in enumerate(last.values())}


@dataclass(frozen=True)
class _Starter:
    """Starts onnxruntime with some tensors of a graph as its outputs."""

    content: bytes
    folder: Path  # of the weights, where they are in another file
    device: Any
    name: str

    def __call__(self, outputs: Sequence[str]) -> Session:
        content = with_outputs(self.content, list(dict.fromkeys(outputs)))
        wanted = (CUDA, CPU) if str(self.device).startswith("cuda") else (CPU,)
        return Session(
            lambda: content,
            self.name,
            threads=thread_count(),
            providers=wanted,
            folder=str(self.folder),
        )


def _run(
    session: Any, graph: _Graph, taps: Sequence[str], x: NDArray[np.float32]
) -> list[dict[str, NDArray[np.float32]]]:
    """Return the parts of every tap for a batch `(n, 3, R, R)`."""
    count = len(x)
    if graph.batch:  # the last chunk may be smaller than the graph's fixed batch
        x = np.concatenate([x, np.zeros((graph.batch - count, *x.shape[1:]), x.dtype)])
    names = [name for tap in taps for name in graph.names[tap]]
    feed = {graph.source: x.astype(graph.kind, copy=False)}
    arrays = session.run(names, feed)
    rest = iter(array[:count] for array in arrays)
    return [graph.read(tap, [next(rest) for _ in graph.names[tap]]) for tap in taps]
