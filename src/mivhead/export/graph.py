"""Write ONNX graphs as formulas: `Value` computes like an array, and every step becomes a node.

Only plain operations whose meaning has not changed since opset 13 are used, so that the nodes can
be appended to the graph of any backbone of opset 13 or later. One-dimensional factors of matrix
products are avoided: onnxruntime (1.18 to 1.31) computes some of them wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

OPSET = 13  # the oldest whose operations are used here
PREFIX = "mivhead/"  # of all names, so that they cannot collide with a backbone's

Operand: TypeAlias = "Value | NDArray[Any] | float"


class Graph:
    """Nodes and constants, in the order in which they are computed.

    >>> graph = Graph()
    >>> x = graph.input("x", np.float32)
    >>> y = (x * x).sum(1).sqrt()
    >>> [node.op_type for node in graph.nodes]
    ['Mul', 'ReduceSum', 'Sqrt']
    """

    def __init__(self) -> None:
        import onnx

        self.onnx: Any = onnx
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
            self._names[key] = f"{PREFIX}constant{len(self._names)}"
            self.constants.append(self.onnx.numpy_helper.from_array(array, self._names[key]))
        return self._names[key]

    def add(self, operation: str, inputs: Sequence[str], dtype: Any, **attributes: Any) -> Value:
        """Add a node with one output."""
        name = f"{PREFIX}{len(self.nodes)}_{operation}"
        node = self.onnx.helper.make_node(operation, list(inputs), [name], name, **attributes)
        self.nodes.append(node)
        return Value(self, name, np.dtype(dtype))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Join tensors."""
        return self.add("Concat", [v.name for v in values], values[0].dtype, axis=axis)

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
        """Return the name of a value, or of a new constant."""
        if isinstance(other, Value):
            return other.name
        return self.graph.constant(np.asarray(other, self.dtype))

    def unary(self, operation: str, **attributes: Any) -> Value:
        """Apply an operation to this value alone."""
        return self.graph.add(operation, [self.name], self.dtype, **attributes)

    def binary(self, operation: str, other: Operand) -> Value:
        """Apply an operation to this value and another one."""
        return self.graph.add(operation, [self.name, self._operand(other)], self.dtype)

    abs: partialmethod[Value] = partialmethod(unary, "Abs")
    exp: partialmethod[Value] = partialmethod(unary, "Exp")
    log: partialmethod[Value] = partialmethod(unary, "Log")
    sigmoid: partialmethod[Value] = partialmethod(unary, "Sigmoid")
    sign: partialmethod[Value] = partialmethod(unary, "Sign")
    sqrt: partialmethod[Value] = partialmethod(unary, "Sqrt")
    __add__: partialmethod[Value] = partialmethod(binary, "Add")
    __sub__: partialmethod[Value] = partialmethod(binary, "Sub")
    __mul__: partialmethod[Value] = partialmethod(binary, "Mul")
    __truediv__: partialmethod[Value] = partialmethod(binary, "Div")
    __matmul__: partialmethod[Value] = partialmethod(binary, "MatMul")
    softmax: partialmethod[Value] = partialmethod(unary, "Softmax")  # takes the axis
    at_least: partialmethod[Value] = partialmethod(binary, "Max")

    def _shaped(self, operation: str, numbers: Sequence[int], **attributes: Any) -> Value:
        """Apply an operation whose second input is a list of integers."""
        integers = self.graph.constant(np.asarray(numbers, np.int64))
        return self.graph.add(operation, [self.name, integers], self.dtype, **attributes)

    def after(self, matrix: NDArray[Any]) -> Value:
        """Return `matrix @ self`."""
        return self.graph.add("MatMul", [self._operand(matrix), self.name], self.dtype)

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

    def largest(self, axis: int) -> Value:
        """Find the largest value along an axis, which stays with size 1."""
        one = self.graph.constant(np.asarray([1], np.int64))
        largest = self.graph.add("TopK", [self.name, one], self.dtype, axis=axis)
        self.graph.nodes[-1].output.append(f"{largest.name}_place")  # ReduceMax changed in opset 18
        return largest

    def cast(self, dtype: Any) -> Value:
        """Convert to another type."""
        kind = np.dtype(dtype)
        if kind == self.dtype:
            return self
        code = self.graph.onnx.helper.np_dtype_to_tensor_dtype(kind)
        return self.graph.add("Cast", [self.name], kind, to=code)
