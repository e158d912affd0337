"""`miv backbones list | inspect | export`, and checkpoints and files as backbones of commands."""

import json

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


def test_list(miv):
    answer = miv("backbones", "list")
    assert answer.code == 0
    rows, _, legend = answer.out.partition("\n\n")
    assert [line.split()[0] for line in rows.splitlines()[1:]] == list_backbones()
    assert "T: classes with at most T shots get augmented views" in legend
    assert "--backbone efficientnet_lite0 --backbone efficientnet_lite2" in legend
    found = {
        each["name"]: each
        for each in json.loads(miv("backbones", "list", "--json").out)["backbones"]
    }
    assert found["resnet18"]["size"] == 84
    assert found["sdl_resnet18"]["weights"] == "--weights"
    assert "VICO-UoE/URL" in found["sdl_resnet18"]["origin"]


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
    assert "those of one backbone" in fails("fit", shots, "-o", model, *both, "--weights", "random")


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
