"""`miv extract`."""

import json

from mivhead.features import FeatureTable


def test_extract_writes_labels_ids_and_views(miv, shots, tmp_path):
    path = tmp_path / "f.safetensors"
    document = json.loads(miv("extract", shots, "-o", path, "--json").out)
    table = FeatureTable.load(path)
    assert (document["images"], document["skipped"]) == (9, [])
    assert document["views"] == len(table.views) > 0
    assert document["features"] == str(path)
    assert table.labels == ("checks",) * 3 + ("rings",) * 3 + ("stripes",) * 3
    assert table.ids[0] == "checks/0.png"
    assert table.backbone["name"] == "efficientnet_lite0"


def test_extract_without_labels(miv, fails, shots, tmp_path):
    path = tmp_path / "f.safetensors"
    answer = miv("extract", shots / "rings", shots / "checks" / "0.png", "-o", path, "--no-labels")
    assert answer.out.startswith(f"Saved features of 4 images to {path} (")
    table = FeatureTable.load(path)
    assert (table.labels, table.views, len(table)) == (None, None, 4)
    assert "--no-labels" in fails("extract", shots, shots, "-o", path)
