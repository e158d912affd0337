"""`miv backbones list | inspect | export`, and checkpoints and files as backbones of commands."""

import json

import numpy as np
import pytest
import torch

import mivhead
from mivhead.backbones import list_backbones, load_backbone
from mivhead.backbones.timm_models import build
from tests.helpers.extras import needs

pytestmark = needs("timm")

TINY = ("--backbone", "timm:test_resnet")


@pytest.fixture
def weights(tmp_path):
    """Write a checkpoint of a tiny network that is not the one of `--weights random`."""
    state = build("timm:test_resnet", "random").state_dict()
    torch.save({name: tensor * 1.5 for name, tensor in state.items()}, tmp_path / "tiny.pth")
    return tmp_path / "tiny.pth"


@pytest.fixture
def network(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    from tests.helpers.tiny_onnx import network

    return network(tmp_path / "model.onnx")


def test_list(miv, fails, monkeypatch, tmp_path):
    monkeypatch.setenv("MIV_WEIGHTS", str(tmp_path))
    answer = miv("backbones", "list")
    assert answer.code == 0
    rows, _, legend = answer.out.partition("\n\n")
    names = [line.split()[0] for line in rows.splitlines()[1:]]
    assert sorted(names) == list_backbones()
    assert names[0] == "efficientnet_lite0"
    assert "--backbone efficientnet_lite0 --backbone efficientnet_lite2" in legend
    lines = {line.split()[0]: line for line in rows.splitlines()}
    assert lines["dinov3_small"].split() == [
        *("dinov3_small", "2025", "86", "dinov3-license", "mivhead[timm]", "-")
    ]
    found = {
        each["name"]: each
        for each in json.loads(miv("backbones", "list", "--json").out)["backbones"]
    }
    assert found["resnet18"]["size"] == 84
    assert found["sdl_resnet18"]["weights"] == "--weights"
    assert "VICO-UoE/URL" in found["sdl_resnet18"]["origin"]
    assert found["siglip2_base"]["install"] == "mivhead[open-clip]"
    assert "did you mean 'dinov2_small'" in fails("backbones", "list", "dinov2_smal")
    assert "inspect timm:resnet18" in fails("backbones", "list", "timm:resnet18")
    assert "Name the backbones" in fails("backbones", "list", "--speed")


def test_speed_is_measured_once(miv, monkeypatch, tmp_path):
    monkeypatch.setenv("MIV_WEIGHTS", str(tmp_path / "weights"))
    name = "mobilenetv4_small"
    answer = miv("backbones", "list", name, "--speed", "--json")
    (measured,) = json.loads(answer.out)["backbones"]
    assert measured["images_per_second"] > 0
    again = json.loads(miv("backbones", "list", "--json").out)["backbones"]
    speeds = {each["name"]: each["images_per_second"] for each in again}
    assert speeds[name] == measured["images_per_second"]
    assert speeds["dinov2_small"] is None


def test_download_and_use(miv, fails, monkeypatch, tmp_path, shots, new):
    from safetensors.torch import save

    from tests.helpers.hub import serving

    spec = "mobilenetv4_small"
    state = build(spec, "random").state_dict()
    classifier = {"classifier.weight": torch.ones(1000, 1280), "classifier.bias": torch.ones(1000)}
    with serving(monkeypatch, tmp_path) as hub:
        hub.name = "timm/mobilenetv4_conv_small.e2400_r224_in1k"
        hub.files = {"model.safetensors": save(state | classifier)}
        answer = miv("backbones", "download", spec)
        assert f"Use it with --backbone {spec}" in answer.out
        folder = tmp_path / "weights" / hub.name
        assert (folder / "model.safetensors").is_file()
        model = str(tmp_path / "model.miv")
        assert miv("fit", str(shots), "-o", model, "--backbone", spec, "--no-check").code == 0
        assert miv("predict", model, str(new)).code == 0
        answer = miv("backbones", "download", spec, "-o", str(tmp_path / "mine"), "--json")
        assert json.loads(answer.out)["files"] == ["model.safetensors"]
        hub.status = 401
        assert "accept its terms" in fails("backbones", "download", "dinov3_small")
    assert "copy them to" in fails("backbones", "download", "dinov3_small")
    assert "did you mean 'dinov3_small'" in fails("backbones", "download", "dinov3_smal")


def test_export_a_folder(miv, fails, tmp_path, shots):
    pytest.importorskip("onnxscript")
    folder = tmp_path / "tiny"
    what = ("timm:test_resnet", "--weights", "random")
    assert miv("backbones", "export", *what, "-o", str(folder)).code == 0
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert files == ["config.json", "onnx/model.onnx", "preprocessor_config.json"]
    expected = load_backbone("timm:test_resnet", weights="random", device="cpu", dtype="float32")
    found = load_backbone(f"hf-onnx:{folder}", device="cpu", dtype="float32")
    assert found.preset == expected.preset
    image = [np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)]
    theirs = expected.extract(image).tensors
    for name, array in found.extract(image).tensors.items():
        np.testing.assert_allclose(np.asarray(array), np.asarray(theirs[name]), atol=1e-4)
    model = str(tmp_path / "model.miv")
    backbone = f"hf-onnx:{folder}"
    assert miv("fit", str(shots), "-o", model, "--backbone", backbone, "--no-check").code == 0
    assert "an .onnx file or a folder" in fails("backbones", "export", *what, "-o", "model.pt")


