"""`--boxes` of fit, predict, evaluate and jobs."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mivhead import batch
from tests.helpers.extras import needs


@pytest.fixture
def photos(tmp_path):
    """Photos with a red and a blue thing each, and boxes of them in COCO's format."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    images, annotations = [], []
    for i in range(6):
        pixels = rng.integers(100, 130, (80, 120, 3), dtype=np.uint8)
        for label, left in ((0, 10), (1, 70)):
            pixels[20:60, left : left + 40] = 0
            pixels[20:60, left : left + 40, 2 * label] = rng.integers(180, 255, (40, 40))
            box = [left, 20, 40, 40]
            annotations.append(
                {"id": len(annotations), "image_id": i, "category_id": label, "bbox": box}
            )
        Image.fromarray(pixels).save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png"})
    categories = [{"id": 0, "name": "red"}, {"id": 1, "name": "blue"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "boxes.json").write_text(json.dumps(document))
    return folder


def test_from_boxes_to_boxes(miv, fails, photos, tmp_path):
    boxes, model = str(tmp_path / "boxes.json"), str(tmp_path / "m.miv")
    answer = miv("fit", str(photos), "-o", model, "--boxes", boxes, "--no-check")
    assert answer.code == 0
    assert "2 classes from 12 images" in answer.out
    out = tmp_path / "out.json"
    answer = miv("predict", model, str(photos), "--boxes", boxes, "-o", str(out))
    assert answer.code == 0
    document = json.loads(out.read_text())
    names = {each["id"]: each["name"] for each in document["categories"]}
    found = [(each["detected_category_id"], each["label"]) for each in document["annotations"]]
    assert found == [(0, "red"), (1, "blue")] * 6
    assert set(names.values()) <= {"red", "blue", "unsure", "none of these"}
    answer = miv("predict", model, str(photos), "--boxes", boxes, "--json")
    predictions = json.loads(answer.out)["predictions"]
    assert [each["file"] for each in predictions[:3]] == ["0.png#0", "0.png#1", "1.png#0"]
    answer = miv("evaluate", model, str(photos), "--boxes", boxes, "--include-shots", "--json")
    assert json.loads(answer.out)["images"] == 12
    for copied in (12, 0):  # the second time, they are there
        answer = miv("predict", model, str(photos), "--boxes", boxes, "--sort-into", tmp_path / "s")
        assert f"Copied {copied} images" in answer.err
    crops = sorted((tmp_path / "s").glob("*/*"))
    assert len(crops) == 12
    assert {"0.png#0.png", "5.png#1.png"} <= {crop.name for crop in crops}
    with Image.open(crops[0]) as crop:
        assert crop.width < 120  # of the photo
    for command in (["fit", photos, "-o", model], ["evaluate", model, photos]):
        assert "not for --boxes" in fails(*command, "--boxes", boxes, "--label", "name")
    assert "give one folder" in fails("predict", model, "a", "b", "--boxes", boxes)
    assert "give the folder of the photos" in fails("predict", model, model, "--boxes", boxes)
    document = json.loads((tmp_path / "boxes.json").read_text())
    document["annotations"][0]["bbox"] = [500, 500, 5, 5]
    (tmp_path / "boxes.json").write_text(json.dumps(document))
    assert "lies outside its image" in fails("predict", model, str(photos), "--boxes", boxes)
    answer = miv("predict", model, str(photos), "--boxes", boxes, "--json", "--skip-bad")
    assert [each["id"] for each in json.loads(answer.out)["skipped"]] == ["0.png#0"]


@needs("pyarrow")
def test_a_job_over_boxes(miv, fails, photos, tmp_path):
    boxes, model = str(tmp_path / "boxes.json"), str(tmp_path / "m.miv")
    assert miv("fit", str(photos), "-o", model, "--boxes", boxes, "--no-check").code == 0
    out = str(tmp_path / "out.csv")
    what = ("predict", model, str(photos), "--boxes", boxes, "--job", out, "--part-rows", "5")
    assert miv(*what).code == 0
    rows = list(csv.DictReader(Path(out).read_text().splitlines()))
    assert len(rows) == 12
    single = json.loads(miv("predict", model, str(photos), "--boxes", boxes, "--json").out)
    assert [row["file"] for row in rows] == [each["file"] for each in single["predictions"]]
    expected = [each["probability"] for each in single["predictions"]]
    np.testing.assert_allclose([float(row["probability"]) for row in rows], expected, atol=1e-4)
    result = batch.predict(model, photos, tmp_path / "again.csv", boxes=boxes, verbose=False)
    assert result.rows == 12
    assert "give one folder" in fails(*what[:2], "a", "b", *what[3:5], "--job", out + ".csv")


@needs("pyarrow")
@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode elsewhere")
def test_a_job_over_boxes_of_a_photo_whose_name_is_not_unicode(miv, photos, tmp_path):
    model, boxes = str(tmp_path / "m.miv"), str(tmp_path / "boxes.json")
    assert miv("fit", str(photos), "-o", model, "--boxes", boxes, "--no-check").code == 0
    name = os.fsdecode(b"caf\xe9")
    shutil.copy(sorted(photos.rglob("*.png"))[0], photos / f"{name}.png")
    (tmp_path / "yolo").mkdir()
    (tmp_path / "yolo" / f"{name}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    what = ("--boxes", str(tmp_path / "yolo"), "--job", str(tmp_path / "out.csv"))
    assert miv("predict", model, str(photos), *what).code == 0
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert "caf" in row["file"]
    assert not row["error"]
