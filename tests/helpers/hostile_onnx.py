"""ONNX files that a stranger might send: small, valid, and up to no good."""

from __future__ import annotations

import json
from typing import Any

from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, helper

from mivhead.model.exported import CHECKSUM_KEY, NO_CHECKSUM, with_checksum

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
IDENTITY = {"name": "x", "weights": "0" * 64, "preprocessing": {"size": 8}, "taps": ["a"]}


HEADER = {
    "format": 1,
    "input": "images",
    "model": {
        "format": 1,
        "recipe": {},
        "config": {},
        "classes": ["a", "b"],
        "backbone": IDENTITY,
        "seed": 0,
        "library": "0.3.0",
    },
    "decision": {"scores": [0.0], "shots": [1, 1], "calibrated": True},
    "shots": [1, 1],
}

Node = Any
MEAN = helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0)  # (n, 3)
TWO = helper.make_node("Gather", ["mean", "01"], ["two"], axis=1)  # (n, 2)
SOFTMAX = helper.make_node("Softmax", ["two"], ["soft"], axis=1)
DONE = helper.make_node("Identity", ["soft"], ["probabilities"])
UNKNOWN = helper.make_node("ReduceMax", ["mean"], ["unknown"], axes=[1], keepdims=0)  # (n,)


def integers(name: str, *values: int) -> TensorProto:
    return helper.make_tensor(name, INT64, [len(values)], values)


def model(*nodes: Node, unknown: Node = UNKNOWN) -> ModelProto:
    """Make a model from images `x` to `probabilities` and `unknown`, with its description."""
    graph = helper.make_graph(
        [*nodes, unknown],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 8, 8])],
        [
            helper.make_tensor_value_info("probabilities", FLOAT, None),
            helper.make_tensor_value_info("unknown", FLOAT, None),
        ],
        initializer=[
            integers("01", 0, 1),
            integers("-1", -1),
            integers("0", 0),
            integers("1", 1),
            integers("billion", 10**9),
            helper.make_tensor("ten", FLOAT, [], [10.0]),
            helper.make_tensor("true", BOOL, [], [True]),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    properties = {"mivhead": json.dumps(HEADER), CHECKSUM_KEY: NO_CHECKSUM.decode()}
    helper.set_model_props(made, properties)
    return made


def content(made: ModelProto) -> bytes:
    """Return the file, with its checksum, as a forger would write it."""
    return with_checksum(made.SerializeToString())


def honest() -> ModelProto:
    return model(MEAN, TWO, SOFTMAX, DONE)


def replaced(*nodes: Node) -> ModelProto:
    """The honest model, and nodes that compute something else from its probabilities."""
    last = helper.make_node("Identity", [nodes[-1].output[0]], ["probabilities"])
    return model(MEAN, TWO, SOFTMAX, *nodes, last)


def loop() -> Node:
    """A loop without an end."""
    value = helper.make_tensor_value_info("v", FLOAT, None)
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go on"]),
            helper.make_node("Mul", ["v", "v"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            value,
        ],
        [
            helper.make_tensor_value_info("go on", BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, None),
        ],
    )
    return helper.make_node("Loop", ["", "true", "soft"], ["looped"], body=body)


def huge() -> list[Node]:
    """Nodes that take 4 GB."""
    return [
        helper.make_node("ReduceMean", ["soft"], ["one"], keepdims=0),
        helper.make_node("Cast", ["one"], ["zero"], to=INT64),
        helper.make_node("Add", ["zero", "billion"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["large"]),
        helper.make_node("ReduceSum", ["large", "0"], ["sum"], keepdims=0),
        helper.make_node("Add", ["soft", "sum"], ["more"]),
    ]


def _external(tensor: TensorProto) -> TensorProto:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    tensor.external_data.add(key="length", value="4")
    return tensor


def external(where: str) -> ModelProto:
    """The honest model, with a constant that is in another file."""
    made = honest()
    outside = _external(TensorProto(name="v", data_type=FLOAT, dims=[1]))
    sparse = SparseTensorProto(dims=[4])
    sparse.values.CopyFrom(outside)
    sparse.indices.CopyFrom(integers("i", 0))
    plain = helper.make_node("Constant", [], ["c"])
    kinds = AttributeProto.AttributeType
    if where == "initializer":
        made.graph.initializer.append(outside)
    elif where == "sparse initializer":
        made.graph.sparse_initializer.append(sparse)
    elif where == "sparse attribute":
        attribute = plain.attribute.add(name="sparse_value", type=kinds.SPARSE_TENSOR)
        attribute.sparse_tensor.CopyFrom(sparse)
        made.graph.node.insert(0, plain)
    elif where == "attribute":
        plain.attribute.add(name="value", type=kinds.TENSOR).t.CopyFrom(outside)
        made.graph.node.insert(0, plain)
    else:
        plain.attribute.add(name="value", type=kinds.TENSOR).t.CopyFrom(outside)
        function = made.functions.add(name="F", domain="theirs")
        function.node.append(plain)
        function.output.append("c")
        made.graph.node.insert(0, helper.make_node("F", [], ["f"], domain="theirs"))
        made.opset_import.append(helper.make_opsetid("theirs", 1))
    return made


EXTERNAL = ("initializer", "sparse initializer", "sparse attribute", "attribute", "function")

# What an exported model may not compute: nodes, and words of the error.
WRONG: dict[str, tuple[ModelProto, str]] = {
    "three columns": (
        model(MEAN, helper.make_node("Softmax", ["mean"], ["probabilities"], axis=1)),
        "shape",
    ),
    "no rows": (replaced(helper.make_node("Slice", ["soft", "0", "0"], ["o"])), "shape"),
    "more rows": (replaced(helper.make_node("Concat", ["soft", "soft"], ["o"], axis=0)), "shape"),
    "a vector": (replaced(helper.make_node("ReduceMax", ["soft"], ["o"], keepdims=0)), "shape"),
    "integers": (replaced(helper.make_node("Cast", ["soft"], ["o"], to=INT64)), "not"),
    "negative": (replaced(helper.make_node("Sub", ["soft", "ten"], ["o"])), "not probabilities"),
    "above one": (replaced(helper.make_node("Mul", ["soft", "ten"], ["o"])), "not probabilities"),
    "not a number": (
        replaced(
            helper.make_node("Neg", ["soft"], ["minus"]), helper.make_node("Log", ["minus"], ["o"])
        ),
        "not finite",
    ),
    "4 GB": (replaced(*huge()), "memory"),
    "unknown of another shape": (
        model(
            *(MEAN, TWO, SOFTMAX, DONE),
            unknown=helper.make_node("Identity", ["soft"], ["unknown"]),
        ),
        "shape",
    ),
    "two inputs": (honest(), "several inputs"),
}
WRONG["two inputs"][0].graph.input.append(helper.make_tensor_value_info("y", FLOAT, [1]))
