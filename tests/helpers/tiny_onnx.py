"""A classifier of two convolutions as an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx


def network(
    path: Path,
    batch: int | str = "n",
    size: int | str = 16,
    channels_last: bool = False,
) -> Path:
    """Write a classifier: two convolutions, mean, linear layer; tensors `deep` and `logits`."""
    rng = np.random.default_rng(0)
    kind = onnx.TensorProto.FLOAT
    weights = {
        "w1": rng.normal(size=(6, 3, 4, 4)),
        "w2": rng.normal(size=(8, 6, 2, 2)),
        "w3": rng.normal(size=(8, 5)),
    }
    sides = (size, size, 3) if channels_last else (3, size, size)
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["turned" if channels_last else "images", "w1"], ["c1"], strides=[4, 4]),
        node("Relu", ["c1"], ["shallow"]),
        node("Conv", ["shallow", "w2"], ["c2"], strides=[2, 2]),
        node("Relu", ["c2"], ["deep"]),
        node("GlobalAveragePool", ["deep"], ["mean"]),
        node("Flatten", ["mean"], ["vector"]),
        node("MatMul", ["vector", "w3"], ["logits"]),
    ]
    if channels_last:
        nodes.insert(0, node("Transpose", ["images"], ["turned"], perm=[0, 3, 1, 2]))
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "classifier",
        [info("images", kind, (batch, *sides))],
        [info("logits", kind, (batch, 5))],
        [onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)
    return path
