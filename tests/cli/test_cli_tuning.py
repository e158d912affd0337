"""`miv fit` with methods that tune the backbone, and what follows."""

import json

import pytest

SMALL = ("--backbone", "timm:test_resnet", "--weights", "random")


@pytest.fixture(scope="module")
def model(tmp_path_factory, shots):
    from mivhead.cli.main import main

    path = tmp_path_factory.mktemp("tuning") / "tuned.miv"
    assert main(["fit", str(shots), "-o", str(path), "--method", "tsa", "--quiet", *SMALL]) == 0
    return path


def test_evaluate_predict_and_info(miv, model, new, shots):
    score = json.loads(miv("evaluate", model, shots, "--json", *SMALL).out)
    assert score["accuracy"] > 0.6
    assert "probability" in miv("predict", model, new, *SMALL).out
    told = miv("info", model)
    assert told.code == 0
    assert "tsa" in told.out


def test_check_of_shots_is_left_out_and_said(miv, shots, tmp_path):
    answer = miv("fit", shots, "-o", tmp_path / "m.miv", "--method", "tsa", *SMALL)
    assert answer.code == 0
    assert "No check of the shots: tsa would have to be trained 5 times" in answer.out
    assert "training" in answer.out


def test_features_are_refused(fails, model, features, tmp_path):
    text = fails("fit", features, "-o", tmp_path / "m.miv", "--method", "finetune")
    assert "finetune tunes the backbone: it needs images" in text
    assert "needs images, not features" in fails("evaluate", model, features)


def test_wrong_backbones_are_refused_before_any_work(fails, shots, tmp_path):
    output = ("-o", tmp_path / "m.miv")
    assert "take a ResNet" in fails("fit", shots, *output, "--method", "tsa")
    vit = ("--backbone", "timm:test_vit", "--weights", "random")
    assert "take a ResNet" in fails("fit", shots, *output, "--method", "tsa", *vit)
    assert "take a ViT" in fails("fit", shots, *output, "--method", "ln-tune", *SMALL)
    address = ("--backbone", "http://127.0.0.1:9/backbone")
    assert "miv: error" in fails("fit", shots, *output, "--method", "tsa", *address)
    assert not (tmp_path / "m.miv").exists()
