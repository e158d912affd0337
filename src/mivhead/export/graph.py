"""Write ONNX graphs as formulas: `Value` computes like an array, and every step becomes a node.

Only plain operations whose meaning has not changed since opset 13 are used, so that the nodes can
be appended to the graph of any backbone of opset 13 or later. One-dimensional factors of matrix
products are avoided: onnxruntime (1.18 to 1.31) computes some of them wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.optional import need

EXTRA = "onnx"
OPSET = 13  # the oldest whose operations are used here

Operand: TypeAlias = "Value | NDArray[Any] | float"


class Graph:
    """Nodes and constants, in the order in which they are computed.

    Examples
    --------
    >>> graph = Graph()
    >>> x = graph.input("x", np.float32)
    >>> y = (x * x).sum(1).sqrt()
    >>> [node.op_type for node in graph.nodes]
    ['Mul', 'ReduceSum', 'Sqrt']
    """

    def __init__(self, prefix: str = "mivhead/") -> None:
        self.onnx = need("onnx", EXTRA)
        self._prefix = prefix  # of all names, so that they cannot collide with a backbone's
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._names: dict[tuple[str, bytes, tuple[int, ...]], str] = {}

    def input(self, name: str, dtype: Any) -> Value:
        """Refer to a tensor that exists: an input, or an output of the backbone."""
        return Value(self, name, np.dtype(dtype))

    def constant(self, array: NDArray[Any]) -> str:
        """Add a constant, once for equal ones, and return its name."""
        array = np.ascontiguousarray(array)
        key = (array.dtype.str, array.tobytes(), array.shape)
        if key not in self._names:
            self._names[key] = f"{self._prefix}constant{len(self._names)}"
            self.constants.append(self.onnx.numpy_helper.from_array(array, self._names[key]))
        return self._names[key]

    def value(self, array: NDArray[Any]) -> Value:
        """Add a constant as an operand for formulas that start with it."""
        return Value(self, self.constant(array), array.dtype)

    def add(self, operation: str, inputs: Sequence[str], dtype: Any, **attributes: Any) -> Value:
        """Add a node with one output."""
        name = f"{self._prefix}{len(self.nodes)}_{operation}"
        node = self.onnx.helper.make_node(operation, list(inputs), [name], name, **attributes)
        self.nodes.append(node)
        return Value(self, name, np.dtype(dtype))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Join tensors."""
        if len(values) == 1:
            return values[0]
        return self.add("Concat", [v.name for v in values], values[0].dtype, axis=axis)

    def largest(self, values: Sequence[Value]) -> Value:
        """Elementwise maximum of several tensors."""
        return self.add("Max", [v.name for v in values], values[0].dtype)

    def output(self, value: Value, name: str) -> None:
        """Give a tensor the name of an output."""
        self.nodes.append(self.onnx.helper.make_node("Identity", [value.name], [name], name))


