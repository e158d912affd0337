"""`miv fit` with methods that tune the backbone, and what follows."""

import json

import pytest

from tests.helpers.extras import needs
from tests.helpers.services import toy_server

pytestmark = [needs("timm"), needs("httpx", "http")]

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


@pytest.mark.parametrize(
    ("method", "network"),
    [
        ("ett", "timm:test_vit"),
        ("ln-tune", "timm:test_vit"),
        ("finetune", "timm:test_vit"),
        ("finetune", "timm:test_resnet"),
    ],
)
def test_fit_save_and_predict(method, network, miv, new, shots, tmp_path):
    path, chosen = tmp_path / "m.miv", ("--backbone", network, "--weights", "random")
    quick = ("--param", "steps=1", "--param", "use_views=false")
    answer = miv("fit", shots, "-o", path, "--method", method, *quick, *chosen)
    assert answer.code == 0, answer.err
    assert "Learned 3 classes from 9 images: reading" in answer.out
    assert f"\nmethod      {method}\n" in miv("info", path).out
    assert "probability" in miv("predict", path, new, *chosen).out


def test_views_are_a_choice(miv, shots, tmp_path):
    arguments = ("fit", shots, "-o", tmp_path / "m.miv", "--param", "steps=1", *SMALL)
    views = ("--method", "tsa", "--param", "use_views=true", "--threshold", "3")
    assert "9 images and 9 augmented views" in miv(*arguments, *views).out


def test_cross_validation_is_skipped_and_the_output_says_so(miv, shots, tmp_path):
    answer = miv("fit", shots, "-o", tmp_path / "m.miv", "--method", "tsa", *SMALL)
    assert answer.code == 0
    assert "No cross-validation: tsa would have to be trained 5 more times" in answer.out
    assert "training" in answer.out


def test_features_are_refused(fails, model, features, tmp_path):
    text = fails("fit", features, "-o", tmp_path / "m.miv", "--method", "finetune")
    assert "finetune tunes the backbone: it needs images" in text
    assert "needs images, not features" in fails("evaluate", model, features)


def test_wrong_backbones_are_refused(fails, shots, tmp_path):
    output = ("-o", tmp_path / "m.miv")
    assert "choose a ResNet" in fails("fit", shots, *output, "--method", "tsa")
    vit = ("--backbone", "timm:test_vit", "--weights", "random")
    assert "choose a ResNet" in fails("fit", shots, *output, "--method", "tsa", *vit)
    assert "choose a ViT" in fails("fit", shots, *output, "--method", "ln-tune", *SMALL)
    assert not (tmp_path / "m.miv").exists()


def test_a_service_cannot_be_tuned(fails, shots, tmp_path):
    with toy_server() as url:
        text = fails("fit", shots, "-o", tmp_path / "m.miv", "--method", "tsa", "--backbone", url)
    assert "tsa tunes the backbone, so it needs a torch module" in text
    assert "toy only gives features" in text
    assert not (tmp_path / "m.miv").exists()
