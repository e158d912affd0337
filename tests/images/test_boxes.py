"""Boxes of detectors and annotators: read, cropped, and written back with decisions."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead.errors import ImageError, InputError
from mivhead.images.boxes import open_boxes

WIDTH, HEIGHT = 60, 40


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two photos whose colours tell where a pixel was."""
    folder = tmp_path / "photos"
    (folder / "night").mkdir(parents=True)
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    pixels = np.stack([4 * x, 4 * y, 0 * x], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    Image.fromarray(pixels[:, ::-1].copy()).save(folder / "night" / "b.png")
    return folder


# The same three boxes in every format: two of a.png, one of night/b.png.
BOXES = [
    ("a.png", (6, 4, 12, 8), "fox"),
    ("a.png", (30, 20, 30, 20), "owl"),
    ("night/b.png", (0, 0, 30, 40), "fox"),
]


def shares(box: tuple[int, int, int, int]) -> list[float]:
    left, top, wide, high = box
    return [left / WIDTH, top / HEIGHT, wide / WIDTH, high / HEIGHT]


def megadetector(folder: Path) -> Path:
    images: dict[str, Any] = {}
    for photo, box, label in BOXES:
        found = images.setdefault(photo, {"file": photo, "detections": []})
        number = "0" if label == "fox" else "1"
        found["detections"].append(
            {"category": "1", "conf": 0.9, "bbox": shares(box), "classifications": [[number, 0.8]]}
        )
    document = {
        "info": {"format_version": "1.4", "detector": "md_v5a.0.0.pt"},
        "detection_categories": {"1": "animal", "2": "person"},
        "classification_categories": {"0": "fox", "1": "owl"},
        "images": [*images.values(), {"file": "broken.jpg", "failure": "x", "detections": None}],
    }
    (folder / "md.json").write_text(json.dumps(document))
    return folder / "md.json"


def coco(folder: Path) -> Path:
    photos = list(dict.fromkeys(photo for photo, _, _ in BOXES))
    names = ["fox", "owl"]
    document = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(photos)],
        "categories": [{"id": 7 + i, "name": name} for i, name in enumerate(names)],
        "annotations": [
            {
                "id": i,
                "image_id": photos.index(photo),
                "category_id": 7 + names.index(label),
                "bbox": list(box),
                "iscrowd": 0,
            }
            for i, (photo, box, label) in enumerate(BOXES)
        ],
    }
    (folder / "coco.json").write_text(json.dumps(document))
    return folder / "coco.json"


def table(folder: Path) -> Path:
    rows = [f"{photo},{','.join(map(str, box))},{label}" for photo, box, label in BOXES]
    (folder / "boxes.csv").write_text("\n".join(["file,x,y,w,h,label", *rows]))
    return folder / "boxes.csv"


FORMATS = [megadetector, coco, table]


