"""Models in the layout of transformers.js: blocks found in the graph, features equal to PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mivhead
from mivhead import FewShotClassifier
from mivhead._util.onnx_reader import OnnxFile
from mivhead.backbones import load_backbone
from mivhead.backbones.onnx_folder import residual_stream
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos
from tests.helpers.hub import serving
from tests.helpers.towers import (
    PROCESSOR,
    SIZE,
    clip,
    dinov2,
    dinov3,
    dinov3_convnext,
    registers,
    save,
    siglip,
    vit,
)

pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")


class Wrapped(torch.nn.Module):
    """A model with one input and one output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return self.model(pixel_values=pixel_values).last_hidden_state


def export(model: Any, folder: Path, *, new: bool = True, size: int = SIZE, **how: Any) -> Path:
    """Write `onnx/model.onnx`; the old exporter takes norms to pieces."""
    file = folder / "onnx" / "model.onnx"
    file.parent.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"dynamo": False, "dynamic_axes": {"pixel_values": {0: "n"}}}
    if new:
        count = torch.export.Dim("n", min=1, max=1000)
        settings = {"dynamo": True, "dynamic_shapes": ({0: count},), "verbose": False}
        settings |= {"external_data": False} | how
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own
        torch.onnx.export(
            Wrapped(model),
            (torch.zeros(2, 3, size, size),),
            file,
            input_names=["pixel_values"],
            output_names=["last_hidden_state"],
            opset_version=18 if new else 14,
            **settings,
        )
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("dinov2")
    export(save(dinov2, path), path)
    return path


