"""Write ONNX files without the package onnx: a protobuf encoder, and the messages that ONNX needs.

A message is a dictionary of field numbers (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto)
and values. Everything else about a graph is plain data: nodes, and arrays by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IR_VERSION = 8  # which onnxruntime 1.14 and later read

# Numbers of element types, TensorProto.DataType.
TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
}

Shape: TypeAlias = "Sequence[int | str]"  # a name stands for any size
Attribute: TypeAlias = "int | float | str | NDArray[Any] | Sequence[int] | Sequence[float]"


@dataclass
class Node:
    """One operation of a graph."""

    op_type: str  # its name in ONNX, such as `"Conv"`
    # Names of tensors. An empty name stands for an optional input that is not given.
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Attribute] = field(default_factory=dict)  # its other settings


@dataclass(frozen=True)
class Tensor:
    """Type and shape of an input or output."""

    dtype: str
    shape: Shape


def encode_model(
    nodes: Iterable[Node],
    constants: Mapping[str, NDArray[Any]],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    *,
    opset: int,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return an ONNX file.

    The nodes are in the order in which they are computed; constants are weights and others, by
    name. `metadata` are properties of the model.

    >>> square = Node("Mul", ["x", "x"], ["y"])
    >>> x = Tensor("float32", ["n"])
    >>> content = encode_model([square], {}, {"x": x}, {"y": x}, opset=13)
    >>> import onnxruntime
    >>> session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    >>> session.run(None, {"x": np.float32([2, 3])})[0].tolist()
    [4.0, 9.0]
    """
    graph = {
        1: [_node(node) for node in nodes],
        2: "mivhead",
        5: [_constant(array, name) for name, array in constants.items()],
        11: [_described(name, tensor) for name, tensor in inputs.items()],
        12: [_described(name, tensor) for name, tensor in outputs.items()],
    }
    return encode(
        {
            1: IR_VERSION,
            2: "mivhead",
            7: graph,
            8: {1: "", 2: opset},
            14: [{1: key, 2: value} for key, value in (metadata or {}).items()],
        }
    )


def _node(node: Node) -> Mapping[int, Any]:
    attributes = [_attribute(name, value) for name, value in node.attributes.items()]
    return {1: node.inputs, 2: node.outputs, 3: node.outputs[0], 4: node.op_type, 5: attributes}


def _attribute(name: str, value: Any) -> Mapping[int, Any]:
    """Return an attribute; field 20 says which of the others holds the value."""
    if isinstance(value, str):
        return {1: name, 4: value, 20: 3}
    if isinstance(value, np.ndarray):
        return {1: name, 5: _constant(value, ""), 20: 4}
    if isinstance(value, float):
        return {1: name, 2: value, 20: 1}
    if isinstance(value, int):
        return {1: name, 3: value, 20: 2}
    values = list(value)
    if any(isinstance(each, float) for each in values):
        return {1: name, 7: [float(each) for each in values], 20: 6}
    return {1: name, 8: [int(each) for each in values], 20: 7}


def _constant(array: NDArray[Any], name: str) -> Mapping[int, Any]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    shape = list(array.shape)  # of a number, which `ascontiguousarray` turns into a list
    return {1: shape, 2: TYPES[array.dtype.name], 8: name, 9: little.tobytes()}


def _described(name: str, tensor: Tensor) -> Mapping[int, Any]:
    sides = [{2: side} if isinstance(side, str) else {1: side} for side in tensor.shape]
    return {1: name, 2: {1: {1: TYPES[tensor.dtype], 2: {1: sides}}}}


# Protobuf: every field is its number and kind, then its value.

_VARINT, _BYTES, _FIXED32 = 0, 2, 5


def encode(message: Mapping[int, Any]) -> bytes:
    """Encode a message: fields by number; the values of a list share a number.

    >>> encode({1: 150, 2: "testing", 3: {1: [1, 2]}}).hex()
    '089601120774657374696e671a0408010802'
    """
    parts: list[bytes] = []
    for number, given in message.items():
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, int):
                parts += [_varint(number << 3 | _VARINT), _varint(value)]
            elif isinstance(value, float):
                parts += [_varint(number << 3 | _FIXED32), struct.pack("<f", value)]
            else:
                content = _content(value)
                parts += [_varint(number << 3 | _BYTES), _varint(len(content)), content]
    return b"".join(parts)


def _content(value: str | bytes | Mapping[int, Any]) -> bytes:
    if isinstance(value, Mapping):
        return encode(value)
    return value.encode() if isinstance(value, str) else value


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the highest bit says that more follow."""
    value &= 2**64 - 1  # negative numbers as in two's complement
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
