"""`miv info`."""

import json
import re


def test_info_of_a_model(miv, model):
    text = miv("info", model).out
    assert "a model of 3 classes and the features of their 9 images" in text
    assert re.search(r"^rings +3$", text, re.M)
    document = json.loads(miv("info", model, "--json").out)
    assert document["kind"] == "model"
    assert f"seed {document['seed']}, drawn from --seed" in text
    assert document["classes"] == {"checks": 3, "rings": 3, "stripes": 3}
    assert document["backbone"]["name"] == "efficientnet_lite0"
    assert document["bytes"] == model.stat().st_size


def test_the_frequencies_of_classes_are_shown(miv, shots, tmp_path):
    model = tmp_path / "m.miv"
    for prior, shown in (("rings=5,checks=1,stripes=1", r"^rings +3 +5$"), ("shots", "^prior ")):
        how = ["--threshold", "0", "--no-check", "--prior", prior]
        assert miv("fit", shots, "-o", model, *how).code == 0
        assert re.search(shown, miv("info", model).out, re.M)


def test_info_of_features(miv, features):
    assert "features of 9 images and 9 views, 3 classes" in miv("info", features).out
    document = json.loads(miv("info", features, "--json").out)
    assert document["kind"] == "features"
    assert document["images"] == document["views"] == 9


def test_views_are_not_called_contents(miv, shots, tmp_path):
    """With the default backbone, the file does not hold them."""
    model = tmp_path / "m.miv"
    how = ["--threshold", "3", "--no-check"]
    assert miv("fit", shots, "-o", model, *how).code == 0
    text = miv("info", model).out
    assert "9 images, with small pictures; augmented views used in training: 9" in text


def test_only_random_weights_have_a_seed(miv, features, tmp_path):
    for settings in (["--recipe", "experts"], ["--method", "ncc"]):
        model = tmp_path / "m.miv"
        assert miv("fit", features, "-o", model, "--no-check", *settings).code == 0
        assert "seed" not in miv("info", model).out
