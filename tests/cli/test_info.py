"""`miv info`."""

import json
import re

import mivhead


def test_info_of_a_model(miv, fails, model, features):
    text = miv("info", model).out
    assert "a model of 3 classes and the features of their 9 images" in text
    assert re.search(r"^rings +3$", text, re.M)
    assert "taps" not in text
    assert re.search(r"^taps +\w", miv("info", model, "--details").out, re.M)
    document = json.loads(miv("info", model, "--json").out)
    assert document["kind"] == "model"
    assert document["classes"] == {"checks": 3, "rings": 3, "stripes": 3}
    assert document["backbone"]["name"] == "efficientnet_lite0"
    assert document["bytes"] == model.stat().st_size
    assert "does not list its shots" in fails("info", features, "--shots")


def test_info_of_features(miv, features):
    assert "features of 9 images and 9 views, 3 classes" in miv("info", features).out
    document = json.loads(miv("info", features, "--json").out)
    assert document["kind"] == "features"
    assert document["images"] == document["views"] == 9


def test_info_of_the_installation(miv, tmp_path, monkeypatch):
    monkeypatch.setenv("MIV_CACHE", str(tmp_path))
    document = json.loads(miv("info", "--json").out)
    assert document["mivhead"] == mivhead.__version__
    assert document["cache"]["entries"] == 0
    assert str(tmp_path) in miv("info").out
    monkeypatch.setenv("MIV_CACHE", "off")
    assert "disabled" in miv("info").out
