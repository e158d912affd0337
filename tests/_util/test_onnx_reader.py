"""Our reader of ONNX files, on files that nobody exported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mivhead._util.onnx_reader import OnnxFile
from mivhead.errors import InputError

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")


def with_constant(kind: int = 1, elsewhere: str = "", **fields: object) -> OnnxFile:
    tensor = onnx.TensorProto(name="c", data_type=kind, **fields)
    if elsewhere:
        tensor.external_data.add(key="offset", value=elsewhere)
    node = onnx.helper.make_node("Add", ["x", "c"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [], initializer=[tensor])
    return OnnxFile(onnx.helper.make_model(graph).SerializeToString(), "model")


def test_a_constant_is_read() -> None:
    found = with_constant(dims=[2], float_data=[1, 2]).constant("c")
    np.testing.assert_array_equal(found, np.float32([1, 2]))


@pytest.mark.parametrize(
    "fields",
    [
        {"dims": [2], "raw_data": b"123"},  # no whole number of values
        {"dims": [3], "float_data": [1.0]},
        {"dims": [1], "kind": 6, "int64_data": [2**62]},  # does not fit
        {"dims": [1], "elsewhere": "x"},  # no number, and no file
        {"dims": [1], "elsewhere": "1"},
    ],
)
def test_a_constant_that_cannot_be_read_is_none(fields: dict[str, Any], tmp_path: Path) -> None:
    model = with_constant(**fields)
    model.folder = tmp_path
    assert model.constant("c") is None


def test_what_is_no_file() -> None:
    with pytest.raises(InputError, match="not an ONNX file"):
        OnnxFile(b"", "model")