def changed(path: Path, change: Any) -> Path:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize("make", FORMATS)
def test_crops_are_the_images(make: Any, photos: Path, tmp_path: Path) -> None:
    boxes = open_boxes(make(tmp_path), photos)
    images = boxes.images(photos, labelled=True, margin=0.0)
    assert images.labels == ("fox", "owl", "fox")
    assert images.ids == ("a.png#0", "a.png#1", "night/b.png#0")
    assert [images.load(i).size for i in range(3)] == [(12, 8), (30, 20), (30, 40)]
    red, green, _ = np.asarray(images.load(0))[0, 0]
    assert (red // 4, green // 4) == (6, 4)
    wider = boxes.images(photos, margin=0.25)
    assert wider.labels is None
    assert wider.load(0).size == (18, 14)  # 3 pixels on every side
    assert wider.load(1).size == (38, 28)  # at the edge of the photo, on two


@pytest.mark.parametrize("make", FORMATS)
def test_decisions_go_back_into_the_same_format(make: Any, photos: Path, tmp_path: Path) -> None:
    boxes = open_boxes(make(tmp_path), photos)
    decisions = {"a.png#0": ("owl", "owl", 0.75), "a.png#1": ("none of these", "fox", 0.5)}
    out = tmp_path / ("out" + boxes.path.suffix)
    boxes.write(out, decisions)
    again = open_boxes(out, photos)
    assert [box.sides for box in again.boxes] == [box.sides for box in boxes.boxes]
    if make is table:
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert [row["decision"] for row in rows] == ["owl", "none of these", ""]
        assert [row["label"] for row in rows] == ["fox", "owl", "fox"]
    elif make is megadetector:
        document = json.loads(out.read_text())
        names = document["classification_categories"]
        ranked = document["images"][0]["detections"][1]["classifications"]
        assert [names[number] for number, _ in ranked] == ["none of these", "fox"]
        assert document["info"]["detector"] == "md_v5a.0.0.pt"
        assert again.boxes[2].label == "fox"  # which nobody decided on
    else:
        assert [box.label for box in again.boxes] == ["owl", "none of these", "fox"]
    assert open_boxes(boxes.path, photos).boxes == boxes.boxes  # the original is unchanged


@pytest.mark.parametrize(("make", "key"), [(megadetector, "file"), (coco, "file_name")])
def test_a_photo_that_is_listed_twice_has_distinct_boxes(
    make: Any, key: str, photos: Path, tmp_path: Path
) -> None:
    path = changed(make(tmp_path), lambda d: d["images"][1].update({key: "a.png"}))
    assert [box.id for box in open_boxes(path, photos).boxes] == ["a.png#0", "a.png#1", "a.png#2"]


def test_boxes_that_a_detector_is_not_sure_of_are_left_out(photos: Path, tmp_path: Path) -> None:
    path = changed(
        megadetector(tmp_path), lambda d: d["images"][0]["detections"][0].update(conf=0.15)
    )
    boxes = open_boxes(path, photos)
    assert boxes.images(photos).ids == ("a.png#1", "night/b.png#0")
    assert len(boxes.images(photos, confidence=0.1)) == 3
    with pytest.raises(InputError, match="confidence"):
        boxes.images(photos, confidence=0.99)


@pytest.mark.parametrize("name", ["../a.png", "/etc/passwd", "C:\\a.png", "x/../../a.png", "", 3])
def test_paths_outside_the_folder_are_refused(name: Any, photos: Path, tmp_path: Path) -> None:
    for make, key in ((megadetector, "file"), (coco, "file_name")):
        path = changed(make(tmp_path), partial(rename_first, key=key, name=name))
        with pytest.raises(InputError, match="relative"):
            open_boxes(path, photos)


def rename_first(document: Any, key: str, name: Any) -> None:
    document["images"][0][key] = name


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (coco, lambda d: d.update(annotations=[])),
        (coco, lambda d: d.update(categories=[])),
        (coco, lambda d: d["annotations"][0].update(bbox=[0, 0, 0, 5])),
        (coco, lambda d: d["annotations"][0].update(bbox=[0, 0, float("nan"), 5])),
        (coco, lambda d: d["annotations"][0].update(image_id=99)),
        (coco, lambda d: d["annotations"][0].update(category_id=[1])),
        (coco, lambda d: d.update(images={})),
        (coco, lambda d: d.update(annotations=None)),
        (coco, lambda d: d["annotations"][0].update(score=3)),
        (megadetector, lambda d: d["images"][0]["detections"][0].update(category="9")),
        (megadetector, lambda d: d["images"][0]["detections"][0].update(bbox=[0, 0, 1])),
        (megadetector, lambda d: d["images"][0]["detections"][0].update(bbox=[100, 0, 50, 1])),
    ],
)
def test_bad_documents(make: Any, change: Any, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        open_boxes(changed(make(tmp_path), change), photos)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{"),
        ("a.json", b"[" * 10**5),
        ("a.json", b"[]"),
        ("a.csv", b"file,x,y\n"),
        ("a.csv", b"file,x,y,w,h\na.png,1,2,3\n"),
        ("a.csv", b"file,x,y,w,h\na.png,1,2,3,many\n"),
        ("a.xml", b"<annotation/>"),
    ],
)
def test_bad_files(name: str, content: bytes, photos: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError):
        open_boxes(tmp_path / name, photos)


def test_a_row_that_is_shorter_than_the_header(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("file,x,y,w,h,label\na.png,6,4,12,8\n")
    boxes = open_boxes(tmp_path / "a.csv", photos)
    boxes.write(tmp_path / "out.csv", {"a.png#0": ("fox", "fox", 0.75)})
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert (row["label"], row["decision"], row["probability"]) == ("", "fox", "0.75")


def test_a_box_outside_its_image(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("file,x,y,w,h\na.png,100,100,5,5\n")
    with pytest.raises(ImageError, match="outside"):
        open_boxes(tmp_path / "a.csv", photos).images(photos).load(0)
