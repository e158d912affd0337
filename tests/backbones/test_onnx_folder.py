"""ViTs in the layout of transformers.js: blocks found in the graph, features equal to PyTorch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from mivhead.backbones import load_backbone, preprocess
from mivhead.backbones.base import join
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.backbones.timm_models import intermediates
from mivhead.errors import InputError, MivError, NotAvailableError
from tests.helpers.conformance import check, photos

timm = pytest.importorskip("timm", reason="the extra timm is not installed")
pytest.importorskip("onnxscript", reason="the extra export is not installed")

SIZE = 64
KINDS = {  # settings of a ViT of timm, and of the same kind of model in transformers
    "vit": ({}, {"model_type": "vit"}),
    "registers": ({"reg_tokens": 4}, {"model_type": "dinov2", "num_register_tokens": 4}),
    "siglip": ({"class_token": False}, {"model_type": "siglip_vision_model"}),
}
PROCESSOR = {
    "do_center_crop": True,
    "crop_size": {"height": SIZE, "width": SIZE},
    "size": {"shortest_edge": SIZE + 4},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}


class Tokens(torch.nn.Module):
    """A model of timm with one output, the tokens after the final norm."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return self.model.forward_features(pixel_values)


def vit(kind: str) -> Any:
    """Make a small ViT with weights far from their initial ones."""
    torch.manual_seed(0)
    sizes = {"img_size": SIZE, "patch_size": 16, "embed_dim": 32, "depth": 6, "num_heads": 2}
    settings = {"num_classes": 0, "global_pool": "", "pos_embed": "learn"} | KINDS[kind][0]
    model = timm.models.VisionTransformer(**sizes, **settings).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write(kind: str, folder: Path, *, new: bool = True) -> Path:
    """Write a folder with `onnx/model.onnx`; the old exporter takes norms to pieces."""
    model = vit(kind)
    config = KINDS[kind][1] | {"num_hidden_layers": 6, "patch_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "onnx").mkdir(exist_ok=True)
    how: dict[str, Any] = {"dynamo": False, "dynamic_axes": {"pixel_values": {0: "n"}}}
    if new:
        count = torch.export.Dim("n", min=1, max=1000)
        how = {"dynamo": True, "dynamic_shapes": ({0: count},), "verbose": False}
        how["external_data"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own
        torch.onnx.export(
            Tokens(model),
            (torch.zeros(2, 3, SIZE, SIZE),),
            folder / "onnx" / "model.onnx",
            input_names=["pixel_values"],
            output_names=["last_hidden_state"],
            opset_version=18 if new else 14,
            **how,
        )
    return folder / "onnx" / "model.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("vit")
    write("vit", path)
    return path


def assert_same(features: Any, expected: Any) -> None:
    assert features.layout == expected.layout
    for name, array in features.tensors.items():
        np.testing.assert_allclose(array, expected.tensors[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("new", [True, False], ids=["norms whole", "norms in pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_features_equal_those_of_pytorch(kind: str, new: bool, tmp_path: Path) -> None:
    write(kind, tmp_path, new=new)
    backbone = load_backbone(f"hf-onnx:{tmp_path}", device="cpu", dtype="float32")
    assert backbone.preset.taps == ("blocks.2", "blocks.3", "blocks.4", "blocks.5")
    assert {block.form for block in backbone.preset.blocks} == {"vit"}
    images = photos(10)  # more than one run
    x = preprocess(images, Preprocessing(SIZE, (0.5,) * 3, (0.5,) * 3))
    with torch.inference_mode():
        expected = intermediates(vit(kind), [2, 3, 4, 5])(x)
    assert_same(backbone.extract(images), join([expected], np.dtype("float32")))


def test_conformance(folder: Path) -> None:
    check(load_backbone(f"hf-onnx:{folder}", device="cpu"))


def test_other_taps(folder: Path) -> None:
    spec = f"hf-onnx:{folder}"
    preset = Preset(("blocks.1",), (BlockPreset(form="vit"),), Preprocessing(SIZE))
    assert len(load_backbone(spec, preset=preset).extract(photos(1)).blocks) == 1
    wrong = Preset(("blocks.99",), (BlockPreset(),), Preprocessing(SIZE))
    with pytest.raises(InputError, match="no tap"):
        load_backbone(spec, preset=wrong)
    with pytest.raises(InputError, match="64 px"):
        load_backbone(spec, image_size=128)


def test_weights_next_to_the_graph(tmp_path: Path) -> None:
    file = write("vit", tmp_path)
    expected = load_backbone(f"hf-onnx:{tmp_path}", dtype="float32").extract(photos(2))
    graph = onnx.load(file)
    settings = {"save_as_external_data": True, "size_threshold": 100, "convert_attribute": False}
    onnx.save(graph, file, location="model.onnx_data", **settings)
    external = load_backbone(f"hf-onnx:{tmp_path}", dtype="float32")
    assert_same(external.extract(photos(2)), expected)
    changed = bytearray((file.parent / "model.onnx_data").read_bytes())
    changed[0] ^= 1
    (file.parent / "model.onnx_data").write_bytes(changed)
    assert load_backbone(f"hf-onnx:{tmp_path}").identity != external.identity
    (file.parent / "model.onnx_data").unlink()
    with pytest.raises(InputError, match="onnx_data"):
        load_backbone(f"hf-onnx:{tmp_path}")


@pytest.mark.parametrize("location", ["../../secret.bin", "/etc/passwd", "other.bin"])
def test_weights_in_any_other_file_are_refused(location: str, folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "onnx" / "model.onnx")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="not read"):
        load_backbone(f"hf-onnx:{tmp_path}")


def test_what_is_missing_or_wrong(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError, match=r"onnx/model\.onnx"):
        load_backbone(f"hf-onnx:{tmp_path}")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 70}
    content = (folder / "onnx" / "model.onnx").read_bytes()
    (tmp_path / "onnx").mkdir()
    graph = tmp_path / "onnx" / "model.onnx"
    graph.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        load_backbone(f"hf-onnx:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="blocks"):
        load_backbone(f"hf-onnx:{tmp_path}")
    for cut in (0, 10, -100):
        graph.write_bytes(content[:cut])
        with pytest.raises(MivError):
            load_backbone(f"hf-onnx:{tmp_path}")


def test_a_model_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the hub is never looked for in the current folder."""
    asked = []

    def fetch(repository: str, *, allow_patterns: list[str], local_dir: Any) -> str:
        asked.append(repository)
        assert "onnx/model.onnx" in allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.chdir(folder)
    backbone = load_backbone("hf-onnx:owner/onnx")
    assert backbone.identity.name == "hf-onnx:owner/onnx"
    assert asked == ["owner/onnx"]