def test_inspect_a_name(miv):
    answer = miv("backbones", "inspect", "resnet18", "--weights", "random")
    assert answer.code == 0
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line}
    assert "128x11x11" in rows["layer2"]
    assert "native, 10, 9, 8, 7" in rows["layer2"]
    assert rows["threshold"].split()[1] == "30"
    document = json.loads(
        miv("backbones", "inspect", "resnet18", "--weights", "random", "--json").out
    )
    assert document["blocks"][2]["map"] == [512, 3, 3]
    assert document["blocks"][2]["heads"] == 8


def test_inspect_an_onnx_file(miv, network):
    answer = miv("backbones", "inspect", network)
    assert answer.code == 0
    names = [line.split()[0] for line in answer.out.splitlines() if "x4" in line or "x2" in line]
    assert names == ["shallow", "deep"]
    assert "and 2 tensors of the same shapes" in answer.out
    document = json.loads(miv("backbones", "inspect", network, "--all", "--json").out)
    assert [each["name"] for each in document["tensors"]][:4] == ["c1", "shallow", "c2", "deep"]


def test_tap_fit_and_predict_with_an_onnx_file(miv, network, shots, new, tmp_path):
    tapped, model = tmp_path / "tapped.onnx", tmp_path / "model.miv"
    taps = ("--outputs", "shallow,deep", "--mean", "0.5", "0.5", "0.5")
    assert miv("backbones", "export", network, *taps, "-o", tapped).code == 0
    assert load_backbone(tapped).preset.preprocessing.mean == (0.5, 0.5, 0.5)
    assert "deep" in miv("backbones", "inspect", tapped).out
    fit = ("fit", shots, "-o", model, "--no-augmentation", "--no-check")
    assert miv(*fit, "--backbone", tapped).code == 0
    answer = miv("predict", model, new, "--json", "--backbone", tapped)
    assert len(json.loads(answer.out)["predictions"]) == 6


def test_two_backbones_together(miv, fails, network, shots, new, tmp_path):
    tapped, model = tmp_path / "tapped.onnx", tmp_path / "model.miv"
    assert miv("backbones", "export", network, "--outputs", "deep", "-o", tapped).code == 0
    both = ("--backbone", "efficientnet_lite0", "--backbone", tapped)
    assert miv("fit", shots, "-o", model, "--no-check", *both).code == 0
    assert mivhead.load(model).identity_.name == "efficientnet_lite0+tapped.onnx"
    assert len(mivhead.load(model).classifier_.support_.blocks) == 5
    found = json.loads(miv("predict", model, new, "--json", *both).out)["predictions"]
    assert len(found) == 6
    swapped = ("--backbone", tapped, "--backbone", "efficientnet_lite0")
    assert "has no tensor 'blocks.4'" in fails("predict", model, new, *swapped)
    assert "for a single backbone" in fails("fit", shots, "-o", model, *both, "--weights", "random")


def test_fit_and_predict_with_a_checkpoint(miv, fails, weights, shots, new, tmp_path):
    model = tmp_path / "model.miv"
    fit = ("fit", shots, "-o", model, "--no-augmentation", "--no-check", *TINY)
    assert miv(*fit, "--weights", weights).code == 0
    assert miv("predict", model, new, "--weights", weights).code == 0
    other = fails("predict", model, new, *TINY, "--weights", "random")
    assert "The model was trained on the backbone 'timm:test_resnet'" in other
    assert "--weights" in other


def test_export_refusals(fails, network, tmp_path):
    out = ("-o", tmp_path / "x.onnx")
    assert "Name the tensors to tap" in fails("backbones", "export", network, *out)
    assert "must be an .onnx file" in fails(
        "backbones", "export", network, "-o", tmp_path / "x.bin"
    )
    assert "no tensor 'deeper'" in fails(
        "backbones", "export", network, "--outputs", "deeper", *out
    )
    assert "contains its weights" in fails(
        "backbones", "export", network, "--outputs", "deep", "--weights", "a.pth", *out
    )
    assert "need an ONNX file as input" in fails(
        "backbones", "export", "timm:test_resnet", "--outputs", "layer4", *out
    )
    assert "does not exist" in fails("backbones", "inspect", "missing.onnx")
    assert not (tmp_path / "x.onnx").exists()
