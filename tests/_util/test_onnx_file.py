"""Files written without the package onnx: onnx reads them as they were meant."""

from __future__ import annotations

import numpy as np
import pytest

from mivhead._util.onnx_file import TYPES, Node, Tensor, encode, encode_model

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")


def test_every_kind_of_attribute_and_constant() -> None:
    attributes = {
        "whole": -3,
        "fraction": 0.5,
        "word": "über",
        "numbers": [1, 0, -(2**40)],
        "fractions": [0.25, 1],
        "array": np.arange(6, dtype=np.int64).reshape(2, 3),
        "none": [],
    }
    constants = {name: np.ones((2, 1), name) for name in TYPES}
    constants["number"] = np.array(7, np.int64)
    constants["transposed"] = np.arange(6, dtype=np.float32).reshape(2, 3).T
    constants["foreign"] = np.arange(3, dtype=">f4")
    node = Node("Anything", ["x", "", "number"], ["y", "z"], attributes)
    x = Tensor("float32", ["n", 3])
    content = encode_model([node], constants, {"x": x}, {"y": x}, opset=17, metadata={"a": "b"})
    model = onnx.load_model_from_string(content)
    assert (model.ir_version, model.opset_import[0].version) == (8, 17)
    assert {each.key: each.value for each in model.metadata_props} == {"a": "b"}
    (found,) = model.graph.node
    assert (found.op_type, list(found.input), list(found.output)) == (
        "Anything",
        ["x", "", "number"],
        ["y", "z"],
    )
    values = {each.name: onnx.helper.get_attribute_value(each) for each in found.attribute}
    assert values.pop("word").decode() == "über"
    array = onnx.numpy_helper.to_array(values.pop("array"))
    np.testing.assert_array_equal(array, attributes["array"])
    assert {name: list(v) if hasattr(v, "__len__") else v for name, v in values.items()} == {
        name: attributes[name] for name in values
    }
    for tensor in model.graph.initializer:
        expected = constants[tensor.name]
        found_array = onnx.numpy_helper.to_array(tensor)
        np.testing.assert_array_equal(found_array, expected)
        assert found_array.dtype == expected.dtype.newbyteorder("=")
        assert found_array.shape == expected.shape
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].dim_value) == ("n", 3)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63)])
def test_integers_of_any_size(number: int) -> None:
    model = onnx.ModelProto()
    model.ParseFromString(encode({5: number}))  # model_version
    assert model.model_version == number
    assert encode({5: number}) == model.SerializeToString()
