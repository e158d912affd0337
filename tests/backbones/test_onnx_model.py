"""ONNX files: exported ones, other people's, and bad ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from mivhead import Preprocessing
from mivhead.backbones import load_backbone
from mivhead.backbones.preset import BlockPreset
from mivhead.errors import InputError
from tests.helpers.conformance import check, photos
from tests.helpers.tiny_onnx import network


def test_other_peoples_file_is_tapped_inside(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    backbone = load_backbone(path, outputs=["shallow", "deep"])
    check(backbone)
    assert backbone.identity.name == "model.onnx"
    assert list(backbone.extract(photos(1)).layout.values()) == [(6, 4, 4), (8, 2, 2)]
    assert backbone.preset.blocks == (BlockPreset((3,)), BlockPreset())
    again = load_backbone(path, preset=backbone.preset)  # as from a model file
    assert again.identity == backbone.identity
    assert again.extract(photos(2)) == backbone.extract(photos(2))


@pytest.mark.parametrize(
    "variant",
    [{"batch": 1}, {"batch": 2}, {"channels_last": True}, {"size": "side"}],
    ids=str,
)
def test_variants_of_inputs_give_the_same(tmp_path: Path, variant: dict[str, Any]) -> None:
    plain = load_backbone(network(tmp_path / "a.onnx"), outputs=["deep"], dtype="float32")
    other = load_backbone(
        network(tmp_path / "b.onnx", **variant),
        outputs=["deep"],
        dtype="float32",
        preprocessing=plain.preset.preprocessing,
    )
    expected, found = (each.extract(photos(5)) for each in (plain, other))
    torch.testing.assert_close(found.tensors["block0.map"], expected.tensors["block0.map"])


def test_a_classifier_has_no_spatial_output(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    with pytest.raises(InputError, match="no spatial output"):
        load_backbone(path)
    assert load_backbone(path, outputs=["vector"]).extract(photos(1)).layout == {
        "block0.token": (8,)
    }


def test_refusals(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    with pytest.raises(InputError, match="deeper"):
        load_backbone(path, outputs=["deeper"])
    with pytest.raises(InputError, match="16 px"):
        load_backbone(path, outputs=["deep"], preprocessing=Preprocessing(size=32))
    with pytest.raises(InputError, match="omit weights"):
        load_backbone(path, outputs=["deep"], weights="x.pth")
    with pytest.raises(InputError, match="not exist"):
        load_backbone(tmp_path / "missing.onnx")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(InputError, match="not a file"):
        load_backbone(tmp_path / "pipe.onnx")


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not an ONNX file", b"\xff" * 999])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not an ONNX file"):
        load_backbone(path)


def changed(path: Path, change: Any) -> Path:
    model = onnx.load(path)
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_is_refused(tmp_path: Path) -> None:
    def point_outside(model: Any) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../etc/passwd")

    path = changed(network(tmp_path / "model.onnx"), point_outside)
    with pytest.raises(InputError, match="other files"):
        load_backbone(path, outputs=["deep"])


def test_inputs_that_are_no_images(tmp_path: Path) -> None:
    def halve(tensor: Any) -> None:
        tensor.elem_type = onnx.TensorProto.FLOAT16

    def grey(tensor: Any) -> None:
        tensor.shape.dim[1].dim_value = 1

    def flatten(tensor: Any) -> None:
        del tensor.shape.dim[3]

    for change, word in [(halve, "float16"), (grey, "float batch"), (flatten, "exactly one")]:
        path = network(tmp_path / "model.onnx")
        changed(path, lambda model, c=change: c(model.graph.input[0].type.tensor_type))
        with pytest.raises(InputError, match=word):
            load_backbone(path, outputs=["deep"])
