"""`miv extract`."""

import json
import re

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
    assert re.fullmatch(rf"Saved features of 4 images to {path} \(.+ kB\) in .+ s\.\n", answer.out)
    table = FeatureTable.load(path)
    assert table.labels is None
    assert table.views is None
    assert len(table) == 4


def test_several_labelled_places(fails, shots, tmp_path):
    error = fails("extract", shots, shots, "-o", tmp_path / "f.safetensors")
    assert "--no-labels" in error


def test_json(miv, shots, tmp_path):
    path = tmp_path / "f.safetensors"
    document = json.loads(miv("extract", shots, "-o", path, "--threshold", "3", "--json").out)
    assert (document["images"], document["views"], document["skipped"]) == (9, 9, [])
    assert document["features"] == str(path)
