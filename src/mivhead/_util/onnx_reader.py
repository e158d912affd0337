"""Read the structure of ONNX files without the package onnx, and turn inner tensors into outputs.

Only what tapping needs is read: nodes, constants (decoded on request), inputs, outputs and the
metadata. A file may come from anyone, so every length is checked, and weights in other files are
reported, not opened. Fields are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.onnx_file import encode
from mivhead.errors import InputError

MAX_NODES = 200_000
MAX_DEPTH = 16  # of graphs within nodes
MAX_CONSTANT = 2**26  # bytes of a constant that is decoded here: norms, not weights

_TYPES = {1: "float32", 6: "int32", 7: "int64", 10: "float16", 11: "float64"}  # of elements
_VALUES = {4: "<f4", 5: "<i4", 7: "<i8", 10: "<f8"}  # fields that hold elements one by one
_DAMAGED = (IndexError, ValueError, TypeError, struct.error)  # what unexpected bytes raise below
_VARINT, _FIXED64, BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class GraphNode:
    """One operation: its name in ONNX, its tensors, and its numbers and constants by name."""

    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class GraphValue:
    """An input or output: the code of its element type, and its sides; None stands for any."""

    name: str
    kind: int
    shape: tuple[int | None, ...]


class OnnxFile:
    """The structure of an ONNX file; other bytes are an error, which names the file."""

    def __init__(self, content: bytes, name: str) -> None:
        self.nodes: list[GraphNode] = []
        self.inputs: list[GraphValue] = []
        self.outputs: list[GraphValue] = []
        self.metadata: dict[str, str] = {}
        self.external: set[str] = set()  # files that hold weights
        self.folder: Path | None = None  # where these are, once the caller has checked their names
        self._constants: dict[str, memoryview] = {}
        try:
            for number, _, value in read_fields(memoryview(content)):
                if number == 7:
                    self._read_graph(value, 0)
                elif number == 14:
                    pair = {n: read_text(v) for n, _, v in read_fields(value) if n in (1, 2)}
                    self.metadata[pair.get(1, "")] = pair.get(2, "")
        except _DAMAGED:
            self.nodes = []
        if not self.nodes:
            raise InputError(f"{name} is not an ONNX file, or is corrupted.")
        self.inputs = [each for each in self.inputs if each.name not in self._constants]

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return a constant of the graph; None if there is none of this name that can be read."""
        tensor = self._constants.get(name)
        try:
            return None if tensor is None else _decode(tensor, self.folder)
        except (*_DAMAGED, OverflowError, KeyError, OSError):
            return None

    def is_constant(self, name: str) -> bool:
        """Return whether a tensor is a constant of the graph."""
        return name in self._constants

    def _read_graph(self, graph: memoryview, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        for number, _, value in read_fields(graph):
            if number == 1:
                node = self._read_node(value, depth)
                if depth == 0:
                    self.nodes.append(node)
                    if len(self.nodes) > MAX_NODES:
                        raise ValueError("too many nodes")
            elif number == 5:
                self._note_external(value)
                if depth == 0:
                    self._constants[_name(value, 8)] = value
            elif number == 15:  # sparse constants: values and indices
                for inner, _, tensor in read_fields(value):
                    if inner in (1, 2):
                        self._note_external(tensor)
            elif number == 11 and depth == 0:
                self.inputs.append(_read_value(value))
            elif number == 12 and depth == 0:
                self.outputs.append(_read_value(value))

    def _read_node(self, node: memoryview, depth: int) -> GraphNode:
        inputs, outputs, operation = [], [], ""
        attributes: dict[str, Any] = {}
        for number, _, value in read_fields(node):
            if number == 1:
                inputs.append(read_text(value))
            elif number == 2:
                outputs.append(read_text(value))
            elif number == 4:
                operation = read_text(value)
            elif number == 5:
                name, found = self._read_attribute(value, depth)
                attributes[name] = found
        if operation == "Constant" and depth == 0 and outputs:
            tensor = attributes.get("value")
            if isinstance(tensor, memoryview):
                self._constants[outputs[0]] = tensor
        return GraphNode(operation, tuple(inputs), tuple(outputs), attributes)

    def _read_attribute(self, attribute: memoryview, depth: int) -> tuple[str, Any]:
        name, found = "", None
        for number, _, value in read_fields(attribute):
            if number == 1:
                name = read_text(value)
            elif number == 2:
                (found,) = struct.unpack("<f", value)
            elif number == 3:
                found = value
            elif number in (5, 10):
                self._note_external(value)
                found = value
            elif number in (6, 11):
                self._read_graph(value, depth + 1)
            elif number in (22, 23):  # sparse
                for inner, _, tensor in read_fields(value):
                    if inner in (1, 2):
                        self._note_external(tensor)
        return name, found

    def _note_external(self, tensor: memoryview) -> None:
        for number, _, value in read_fields(tensor):
            if number == 13:
                pair = {n: read_text(v) for n, _, v in read_fields(value) if n in (1, 2)}
                if pair.get(1) == "location":
                    self.external.add(pair.get(2, ""))


def with_outputs(content: bytes, names: Sequence[str]) -> bytes:
    """Return an ONNX file in which inner tensors are outputs as well.

    A protobuf message that occurs twice is merged, so a second graph that holds nothing but the
    outputs is simply appended.
    """
    return content + encode({7: {12: [{1: name} for name in names]}})


def read_fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield number, kind and value of every field of a message."""
    position, end = 0, len(message)
    while position < end:
        key, position = _read_varint(message, position)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == _VARINT:
            value, position = _read_varint(message, position)
        else:
            if kind == BYTES:
                length, position = _read_varint(message, position)
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
            else:
                raise ValueError("not a protobuf message")
            if length > end - position:
                raise ValueError("truncated")
            value = message[position : position + length]
            position += length
        if not number:
            raise ValueError("not a protobuf message")
        yield number, kind, value


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("not a protobuf message")


def read_text(value: Any) -> str:
    """Return the text of a field; it must not be a number, of which `bytes` makes that many."""
    if not isinstance(value, memoryview):
        raise ValueError("not a text")
    return bytes(value).decode("utf-8", "replace")


def _name(message: memoryview, number: int) -> str:
    return next((read_text(value) for n, _, value in read_fields(message) if n == number), "")


def _read_value(value: memoryview) -> GraphValue:
    name, kind, shape = "", 0, []
    for number, _, inner in read_fields(value):
        if number == 1:
            name = read_text(inner)
        elif number == 2:
            for n, _, tensor in read_fields(inner):
                if n != 1:
                    continue  # not a tensor
                for part, _, content in read_fields(tensor):
                    if part == 1:
                        kind = int(content)
                    elif part == 2:
                        shape = [_side(dim) for i, _, dim in read_fields(content) if i == 1]
    return GraphValue(name, kind, tuple(shape))


def _side(dim: memoryview) -> int | None:
    found = next((int(value) for number, _, value in read_fields(dim) if number == 1), 0)
    return found if 0 < found < 2**31 else None


def _decode(tensor: memoryview, folder: Path | None) -> NDArray[Any] | None:
    """Decode a constant; None if it is not made of numbers, is too large or out of reach."""
    if len(tensor) > MAX_CONSTANT:
        return None
    dims: list[int] = []
    kind, raw, parts = 0, None, []
    elsewhere: dict[str, str] = {}
    for number, wire, value in read_fields(tensor):
        if number == 1:
            dims += [value] if wire == _VARINT else list(_packed(value))
        elif number == 2:
            kind = int(value)
        elif number == 9:
            raw = value
        elif number == 13:
            pair = {n: read_text(v) for n, _, v in read_fields(value) if n in (1, 2)}
            elsewhere[pair.get(1, "")] = pair.get(2, "")
        elif number in _VALUES:
            parts.append((number, wire, value))
    name = _TYPES.get(kind)
    if name is None or any(side >= 2**31 for side in dims):
        return None
    if elsewhere:
        if folder is None:
            return None
        raw = _read_part(folder, elsewhere)
    if raw is not None:
        found = np.frombuffer(raw, np.dtype(name).newbyteorder("<"))
    else:
        found = np.array([each for part in parts for each in _numbers(*part)], name)
    if found.size != int(np.prod(dims, dtype=np.int64)):
        return None
    return found.reshape(dims).astype(name)


def _read_part(folder: Path, place: Mapping[str, str]) -> Any:
    """Read a constant that is in another file."""
    offset, length = (int(place.get(key) or 0) for key in ("offset", "length"))
    if not 0 <= length <= MAX_CONSTANT or offset < 0:
        return b""
    with (folder / place["location"]).open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _packed(value: memoryview) -> Iterator[int]:
    position = 0
    while position < len(value):
        number, position = _read_varint(value, position)
        yield number


def _numbers(number: int, wire: int, value: Any) -> list[Any]:
    if number in (5, 7):  # integers are written as varints
        found = [value] if wire == _VARINT else list(_packed(value))
        return [each - 2**64 if each >= 2**63 else each for each in found]
    return list(np.frombuffer(value, _VALUES[number]))
