"""ONNX files as backbones, run by onnxruntime.

Taps are names of tensors; inner tensors are turned into outputs in memory. A file that
`mivhead.export.backbone` wrote contains its own taps and preprocessing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.files import replacing
from mivhead._util.onnx_check import EXTRA, check_graph
from mivhead._util.optional import need
from mivhead._util.runtime import CPU, CUDA, Session
from mivhead._util.schema import from_json, parse_json, to_json
from mivhead._util.threads import thread_count
from mivhead.backbones.base import Identity
from mivhead.backbones.preprocessing import DecodedImage, normalise
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.backbones.taps import Parts, join, read_output
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    import torch

    from mivhead.backbones.module import ModuleBackbone
    from mivhead.features import Features

METADATA_KEY = "mivhead"
FORMAT = 1  # of the metadata
MAX_BYTES = 2 * 2**30  # the limit of one ONNX file


class OnnxBackbone:
    """A frozen ONNX model whose tapped tensors give the features.

    `content` returns the ONNX file with the tapped tensors as outputs, from which `mivhead.export`
    takes the graph, too. `names` are the outputs of each block: one tensor, or `block{i}.map` and
    `block{i}.token`. Without a device it runs on a GPU if onnxruntime supports one, else on the
    CPU, with as many threads as are useful now. `chunk` images per run, where the graph takes any
    number, are a compromise between speed and memory. `as_module` loads the same backbone in
    PyTorch, for methods that tune it.
    """

    def __init__(
        self,
        identity: Identity,
        preset: Preset,
        content: Callable[[], bytes],
        source: ImageInput,
        names: Sequence[tuple[str, ...]],
        dtype: np.dtype[Any],
        *,
        device: str | torch.device | None = None,
        threads: int | None = None,
        chunk: int = 8,
        as_module: Callable[[], ModuleBackbone] | None = None,
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self.content = content
        self.names = names
        self._source = source
        self._chunk = source.batch or chunk
        self._session = Session(
            content,
            identity.name,
            threads=threads or thread_count(),
            providers=(CPU,) if str(device) == "cpu" else (CUDA, CPU),
        )
        if as_module is not None:
            self.as_module = as_module

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        first = not self._source.channels_last
        x = normalise(images, self.preset.preprocessing, channels_first=first)
        chunks = [x[start : start + self._chunk] for start in range(0, len(x), self._chunk)]
        return join([self._run(chunk) for chunk in chunks], self.dtype)

    def _run(self, x: NDArray[np.float32]) -> list[Parts]:
        tensors = self.run(x)
        return [
            read_output(tensors[block[0]], tap)
            if block == (tap,)
            else {name.partition(".")[2]: tensors[name] for name in block}
            for block, tap in zip(self.names, self.preset.taps, strict=True)
        ]

    def run(self, x: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Return the tapped tensors, by name, for a normalised batch as the graph takes it."""
        count = len(x)
        if self._source.batch:  # the last chunk may be smaller than the graph's fixed batch
            x = np.concatenate([x, np.zeros((self._source.batch - count, *x.shape[1:]), x.dtype)])
        x = x.astype(np.float16 if self._source.half else np.float32, copy=False)
        names = [name for block in self.names for name in block]
        arrays = self._session.run(names, {self._source.name: x})
        for name, array in zip(names, arrays, strict=True):
            if not isinstance(array, np.ndarray) or array.shape[:1] != (len(x),):
                raise InputError(
                    f"{self.identity.name} returned {getattr(array, 'shape', type(array).__name__)}"
                    f" as {name!r:.80}; expected one row for each of {len(x)} images."
                )
        return {name: array[:count] for name, array in zip(names, arrays, strict=True)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tapped tensors, by name, for one image."""
        size = self.preset.preprocessing.size
        image = (size, size, 3) if self._source.channels_last else (3, size, size)
        return {name: x.shape for name, x in self.run(np.zeros((1, *image), np.float32)).items()}


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | torch.device | None,
    dtype: np.dtype[Any],
    outputs: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    blocks: Sequence[BlockPreset] | None = None,
) -> OnnxBackbone:
    """Load an ONNX file; see `mivhead.backbones.load_backbone`.

    The file contains the weights: `weights` must be None. `outputs` are the tensors to tap, shallow
    to deep; by default those that the file names, or its outputs that are maps. The preprocessing
    is by default the file's own, or ImageNet's; `blocks` the file's own settings, or derived from
    the shapes.
    """
    if weights is not None:
        raise InputError(f"{spec} contains its weights: omit weights={str(weights)!r}.")
    model, sha256 = read_graph(spec)
    source = image_input(model, spec)
    described = read_metadata(model, spec)
    chosen = preset or (described if outputs is None else None)
    derive = chosen is None and blocks is None
    if chosen is None:
        taps = tuple(outputs or _spatial_outputs(model, source, spec))
        usual = Preprocessing(size=source.size or Preprocessing().size)
        chosen = Preset(
            taps,
            (BlockPreset(),) * len(taps),
            described.preprocessing if described else usual,
        )
    chosen = replace(
        chosen,
        preprocessing=preprocessing or chosen.preprocessing,
        blocks=chosen.blocks if blocks is None else tuple(blocks),
    )
    if source.size not in (None, chosen.preprocessing.size):
        raise InputError(
            f"{spec} requires images of {source.size} px, but the preprocessing has size "
            f"{chosen.preprocessing.size}."
        )
    names = None if described is None or chosen.taps != described.taps else _part_names(model)
    content = partial(_read_with_outputs, spec, sha256, () if names else chosen.taps)
    names = names or [(tap,) for tap in chosen.taps]
    identity = Identity(Path(spec).name, sha256, chosen.preprocessing, chosen.taps)
    backbone = OnnxBackbone(identity, chosen, content, source, names, dtype, device=device)
    if derive:
        from mivhead.head.blocks import derive_presets

        black = [np.zeros((8, 8, 3), np.uint8)]
        backbone.preset = replace(chosen, blocks=derive_presets(backbone.extract(black)))
    return backbone


def _spatial_outputs(model: Any, source: ImageInput, path: str) -> tuple[str, ...]:
    """Return the outputs that are maps or tokens; a classifier has none."""
    size = source.size or Preprocessing().size
    found = [each for each in candidates(model, source, size) if each.is_output]
    maps = tuple(each.name for each in found if len(each.shape) > 1)
    if not maps:
        raise InputError(
            f"{path} has no spatial output (a map or tokens): name inner tensors to tap with "
            f"outputs=[...]; `miv backbones inspect {path}` lists them."
        )
    return maps


def _part_names(model: Any) -> list[tuple[str, ...]] | None:
    """Return the output names of an exported file, block by block; None for other files."""
    outputs = {each.name for each in model.graph.output}
    blocks = [
        tuple(part for part in (f"block{i}.map", f"block{i}.token") if part in outputs)
        for i in range(len(outputs))
    ]
    return [block for block in blocks if block] or None


def _read_with_outputs(path: str, sha256: str, taps: Sequence[str]) -> bytes:
    """Read a file that was read before, and turn inner tensors into outputs."""
    model, found = read_graph(path)
    if found != sha256:
        raise NotAvailableError(f"The file {path} has changed since it was first read.")
    add_outputs(model, taps, path)
    content: bytes = model.SerializeToString()
    return content


# ONNX files as data: read with limits, inspected, changed in memory.


@dataclass(frozen=True)
class ImageInput:
    """The image input of a graph; None means any number."""

    name: str
    batch: int | None
    size: int | None
    channels_last: bool
    half: bool


@dataclass(frozen=True)
class Candidate:
    """A tensor that can be tapped: its shape for one image, and the operation that computes it."""

    name: str
    shape: tuple[int, ...]
    operation: str
    is_output: bool


def read_graph(path: str | Path) -> tuple[Any, str]:
    """Read an ONNX model and the SHA-256 of its file, without running it."""
    need("onnx", EXTRA)
    path = Path(path)
    try:
        exists = path.is_file()
    except OSError:  # a name that cannot be one
        exists = False
    if not exists:
        raise InputError(f"The ONNX file {str(path)[:200]} does not exist.")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES:,} bytes, the limit of ONNX files.")
    content = path.read_bytes()
    return parse_graph(content, path), hashlib.sha256(content).hexdigest()


def parse_graph(content: bytes, path: str | Path) -> Any:
    """Parse an ONNX model, which errors call by its path, without running it."""
    onnx = need("onnx", EXTRA)
    corrupted: type[Exception] = need("google.protobuf.message", EXTRA).DecodeError
    try:
        model = onnx.load_model_from_string(content)
    except corrupted:
        raise InputError(f"{path} is not an ONNX file, or is corrupted.") from None
    if not model.graph.node:
        raise InputError(f"{path} is not an ONNX file, or has an empty graph.")
    check_graph(content, str(path))
    return model


def image_input(model: Any, path: str | Path) -> ImageInput:
    """Find the one input that takes images."""
    onnx = need("onnx", EXTRA)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in constants]
    found = ", ".join(f"{each.name} {_dims(each)}" for each in inputs) or "none"
    if len(inputs) != 1 or len(_dims(inputs[0])) != 4:
        raise InputError(f"{path} must have exactly one input, a batch of images; found {found}.")
    (image,) = inputs
    batch, *sides = _dims(image)
    channels_last = sides[2] == 3 and sides[0] != 3
    height, width = sides[:2] if channels_last else sides[1:]
    kind = image.type.tensor_type.elem_type
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    has_colours = sides[2 if channels_last else 0] in (3, None)
    if kind not in floats or not has_colours or height != width:
        raise InputError(
            f"The input of {path} must be a float batch (n, 3, R, R) or (n, R, R, 3), "
            f"got {found} of type {onnx.TensorProto.DataType.Name(kind).lower()}."
        )
    return ImageInput(image.name, batch, height, channels_last, kind == floats[1])


def _dims(value: Any) -> tuple[int | None, ...]:
    shape = value.type.tensor_type.shape
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in shape.dim)


def candidates(model: Any, source: ImageInput, size: int) -> list[Candidate]:
    """List the tensors that can be tapped, in the order of the graph, using shape inference."""
    onnx = need("onnx", EXTRA)
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    image = next(each for each in fixed.graph.input if each.name == source.name)
    sides = (size, size, 3) if source.channels_last else (3, size, size)
    for dim, value in zip(image.type.tensor_type.shape.dim, (1, *sides), strict=True):
        dim.dim_value = value
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    operations = {name: node.op_type for node in inferred.node for name in node.output}
    outputs = {each.name for each in inferred.output}
    order = {name: i for i, name in enumerate(operations)}
    found = [
        Candidate(value.name, shape, operations[value.name], value.name in outputs)
        for value in (*inferred.value_info, *inferred.output)
        if value.name in operations and (shape := _feature_shape(_dims(value)))
    ]
    return sorted(found, key=lambda each: order[each.name])


def _feature_shape(shape: Sequence[int | None]) -> tuple[int, ...] | None:
    """Return the shape per image of a vector, tokens or a square map; None for anything else."""
    known = tuple(side for side in shape[1:] if side is not None and side > 1)
    if len(known) != len(shape) - 1 or len(known) not in (1, 2, 3) or shape[0] != 1:
        return None
    if len(known) == 3 and known[1] != known[2] and known[0] != known[1]:
        return None
    return known


def add_outputs(model: Any, names: Sequence[str], path: str | Path) -> None:
    """Turn inner tensors into outputs of the graph, in place."""
    onnx = need("onnx", EXTRA)
    existing = {each.name for each in model.graph.output}
    inner = {name for node in model.graph.node for name in node.output}
    for name in names:
        if name not in existing | inner:
            raise InputError(
                f"{path} has no tensor {name!r}: `miv backbones inspect {path}` lists all tensors."
            )
        if name not in existing:
            model.graph.output.append(onnx.ValueInfoProto(name=name))


def read_metadata(model: Any, path: str | Path) -> Preset | None:
    """Read the preset that `write_metadata` wrote into the metadata; None for other files."""
    properties = {each.key: each.value for each in model.metadata_props}
    if METADATA_KEY not in properties:
        return None
    try:
        document = parse_json(properties[METADATA_KEY])
        if isinstance(document, dict) and "model" in document:
            raise InputError("it is an exported classifier, not a backbone.")
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise InputError("its format is unknown; a newer mivhead may be able to read it.")
        return from_json(Preset, document.get("preset"), "preset")
    except ValueError as error:
        raise InputError(f"{path} cannot be used as a backbone: {error}") from error


def write_metadata(model: Any, preset: Preset, name: str, weights: str) -> None:
    """Write taps, preprocessing and origin into the model's metadata."""
    onnx = need("onnx", EXTRA)
    document = {"format": FORMAT, "preset": to_json(preset), "name": name, "weights": weights}
    properties = {each.key: each.value for each in model.metadata_props}
    properties[METADATA_KEY] = json.dumps(document)
    onnx.helper.set_model_props(model, properties)


def write_graph(model: Any, path: str | Path) -> None:
    """Write an ONNX file, atomically."""
    with replacing(path) as part:
        part.write_bytes(model.SerializeToString())
