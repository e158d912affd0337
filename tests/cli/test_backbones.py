"""`miv backbones list | download`, and checkpoints as backbones of commands."""

import json

import pytest
import torch

from mivhead.backbones import list_backbones
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


def test_list(miv, fails):
    answer = miv("backbones", "list")
    assert answer.code == 0
    rows, _, _ = answer.out.partition("\n\n")
    names = [line.split()[0] for line in rows.splitlines()[1:]]
    assert sorted(names) == list_backbones()
    assert names[0] == "efficientnet_lite0"
    lines = {line.split()[0]: line for line in rows.splitlines()}
    assert lines["dinov3_small"].split() == [
        *("dinov3_small", "2025", "86", "dinov3-license", "timm")
    ]
    listed = json.loads(miv("backbones", "list", "--json").out)["backbones"]
    facts = {backbone["name"]: backbone for backbone in listed}
    assert facts["siglip2_base"]["install"] == "open_clip_torch"
    assert "did you mean 'dinov2_small'" in fails("backbones", "list", "dinov2_smal")


def test_download(miv, fails, monkeypatch, tmp_path):
    def fetch(repository, *, allow_patterns, local_dir):
        (tmp_path / allow_patterns[0]).write_bytes(b"weights")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    answer = json.loads(miv("backbones", "download", "dinov2_small", "--json").out)
    assert answer["files"] == ["model.safetensors"]
    assert "did you mean 'dinov3_small'" in fails("backbones", "download", "dinov3_smal")


def test_fit_and_predict_with_a_checkpoint(miv, fails, weights, shots, new, tmp_path):
    model = tmp_path / "model.miv"
    fit = ("fit", shots, "-o", model, "--no-check", *TINY)
    assert miv(*fit, "--weights", weights).code == 0
    assert miv("predict", model, new, "--weights", weights).code == 0
    other = fails("predict", model, new, *TINY, "--weights", "random")
    assert "The model was trained on the backbone 'timm:test_resnet'" in other
    assert "--weights" in other
