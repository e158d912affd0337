"""`miv plot`: pictures of a model and an image."""

import json

import pytest
from PIL import Image

from mivhead.backbones import load_backbone
from mivhead.benchmark.episode import draw_episode
from mivhead.datasets.bundled import write_bundled
from tests.helpers.extras import needs

pytestmark = needs("matplotlib", "plot")


@pytest.mark.parametrize("action", ["tsne", "attention"])
def test_a_picture_is_written(action, miv, model, new, tmp_path):
    path = tmp_path / "picture.png"
    answer = miv("plot", action, model, new / "rings" / "5.png", "-o", path)
    assert answer.code == 0, answer.err
    assert f"Saved {path}." in answer.out
    with Image.open(path) as picture:
        assert picture.size[0] > 500


def test_json(miv, model, new, tmp_path):
    image, path = new / "rings" / "5.png", tmp_path / "a.png"
    document = json.loads(miv("plot", "attention", model, image, "-o", path, "--json").out)
    assert document.keys() == {"file", "image", "label", "probability"}
    assert document["file"] == str(path)


def test_shots_are_shown(miv, model, shots, new, tmp_path):
    image, path = new / "rings" / "5.png", tmp_path / "a.png"
    assert miv("plot", "attention", model, image, "--shots", shots, "-o", path).code == 0
    answer = miv("plot", "attention", model, image, "--shots", new, "-o", path)
    assert answer.code == 2
    assert "9 shots in 3 classes, the folder 6 in 3" in answer.err


def test_bad_input(miv, model, new, tmp_path):
    image = new / "rings" / "5.png"
    answer = miv("plot", "tsne", model, image, "--truth", "ring", "-o", tmp_path / "t.png")
    assert answer.code == 2
    assert "Did you mean 'rings'" in answer.err
    answer = miv("plot", "tsne", model, image, "-o", tmp_path / "t.gif")
    assert ".png, .svg or .pdf" in answer.err
    answer = miv("plot", "tsne", model, new, "-o", tmp_path / "t.png")
    assert "holds 6 images; give one" in answer.err


def test_other_methods_have_no_such_picture(miv, shots, new, tmp_path):
    model = tmp_path / "ncc.miv"
    assert miv("fit", shots, "--method", "ncc", "-o", model, "--no-check").code == 0
    answer = miv("plot", "tsne", model, new / "rings" / "5.png", "-o", tmp_path / "t.png")
    assert answer.code == 2
    assert "is not a MIV-head" in answer.err


def test_a_tuned_backbone_needs_the_shots(miv, model, new, tmp_path):
    image = new / "rings" / "5.png"
    answer = miv("plot", "tsne", model, image, "--compare", model, "-o", tmp_path / "t.png")
    assert "--compare needs --shots" in answer.err


def test_a_model_on_features_is_not_tuned(miv, model, shots, new, tmp_path):
    options = ("--compare", model, "--shots", shots, "-o", tmp_path / "t.png")
    answer = miv("plot", "tsne", model, new / "rings" / "5.png", *options)
    assert "does not tune its backbone" in answer.err


@needs("timm")
def test_both_models_use_the_checkpoint(miv, shots, new, tmp_path):
    """The paper's t-SNE figure, offline: a MIV-head and TSA on a checkpoint file."""
    import timm
    from safetensors.torch import save_file

    checkpoint = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), checkpoint)
    chosen = ("--backbone", "timm:test_resnet", "--weights", checkpoint)
    for method in ("miv", "tsa"):
        options = ("--method", method, "--param", "steps=2", "--no-augmentation", *chosen)
        path = tmp_path / f"{method}.miv"
        assert miv("fit", shots, "-o", path, "--no-check", *options).code == 0
    models = (tmp_path / "miv.miv", new / "rings" / "5.png", "--compare", tmp_path / "tsa.miv")
    drawn = ("--shots", shots, "-o", tmp_path / "tsne.png")
    answer = miv("plot", "tsne", *models, *drawn, "--weights", checkpoint)
    assert answer.code == 0, answer.err
    missing = miv("plot", "tsne", *models, *drawn)
    assert missing.code == 2
    assert "--weights" in missing.err


@needs("timm")
def test_an_episode_by_one_command(miv, tmp_path):
    """Samples a task, fits both methods, draws: one panel per block and one for the other."""
    data, path = write_bundled(tmp_path / "sets"), tmp_path / "episode.svg"
    small = ("--backbone", "timm:resnet10t", "--weights", "random", "--protocol", "2-way 1-shot")
    answer = miv(
        "plot", "episode", "digits", "--data", data, *small, "--compare", "none", "-o", path
    )
    assert answer.code == 0, answer.err
    drawn = path.read_text()
    assert "block 1 of" in drawn
    assert "nearest centroids" in drawn
    answer = miv("plot", "episode", "digits", "--data", data, *small, "--query", "999", "-o", path)
    assert answer.code == 2
    assert "has the queries 0 to" in answer.err
    answer = miv("plot", "episode", "digits", "--data", data, "--compare", "ncc", "-o", path)
    assert "does not tune the backbone" in answer.err


@needs("timm")
def test_an_episode_with_a_tuned_backbone(tmp_path):
    data, path = write_bundled(tmp_path / "sets"), tmp_path / "episode.svg"
    draw_episode(
        *("digits", data, path),
        backbone=load_backbone("resnet18", weights="random"),
        protocol="2-way 1-shot",
        params={"steps": 1},
    )
    assert "tsa" in path.read_text()