class Value:
    """A tensor of a graph that is computed when the graph runs.

    Operations on it are added to the graph; constants in them are converted to its type.
    """

    def __init__(self, graph: Graph, name: str, dtype: np.dtype[Any]) -> None:
        self.graph, self.name, self.dtype = graph, name, dtype

    def _operand(self, other: Operand) -> str:
        if isinstance(other, Value):
            return other.name
        return self.graph.constant(np.asarray(other, self.dtype))

    def unary(self, operation: str, **attributes: Any) -> Value:
        """Apply an operation to this value alone."""
        return self.graph.add(operation, [self.name], self.dtype, **attributes)

    def _binary(self, operation: str, other: Operand) -> Value:
        return self.graph.add(operation, [self.name, self._operand(other)], self.dtype)

    def _shaped(self, operation: str, numbers: Sequence[int], **attributes: Any) -> Value:
        """Apply an operation whose second input is a list of integers."""
        integers = self.graph.constant(np.asarray(numbers, np.int64))
        return self.graph.add(operation, [self.name, integers], self.dtype, **attributes)

    def __add__(self, other: Operand) -> Value:
        return self._binary("Add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._binary("Sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self._binary("Mul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self._binary("Div", other)

    def __matmul__(self, other: Operand) -> Value:
        return self._binary("MatMul", other)

    def after(self, matrix: NDArray[Any]) -> Value:
        """Return `matrix @ self`."""
        return self.graph.add("MatMul", [self._operand(matrix), self.name], self.dtype)

    def __gt__(self, other: Operand) -> Value:
        return self.graph.add("Greater", [self.name, self._operand(other)], np.bool_)

    def at_least(self, least: float) -> Value:
        """Replace smaller values."""
        return self._binary("Max", least)

    def sqrt(self) -> Value:
        """Square roots."""
        return self.unary("Sqrt")

    def abs(self) -> Value:
        """Absolute values."""
        return self.unary("Abs")

    def power(self, exponent: float) -> Value:
        """Powers of values that are not negative."""
        return self._binary("Pow", exponent)

    def sign(self) -> Value:
        """-1, 0 or 1."""
        return self.unary("Sign")

    def exp(self) -> Value:
        """Exponentials."""
        return self.unary("Exp")

    def log(self) -> Value:
        """Natural logarithms."""
        return self.unary("Log")

    def sigmoid(self) -> Value:
        """1 / (1 + exp(-x))."""
        return self.unary("Sigmoid")

    def round(self) -> Value:
        """Nearest integers."""
        return self.unary("Round")

    def clip(self, low: float, high: float) -> Value:
        """Replace values outside of an interval by its ends."""
        bounds = [self._operand(low), self._operand(high)]
        return self.graph.add("Clip", [self.name, *bounds], self.dtype)

    def softmax(self, axis: int) -> Value:
        """Softmax along one axis."""
        return self.unary("Softmax", axis=axis)

    def sum(self, *axes: int, keepdims: bool = False) -> Value:
        """Sum along axes."""
        return self._shaped("ReduceSum", axes, keepdims=int(keepdims))

    def length(self, *axes: int, least: float) -> Value:
        """Euclidean length along axes, which stay with size 1; at least `least`."""
        return (self * self).sum(*axes, keepdims=True).sqrt().at_least(least)

    def normalised(self, axis: int, size: int, eps: float) -> Value:
        """LayerNorm without parameters along an axis of this size."""
        centred = self - self.sum(axis, keepdims=True) * (1 / size)
        variance = (centred * centred).sum(axis, keepdims=True) * (1 / size)
        return centred / (variance + eps).sqrt()

    def reshape(self, *shape: int) -> Value:
        """Change the shape; 0 keeps a dimension, -1 is what remains."""
        return self._shaped("Reshape", shape)

    def transpose(self, *order: int) -> Value:
        """Permute the dimensions."""
        return self.unary("Transpose", perm=list(order))

    def take(self, indices: NDArray[np.int64], axis: int) -> Value:
        """Select along an axis."""
        rows = self.graph.constant(np.asarray(indices, np.int64))
        return self.graph.add("Gather", [self.name, rows], self.dtype, axis=axis)

    def pick(self, rows: Value) -> Value:
        """Select rows that are computed."""
        return self.graph.add("Gather", [self.name, rows.name], self.dtype, axis=0)

    def top(self, count: int) -> tuple[Value, Value]:
        """Find the largest values along the last axis, in descending order, and their places."""
        values = self.graph.add(
            "TopK", [self.name, self.graph.constant(np.asarray([count], np.int64))], self.dtype
        )
        places = f"{values.name}_places"
        self.graph.nodes[-1].output.append(places)
        return values, Value(self.graph, places, np.dtype(np.int64))

    def largest(self, axis: int) -> Value:
        """Find the largest value along an axis, which stays with size 1."""
        one = self.graph.constant(np.asarray([1], np.int64))
        found = self.graph.add("TopK", [self.name, one], self.dtype, axis=axis)
        self.graph.nodes[-1].output.append(f"{found.name}_place")  # ReduceMax changed in opset 18
        return found

    def resize(self, size: int, axis: int) -> Value:
        """Resize an axis of maps (n, C, H, W) as Pillow's bicubic filter does; needs opset 18."""
        shape = self.graph.constant(np.asarray([size], np.int64))
        return self.graph.add(
            "Resize",
            [self.name, "", "", shape],
            self.dtype,
            mode="cubic",
            cubic_coeff_a=-0.5,
            antialias=1,
            exclude_outside=1,
            coordinate_transformation_mode="half_pixel",
            axes=[axis],
        )

    def cast(self, dtype: Any) -> Value:
        """Convert to another type."""
        kind = np.dtype(dtype)
        if kind == self.dtype:
            return self
        code = self.graph.onnx.helper.np_dtype_to_tensor_dtype(kind)
        return self.graph.add("Cast", [self.name], kind, to=code)