def assert_same(found: Any, expected: Any) -> None:
    assert found.layout == {k: v for k, v in expected.layout.items() if k in found.layout}
    for name, array in found.tensors.items():
        np.testing.assert_allclose(
            np.asarray(array), np.asarray(expected.tensors[name]), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("new", [True, False], ids=["norms whole", "norms in pieces"])
@pytest.mark.parametrize("make", [dinov2, registers, dinov3, vit, siglip, clip])
def test_features_equal_those_of_pytorch(
    make: Callable[[], Any], new: bool, tmp_path: Path
) -> None:
    if not new and make in (dinov2, registers):
        pytest.skip("the old exporter cannot resize position embeddings")
    export(save(make, tmp_path), tmp_path, new=new)
    backbone = load_backbone(f"hf-onnx:{tmp_path}", device="cpu", dtype="float32")
    reference = load_backbone(f"hf:{tmp_path}", device="cpu", dtype="float32")
    count = len(backbone.preset.taps)
    assert (
        backbone.preset.taps
        == reference.preset.taps[:count]
        == ("blocks.0", "blocks.1", "blocks.2")
    )
    assert backbone.preset.blocks == reference.preset.blocks[:count]
    assert backbone.preset.preprocessing == reference.preset.preprocessing
    images = photos(10)  # more than one run
    assert_same(backbone.extract(images), reference.extract(images))


def test_stages_of_a_cnn_equal_those_of_pytorch(tmp_path: Path) -> None:
    model = save(dinov3_convnext, tmp_path)
    processor = PROCESSOR | {"do_center_crop": False, "size": {"height": 64, "width": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    export(model, tmp_path, size=64)
    backbone = load_backbone(f"hf-onnx:{tmp_path}", device="cpu", dtype="float32")
    reference = load_backbone(f"hf:{tmp_path}", device="cpu", dtype="float32")
    assert backbone.preset.taps == reference.preset.taps == ("stages.2", "stages.3")
    assert backbone.preset.blocks == reference.preset.blocks
    assert_same(backbone.extract(photos(2)), reference.extract(photos(2)))


def test_conformance(folder: Path) -> None:
    check(load_backbone(f"hf-onnx:{folder}", device="cpu"))


def test_a_file_a_folder_and_other_taps(folder: Path) -> None:
    whole = load_backbone(f"hf-onnx:{folder}", dtype="float32").extract(photos(2))
    preset = Preset(("blocks.1",), (BlockPreset(form="vit"),), Preprocessing(SIZE))
    spec = f"hf-onnx:{folder / 'onnx' / 'model.onnx'}"
    one = load_backbone(spec, preset=preset, dtype="float32")
    assert one.preset.taps == ("blocks.1",)
    usual = load_backbone(spec, dtype="float32").extract(photos(2))
    assert_same(usual, whole)
    wrong = Preset(("blocks.9",), (BlockPreset(),), Preprocessing(SIZE))
    with pytest.raises(InputError, match=r"no tap 'blocks\.9'; its taps are blocks\.0, blocks\.1"):
        load_backbone(spec, preset=wrong)


def test_it_needs_neither_the_package_onnx_nor_transformers(folder: Path) -> None:
    code = f"""
import sys
for name in ("onnx", "transformers", "timm", "huggingface_hub"):
    sys.modules[name] = None
import numpy as np
from mivhead.backbones import load_backbone
backbone = load_backbone("hf-onnx:{folder}", device="cpu")
print(len(backbone.extract([np.zeros((8, 8, 3), np.uint8)]).blocks))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr


def test_a_classifier_learns_and_is_loaded_again(folder: Path, tmp_path: Path) -> None:
    images = photos(6)
    fitted = FewShotClassifier(f"hf-onnx:{folder}", device="cpu").fit(images, list("aabbcc"))
    mivhead.save(fitted, tmp_path / "model.miv")
    again = mivhead.load(tmp_path / "model.miv")
    np.testing.assert_allclose(again.predict_proba(images), fitted.predict_proba(images), atol=1e-6)


def test_weights_next_to_the_graph(tmp_path: Path) -> None:
    model = save(dinov2, tmp_path)
    file = export(model, tmp_path)
    expected = load_backbone(f"hf-onnx:{tmp_path}", dtype="float32").extract(photos(2))
    graph = onnx.load(file)
    settings = {"save_as_external_data": True, "size_threshold": 100, "convert_attribute": False}
    onnx.save(graph, file, location="model.onnx_data", **settings)
    assert (file.parent / "model.onnx_data").is_file()
    external = load_backbone(f"hf-onnx:{tmp_path}", dtype="float32")
    assert_same(external.extract(photos(2)), expected)


@pytest.mark.parametrize("location", ["../../secret.bin", "/etc/passwd", "other.bin"])
def test_weights_in_any_other_file_are_refused(location: str, folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "onnx" / "model.onnx")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=r"only model\.onnx_data next to it is read"):
        load_backbone(f"hf-onnx:{file}")


def test_the_reader_agrees_with_the_package_onnx(folder: Path) -> None:
    content = (folder / "onnx" / "model.onnx").read_bytes()
    mine, theirs = OnnxFile(content, "model"), onnx.load_model_from_string(content)
    expected = [(n.op_type, tuple(n.input), tuple(n.output)) for n in theirs.graph.node]
    assert [(n.operation, n.inputs, n.outputs) for n in mine.nodes] == expected
    assert [each.name for each in mine.inputs] == ["pixel_values"]
    assert mine.inputs[0].shape == (None, 3, SIZE, SIZE)
    for tensor in theirs.graph.initializer:
        array = mine.constant(tensor.name)
        if array is not None:
            np.testing.assert_array_equal(array, onnx.numpy_helper.to_array(tensor))
    assert len(residual_stream(mine.nodes)) >= 6


@pytest.mark.parametrize("cut", [0, 1, 10, 1000, -1, -100])
def test_truncated_files(cut: int, folder: Path, tmp_path: Path) -> None:
    content = (folder / "onnx" / "model.onnx").read_bytes()
    file = tmp_path / "model.onnx"
    file.write_bytes(content[:cut])
    with pytest.raises(InputError, match="is not an ONNX file, or is corrupted"):
        load_backbone(f"hf-onnx:{file}")


def test_bytes_that_are_changed_never_crash(folder: Path) -> None:
    content = (folder / "onnx" / "model.onnx").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        changed = bytearray(content)
        for place in rng.integers(0, 4000, 3):
            changed[place] = rng.integers(0, 256)
        with suppress(InputError):
            OnnxFile(bytes(changed), "changed")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder nor a name of a model"):
        load_backbone("hf-onnx:nothing")
    with pytest.raises(NotAvailableError, match=r"has no onnx/model\.onnx in the layout"):
        load_backbone(f"hf-onnx:{tmp_path}")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model_quantized.onnx").write_bytes(b"")
    with pytest.raises(NotAvailableError, match=r"name one of its files, onnx/model_quantized"):
        load_backbone(f"hf-onnx:{tmp_path}")
    with pytest.raises(InputError, match="omit weights"):
        load_backbone(f"hf-onnx:{tmp_path}", weights="random")


def test_a_config_of_another_model(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.onnx").write_bytes((folder / "onnx" / "model.onnx").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(InputError, match=r"cannot be found: .* says that it has 7 layers"):
        load_backbone(f"hf-onnx:{tmp_path}")


def test_a_fixed_input_size(folder: Path) -> None:
    with pytest.raises(InputError, match="requires images of 32 px, not 64"):
        load_backbone(f"hf-onnx:{folder}", image_size=64)


def test_a_model_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, tmp_path) as server:
        server.files = {
            "config.json": (folder / "config.json").read_bytes(),
            "preprocessor_config.json": (folder / "preprocessor_config.json").read_bytes(),
            "onnx/model.onnx": (folder / "onnx" / "model.onnx").read_bytes(),
            "onnx/model_quantized.onnx": b"not wanted",
        }
        backbone = load_backbone("hf-onnx:owner/name", dtype="float32")
    assert backbone.identity.name == "hf-onnx:owner/name"
    expected = load_backbone(f"hf-onnx:{folder}", dtype="float32").extract(photos(2))
    assert_same(backbone.extract(photos(2)), expected)
    again = load_backbone("hf-onnx:owner/name")  # the hub is gone, the files are there
    assert again.identity == backbone.identity
    files = {p.name for p in (tmp_path / "weights").rglob("*") if p.is_file()}
    assert files == {"config.json", "preprocessor_config.json", "model.onnx"}
