"""ONNX files: exported ones, other people's, and bad ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mivhead import Features, Preprocessing
from mivhead.backbones import load_backbone
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos, run

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mivhead.backbones import onnx_model as onnx_graph  # noqa: E402  # after the check for the extra
from mivhead.export.backbone import export_onnx, tap_onnx  # noqa: E402
from tests.helpers.tiny_onnx import network  # noqa: E402  # after the check for the extra

FLOAT = onnx.TensorProto.FLOAT


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    pytest.importorskip("timm", reason="the extra timm is not installed")
    path = tmp_path_factory.mktemp("onnx") / "vit.onnx"
    assert export_onnx("timm:test_vit", path, weights="random") < 1e-4
    return path


def test_exported_file_needs_no_options_and_agrees(exported: Path) -> None:
    theirs = load_backbone("timm:test_vit", weights="random", device="cpu", dtype="float32")
    ours = load_backbone(exported, dtype="float32")
    assert ours.preset == theirs.preset
    images = photos(5)
    expected, found = theirs.extract(images), ours.extract(images)
    assert found.layout == expected.layout
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-4, atol=1e-4)


def test_exported_file_conforms(exported: Path) -> None:
    backbone = load_backbone(exported)
    check(backbone)
    code = f"from mivhead.backbones import *; print(load_backbone({str(exported)!r}).identity.key)"
    assert run(code) == backbone.identity.key


def test_exported_file_says_where_it_comes_from(exported: Path) -> None:
    model, _ = onnx_graph.read_graph(exported)
    document = json.loads({p.key: p.value for p in model.metadata_props}["mivhead"])
    theirs = load_backbone("timm:test_vit", weights="random")
    assert document["weights"] == theirs.identity.weights
    assert document["name"] == "timm:test_vit (random weights)"
    assert document["format"] == 1


@pytest.mark.slow
def test_export_of_hooked_and_mirrored_modules(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    path = tmp_path / "lite0.onnx"
    assert export_onnx("efficientnet_lite0", path) < 1e-4
    ours, theirs = load_backbone(path), load_backbone("efficientnet_lite0", device="cpu")
    assert ours.preset == theirs.preset
    assert ours.extract(photos(3)).layout == theirs.extract(photos(3)).layout


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


def test_half_precision(tmp_path: Path) -> None:
    path = network(tmp_path / "half.onnx", kind=onnx.TensorProto.FLOAT16)
    found = load_backbone(path, outputs=["deep"]).extract(photos(2))
    expected = load_backbone(network(tmp_path / "a.onnx"), outputs=["deep"]).extract(photos(2))
    torch.testing.assert_close(
        found.tensors["block0.map"], expected.tensors["block0.map"], rtol=0.02, atol=0.05
    )


def test_tapped_copy_needs_no_options(tmp_path: Path) -> None:
    path, copy = network(tmp_path / "model.onnx"), tmp_path / "tapped.onnx"
    how = Preprocessing(16, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    tap_onnx(path, copy, ["shallow", "deep"], preprocessing=how)
    backbone = load_backbone(copy)
    assert backbone.preset.taps == ("shallow", "deep")
    assert backbone.preset.preprocessing == how
    direct = load_backbone(path, outputs=["shallow", "deep"], preprocessing=how)
    assert backbone.extract(photos(2)) == direct.extract(photos(2))


def test_candidates_are_listed_with_their_shapes(tmp_path: Path) -> None:
    model, _ = onnx_graph.read_graph(network(tmp_path / "model.onnx", size="side"))
    source = onnx_graph.image_input(model, "model.onnx")
    assert (source.batch, source.size, source.channels_last) == (None, None, False)
    found = {each.name: each for each in onnx_graph.candidates(model, source, 32)}
    assert {name: each.shape for name, each in found.items()} == {
        "c1": (6, 8, 8),
        "shallow": (6, 8, 8),
        "c2": (8, 4, 4),
        "deep": (8, 4, 4),
        "vector": (8,),
        "logits": (5,),
    }
    assert found["deep"].operation == "Relu"
    assert [name for name, each in found.items() if each.is_output] == ["logits"]


def test_a_classifier_has_no_spatial_output(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"no spatial output .*`miv backbones inspect .*model"):
        load_backbone(path)
    assert load_backbone(path, outputs=["vector"]).extract(photos(1)).layout == {
        "block0.token": (8,)
    }


def test_refusals(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    with pytest.raises(InputError, match="has no tensor 'deeper'"):
        load_backbone(path, outputs=["deeper"])
    with pytest.raises(InputError, match=r"requires images of 16 px, but .* has size 32"):
        load_backbone(path, outputs=["deep"], preprocessing=Preprocessing(size=32))
    with pytest.raises(InputError, match="contains its weights"):
        load_backbone(path, outputs=["deep"], weights="x.pth")
    with pytest.raises(InputError, match="does not exist"):
        load_backbone(tmp_path / "missing.onnx")
    with pytest.raises(InputError, match="is not a PyTorch model"):
        export_onnx(
            str(path),
            tmp_path / "again.onnx",
            preset=Preset(("deep",), (BlockPreset(),), Preprocessing(size=16)),
        )
    with pytest.raises(NotAvailableError, match="Cannot write"):
        tap_onnx(path, tmp_path / "no" / "folder.onnx", ["deep"])


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
    with pytest.raises(InputError, match="stores weights in other files"):
        load_backbone(path, outputs=["deep"])


def test_external_data_in_inner_graphs_is_refused(tmp_path: Path) -> None:
    def hide(model: Any) -> None:
        tensor = onnx.TensorProto(name="t", data_type=FLOAT, dims=[1])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        constant = onnx.helper.make_node("Constant", [], ["out"], value=tensor)
        inner = onnx.helper.make_graph([constant], "inner", [], [])
        branch = onnx.helper.make_node("If", ["c"], ["x"], then_branch=inner, else_branch=inner)
        model.graph.node.append(branch)

    path = changed(network(tmp_path / "model.onnx"), hide)
    with pytest.raises(InputError, match="stores weights in other files"):
        load_backbone(path, outputs=["deep"])


def test_too_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="larger than 100 bytes"):
        load_backbone(network(tmp_path / "model.onnx"), outputs=["deep"])


def test_unknown_operation_is_one_sentence(tmp_path: Path) -> None:
    def invent(model: Any) -> None:
        model.graph.node[1].op_type = "Frobnicate"

    path = changed(network(tmp_path / "model.onnx"), invent)
    with pytest.raises(InputError, match=r"onnxruntime cannot load model.onnx: .*Frobnicate"):
        load_backbone(path, outputs=["deep"])


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "preset": {"taps": 3}}']
)
def test_foreign_descriptions_are_refused(tmp_path: Path, text: str) -> None:
    def forge(model: Any) -> None:
        onnx.helper.set_model_props(model, {"mivhead": text})

    path = changed(network(tmp_path / "model.onnx"), forge)
    with pytest.raises(InputError, match="cannot be used as a backbone"):
        load_backbone(path)


def test_inputs_that_are_no_images(tmp_path: Path) -> None:
    def retype(model: Any) -> None:
        model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8

    def regrey(model: Any) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1

    def flatten(model: Any) -> None:
        del model.graph.input[0].type.tensor_type.shape.dim[3]

    for change, message in [
        (retype, "got images .* of type uint8"),
        (regrey, r"must be a float batch \(n, 3, R, R\)"),
        (flatten, "must have exactly one input, a batch of images"),
    ]:
        path = changed(network(tmp_path / "model.onnx"), change)
        with pytest.raises(InputError, match=message):
            load_backbone(path, outputs=["deep"])


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("onnx", "load_backbone('model.onnx')"),
        ("onnx", "export_onnx('timm:test_vit', 'model.onnx', weights='random')"),
        ("onnxruntime", "export_onnx('timm:test_vit', 'model.onnx', weights='random')"),
    ],
)
def test_missing_package_names_the_command(package: str, call: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from mivhead.backbones import load_backbone\n"
        "from mivhead.export.backbone import export_onnx\n"
        f"try: {call}\n"
        "except RuntimeError as error: print(error)"
    )
    message = run(code)
    assert f"needs the package {package}," in message
    assert 'run `pip install "mivhead[onnx]"`' in message


def test_taps_of_an_exported_file_can_be_others(exported: Path) -> None:
    described = load_backbone(exported)
    model, _ = onnx_graph.read_graph(exported)
    source = onnx_graph.image_input(model, exported)
    inner = next(
        each.name
        for each in onnx_graph.candidates(model, source, 160)
        if each.shape == (64, 10, 10) and not each.is_output
    )
    other = load_backbone(exported, outputs=[inner])
    assert other.preset.preprocessing == described.preset.preprocessing
    found = other.extract(photos(1))
    assert isinstance(found, Features)
    assert list(found.layout.values()) == [(64, 10, 10)]
    fewer = replace(described.preset, blocks=(BlockPreset(),) * 4)
    assert load_backbone(exported, preset=fewer).identity == described.identity
