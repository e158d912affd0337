"""`miv extract` and `miv info`, and where output may go."""

import json
import os
import re

import pytest

from mivhead.features import FeatureTable


def test_extract_writes_labels_ids_and_views(features):
    table = FeatureTable.load(features)
    assert table.labels == ("checks",) * 3 + ("rings",) * 3 + ("stripes",) * 3
    assert table.ids[0] == "checks/0.png"
    assert table.view_of.tolist() == list(range(9))  # T = 3 and 3 shots: one view each
    assert table.backbone["name"] == "efficientnet_lite0"


def test_extract_without_labels(miv, shots, tmp_path):
    path = tmp_path / "f.safetensors"
    answer = miv("extract", shots / "rings", shots / "checks" / "0.png", "-o", path, "--unlabelled")
    assert re.fullmatch(rf"Wrote features of 4 images to {path} \(.+ kB\) in .+ s\.\n", answer.out)
    table = FeatureTable.load(path)
    assert table.labels is None
    assert table.views is None
    assert len(table) == 4


def test_several_labelled_places(fails, shots, tmp_path):
    error = fails("extract", shots, shots, "-o", tmp_path / "f.safetensors")
    assert "--unlabelled" in error


def test_info_of_a_model(miv, model):
    text = miv("info", model).out
    assert "a model of 3 classes and the features of their 9 images" in text
    assert re.search(r"^rings +3$", text, re.M)
    document = json.loads(miv("info", model, "--json").out)
    assert document["kind"] == "model"
    assert document["classes"] == {"checks": 3, "rings": 3, "stripes": 3}
    assert document["backbone"]["name"] == "efficientnet_lite0"
    assert document["bytes"] == model.stat().st_size


def test_info_of_features(miv, features):
    assert "features of 9 images and 9 views, 3 classes" in miv("info", features).out
    document = json.loads(miv("info", features, "--json").out)
    assert document["kind"] == "features"
    assert document["images"] == document["views"] == 9


@pytest.mark.parametrize("command", ["fit", "extract"])
def test_output_is_checked_before_the_work(command, fails, shots, tmp_path, monkeypatch):
    monkeypatch.setattr("mivhead.fewshot.extract_table", None)  # would be an ugly error
    foreign = tmp_path / "photo.jpg"
    foreign.write_bytes(b"precious")
    assert "does not exist" in fails(command, shots, "-o", tmp_path / "no" / "m.miv")
    assert "is a folder" in fails(command, shots, "-o", tmp_path)
    assert "is not a regular file" in fails(command, shots, "-o", os.devnull)
    assert "left as it is" in fails(command, shots, "-o", foreign)
    assert foreign.read_bytes() == b"precious"


def test_a_model_does_not_replace_features(fails, features, tmp_path):
    before = features.read_bytes()
    assert "left as it is" in fails("fit", features, "-o", features)
    assert features.read_bytes() == before


def test_a_folder_that_is_not_writable(fails, shots, tmp_path, monkeypatch):
    def refuse(**settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # tests may run as root
    error = fails("fit", shots, "-o", tmp_path / "m.miv")
    assert f"Cannot write into {tmp_path}: Permission denied." in error
