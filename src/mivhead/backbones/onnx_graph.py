"""ONNX files as data: read with limits, looked at, changed in memory."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mivhead.errors import InputError, NotAvailableError
from mivhead.extras import need
from mivhead.preset import Preset
from mivhead.schema import from_json, to_json

EXTRA = "onnx"
METADATA_KEY = "mivhead"
FORMAT = 1
MAX_BYTES = 2 * 2**30  # what one ONNX file can hold


@dataclass(frozen=True)
class Input:
    """The image input of a graph; None is any number."""

    name: str
    batch: int | None
    size: int | None
    channels_last: bool
    half: bool


@dataclass(frozen=True)
class Candidate:
    """A tensor that can be tapped: its shape for one image, and the operation that makes it."""

    name: str
    shape: tuple[int, ...]
    operation: str
    is_output: bool


def read_graph(path: str | Path) -> tuple[Any, str]:
    """Read an ONNX model and the SHA-256 of its file; nothing of it is run."""
    onnx = need("onnx", EXTRA)
    damaged: type[Exception] = need("google.protobuf.message", EXTRA).DecodeError
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no ONNX file {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES:,} bytes, the limit of ONNX files.")
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except damaged:
        raise InputError(f"{path} is not an ONNX file, or is damaged.") from None
    if not model.graph.node:
        raise InputError(f"{path} is not an ONNX file, or has an empty graph.")
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise InputError(
                f"{path} keeps weights in other files, which are not read, as a file from someone "
                "else could name any file here: save the model as one file."
            )
    return model, hashlib.sha256(content).hexdigest()


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield all constants of a graph and of the graphs in it."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.initializer:
                    yield from _tensors(inner)


def image_input(model: Any, path: str | Path) -> Input:
    """Find the one input that takes images."""
    onnx = need("onnx", EXTRA)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in constants]
    found = ", ".join(f"{each.name} {_dims(each)}" for each in inputs) or "none"
    if len(inputs) != 1 or len(_dims(inputs[0])) != 4:
        raise InputError(f"{path} must have one input, a batch of images; it has {found}.")
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
            f"it is {found} of type {onnx.TensorProto.DataType.Name(kind).lower()}."
        )
    return Input(image.name, batch, height, channels_last, kind == floats[1])


def _dims(value: Any) -> tuple[int | None, ...]:
    shape = value.type.tensor_type.shape
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in shape.dim)


def candidates(model: Any, source: Input, size: int) -> list[Candidate]:
    """List the tensors that can be tapped, in the order of the graph, by inference of shapes."""
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
    """Shape for one image of a vector, tokens or a square map; None for anything else."""
    known = tuple(side for side in shape[1:] if side is not None and side > 1)
    if len(known) != len(shape) - 1 or len(known) not in (1, 2, 3) or shape[0] != 1:
        return None
    if len(known) == 3 and known[1] != known[2] and known[0] != known[1]:
        return None
    return known


def add_outputs(model: Any, names: Sequence[str], path: str | Path) -> None:
    """Make inner tensors outputs of the graph, in place."""
    onnx = need("onnx", EXTRA)
    existing = {each.name for each in model.graph.output}
    inner = {name for node in model.graph.node for name in node.output}
    for name in names:
        if name not in existing | inner:
            raise InputError(
                f"{path} has no tensor {name!r}: `miv backbones inspect {path}` lists them."
            )
        if name not in existing:
            model.graph.output.append(onnx.ValueInfoProto(name=name))


def described_preset(model: Any, path: str | Path) -> Preset | None:
    """Read the preset that `describe` wrote; None for other files."""
    texts = {each.key: each.value for each in model.metadata_props}
    if METADATA_KEY not in texts:
        return None
    try:
        document = json.loads(texts[METADATA_KEY])
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise InputError("its format is not known; a newer mivhead may read it.")
        return from_json(Preset, document.get("preset"), "preset")
    except ValueError as error:
        raise InputError(f"{path} has a description that cannot be used: {error}") from error


def describe(model: Any, preset: Preset, name: str, weights: str) -> None:
    """Write taps, preprocessing and origin into the model's metadata."""
    onnx = need("onnx", EXTRA)
    document = {"format": FORMAT, "preset": to_json(preset), "name": name, "weights": weights}
    texts = {each.key: each.value for each in model.metadata_props}
    texts[METADATA_KEY] = json.dumps(document)
    onnx.helper.set_model_props(model, texts)


def write_graph(model: Any, path: str | Path) -> None:
    """Write an ONNX file, atomically."""
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            part = Path(folder, path.name)
            part.write_bytes(model.SerializeToString())
            os.replace(part, path)  # noqa: PTH105  # the usual name for it
    except OSError as error:
        raise NotAvailableError(f"Cannot write {path}: {error}.") from error
