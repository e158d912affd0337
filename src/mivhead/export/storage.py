"""How the weights of an exported graph are stored: in 32, 16 or 8 bits.

Only the storage changes. Weights become float32 again when the file is loaded, because
onnxruntime folds the conversions of constants, so that the graph computes as before, as fast as
before. docs/research-log.md says what the rounding costs.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.optional import need

Storage: TypeAlias = Literal["float32", "half", "int8"]

EXTRA = "onnx"
SMALL = 1024  # values: smaller constants, such as biases, stay as they are
LARGEST = 65504  # of float16


def store(model: Any, storage: Storage) -> None:
    """Store the large float32 and float64 constants of a model with fewer bits, in place."""
    if storage == "float32":
        return
    onnx = need("onnx", EXTRA)
    convert = _half if storage == "half" else _int8
    nodes: list[Any] = []
    for tensor in list(model.graph.initializer):
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype.kind != "f" or array.size < SMALL or np.abs(array).max() > LARGEST:
            continue
        model.graph.initializer.remove(tensor)
        model.graph.initializer.extend(convert(tensor.name, array, nodes))
    later = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *later])


def _half(name: str, array: NDArray[Any], nodes: list[Any]) -> list[Any]:
    onnx = need("onnx", EXTRA)
    short = f"{name}_half"
    nodes.append(_cast(short, name, array.dtype))
    return [onnx.numpy_helper.from_array(array.astype(np.float16), short)]


def _int8(name: str, array: NDArray[Any], nodes: list[Any]) -> list[Any]:
    """Store 8 bits and a scale per row, or per column where rows have fewer values."""
    onnx = need("onnx", EXTRA)
    axis = 0 if array.ndim != 2 or array.shape[0] <= array.shape[1] else 1
    others = tuple(i for i in range(array.ndim) if i != axis)
    scale = np.abs(array).max(axis=others, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1).astype(array.dtype)
    short, wide, scales = f"{name}_int8", f"{name}_float", f"{name}_scale"
    nodes.append(_cast(short, wide, array.dtype))
    nodes.append(onnx.helper.make_node("Mul", [wide, scales], [name], f"{name}_mul"))
    return [
        onnx.numpy_helper.from_array(np.rint(array / scale).astype(np.int8), short),
        onnx.numpy_helper.from_array(scale, scales),
    ]


def _cast(source: str, target: str, dtype: np.dtype[Any]) -> Any:
    onnx = need("onnx", EXTRA)
    code = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return onnx.helper.make_node("Cast", [source], [target], f"{target}_cast", to=code)
