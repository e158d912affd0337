"""Boxes of detectors and annotators: read, cropped, and written back with decisions."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from mivhead.errors import ImageError, InputError
from mivhead.images.boxes import open_boxes, read_boxes

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


def yolo(folder: Path) -> Path:
    labels = folder / "labels"
    (labels / "night").mkdir(parents=True)
    (labels / "classes.txt").write_text("fox\nowl\n")
    lines: dict[str, list[str]] = {}
    for photo, box, label in BOXES:
        left, top, wide, high = shares(box)
        numbers = [left + wide / 2, top + high / 2, wide, high]
        text = f"{['fox', 'owl'].index(label)} {' '.join(map(str, numbers))}"
        lines.setdefault(photo.replace(".png", ".txt"), []).append(text)
    for name, found in lines.items():
        (labels / name).write_text("\n".join(found) + "\n")
    return labels


def voc(folder: Path) -> Path:
    xml = folder / "xml"
    (xml / "night").mkdir(parents=True)
    for photo in dict.fromkeys(photo for photo, _, _ in BOXES):
        root = ElementTree.Element("annotation")
        ElementTree.SubElement(root, "filename").text = Path(photo).name
        for _, (left, top, wide, high), label in (each for each in BOXES if each[0] == photo):
            found = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(found, "name").text = label
            box = ElementTree.SubElement(found, "bndbox")
            corners = {"xmin": left, "ymin": top, "xmax": left + wide, "ymax": top + high}
            for name, value in corners.items():
                ElementTree.SubElement(box, name).text = str(value)
        (xml / photo).with_suffix(".xml").write_bytes(ElementTree.tostring(root))
    return xml


FORMATS = [megadetector, coco, table, yolo, voc]


@pytest.mark.parametrize("make", FORMATS)
def test_crops_are_the_images(make: Any, photos: Path, tmp_path: Path) -> None:
    found = open_boxes(make(tmp_path), photos)
    images = found.images(photos, labelled=True, margin=0.0)
    assert images.labels == ("fox", "owl", "fox")
    assert images.ids == ("a.png#0", "a.png#1", "night/b.png#0")
    assert [images.load(i).size for i in range(3)] == [(12, 8), (30, 20), (30, 40)]
    red, green, _ = np.asarray(images.load(0))[0, 0]
    assert (red // 4, green // 4) == (6, 4)
    wider = found.images(photos, margin=0.25)
    assert wider.labels is None
    assert wider.load(0).size == (18, 14)  # 3 pixels on every side
    assert wider.load(1).size == (38, 28)  # at the edge of the photo, on two


@pytest.mark.parametrize("make", FORMATS)
def test_decisions_go_back_into_the_same_format(make: Any, photos: Path, tmp_path: Path) -> None:
    found = open_boxes(make(tmp_path), photos)
    decisions = {
        "a.png#0": ("owl", "owl", 0.75),
        "a.png#1": ("none of these", "fox", 0.5),
    }
    out = tmp_path / ("out" + found.path.suffix)
    found.write(out, decisions)
    again = open_boxes(out, photos)
    assert again.format == found.format
    assert [box.sides for box in again.boxes] == [box.sides for box in found.boxes]
    if found.format == "csv":
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert [row["decision"] for row in rows] == ["owl", "none of these", ""]
        assert [row["label"] for row in rows] == ["fox", "owl", "fox"]
    elif found.format == "megadetector":
        document = json.loads(out.read_text())
        names = document["classification_categories"]
        ranked = document["images"][0]["detections"][1]["classifications"]
        assert [names[number] for number, _ in ranked] == ["none of these", "fox"]
        assert document["info"]["detector"] == "md_v5a.0.0.pt"
    else:
        assert [box.label for box in again.boxes] == ["owl", "none of these", "fox"]
    assert read_boxes(found.path).boxes  # the original is unchanged


def test_other_boxes_of_yolo_keep_their_class_if_classes_have_no_names(tmp_path: Path) -> None:
    labels = yolo(tmp_path)
    (labels / "classes.txt").unlink()
    read_boxes(labels).write(tmp_path / "out", {"a#0": ("robin", "robin", 0.9)})
    assert [box.label for box in read_boxes(tmp_path / "out").boxes] == ["robin", "1", "0"]


@pytest.mark.parametrize("make", [megadetector, coco, voc])
def test_a_photo_that_is_listed_twice_has_distinct_boxes(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path)
    if make is voc:
        shutil.copy(path / "a.xml", path / "b.xml")
    else:
        document = json.loads(path.read_text())
        key = "file" if make is megadetector else "file_name"
        document["images"][1][key] = document["images"][0][key]
        path.write_text(json.dumps(document))
    ids = [box.id for box in read_boxes(path).boxes]
    assert ids[:3] == ["a.png#0", "a.png#1", "a.png#2"]
    assert len(set(ids)) == len(ids)


def test_boxes_that_a_detector_is_not_sure_of_are_left_out(photos: Path, tmp_path: Path) -> None:
    path = megadetector(tmp_path)
    document = json.loads(path.read_text())
    document["images"][0]["detections"][0]["conf"] = 0.15
    path.write_text(json.dumps(document))
    found = open_boxes(path, photos)
    assert found.images(photos).ids == ("a.png#1", "night/b.png#0")
    assert len(found.images(photos, confidence=0.1)) == 3
    with pytest.raises(InputError, match=r"no box of a confidence of at least 0\.99"):
        found.images(photos, confidence=0.99)


@pytest.mark.parametrize("name", ["../a.png", "/etc/passwd", "C:\\a.png", "x/../../a.png", "", 3])
def test_paths_outside_the_folder_are_refused(name: Any, tmp_path: Path) -> None:
    for make, place in ((megadetector, "file"), (coco, "file_name")):
        path = make(tmp_path)
        document = json.loads(path.read_text())
        document["images"][0][place] = name
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match="outside the folder"):
            read_boxes(path)


def changed(path: Path, change: Any) -> Path:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (coco, lambda d: d.update(annotations=[]), "has no boxes"),
        (megadetector, lambda d: d.update(images=[]), "has no boxes"),
        (coco, lambda d: d.update(categories=[]), "category id 7, which has no name|'7'"),
        (
            megadetector,
            lambda d: d["images"][0]["detections"][0].update(category="9"),
            "detection category '9', which has no name",
        ),
        (
            megadetector,
            lambda d: d["images"][0]["detections"][0].update(category=["1"]),
            "has no name",
        ),
        (
            megadetector,
            lambda d: d["images"][0]["detections"][0].update(bbox=[0, 0, 1]),
            "a box needs four numbers",
        ),
        (
            megadetector,
            lambda d: d["images"][0]["detections"][0].update(bbox=[100, 0, 50, 1]),
            "shares of the photo",
        ),
        (coco, lambda d: d["annotations"][0].update(bbox=[0, 0, 0, 5]), "is not valid"),
        (coco, lambda d: d["annotations"][0].update(bbox=[0, 0, float("nan"), 5]), "is not valid"),
        (coco, lambda d: d["annotations"][0].update(image_id=99), "image id 99, which it does not"),
        (coco, lambda d: d["annotations"][0].update(category_id=[1]), "neither a number nor"),
        (coco, lambda d: d.update(images={}), "needs a list of objects 'images'"),
        (coco, lambda d: d.update(annotations=None), "needs a list of objects 'annotations'"),
        (coco, lambda d: d["annotations"][0].update(score=3), "confidence must be from 0 to 1"),
    ],
)
def test_bad_documents(make: Any, change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_boxes(changed(make(tmp_path), change))


def test_a_box_outside_its_image(photos: Path, tmp_path: Path) -> None:
    path = table(tmp_path)
    path.write_text(path.read_text() + "\na.png,100,100,5,5,fox\na.png,-5,-5,10,10,fox")
    images = open_boxes(path, photos).images(photos, margin=0.0)
    with pytest.raises(ImageError, match=r"The box a.png#2 \(left 100, .* outside its image of 60"):
        images.load(3)
    assert images.load(4).size == (5, 5)  # what lies inside


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"[1, 2", "not valid JSON"),
        ("x.json", b"[]", "neither MegaDetector's output"),
        ("x.csv", b"file,left\na.png,1", "columns x, y, w, h"),
        ("x.csv", b"file,x,y,w,h\na.png,1,2", "line 2: expected 5 cells"),
        ("x.csv", b"file,x,y,w,h\n", "has no boxes"),
        ("x.xml", b"<a><b></a>", "not valid XML"),
        ("x.xml", b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "has a DOCTYPE"),
        (
            "x.xml",
            '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16"),
            "has a DOCTYPE",
        ),
        ("x.xml", 1000 * b"<a>" + 1000 * b"</a>", "nested more than 100 elements deep"),
        ("x.xml", b'<?xml version="1.0" encoding="rot13"?><a/>', "not valid XML"),
        ("x.pdf", b"", "has no boxes that can be read"),
    ],
)
def test_bad_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_boxes(tmp_path / name)


def test_bad_folders(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not exist"):
        read_boxes(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="has no boxes that can be read"):
        read_boxes(photos)
    labels = yolo(tmp_path)
    (labels / "c.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(InputError, match="has no photo c, of which"):
        open_boxes(labels, photos)
    (labels / "c.txt").write_text("5 0.5 0.5 0.1 0.1\n")
    with pytest.raises(InputError, match="class '5', which has no name"):
        read_boxes(labels)
    with pytest.raises(InputError, match="give the folder of the photos"):
        open_boxes(labels, tmp_path / "nowhere")


def test_a_category_without_a_name_that_no_box_has(tmp_path: Path) -> None:
    document = {
        "images": [{"id": 1, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 1, "category_id": 2, "bbox": [0, 0, 4, 4]}],
        "categories": [{"id": 1}, {"id": 2, "name": "animal"}, {"id": 3, "name": []}],
        "note": "\ud800",  # half a character, which UTF-8 cannot encode
    }
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps(document))
    read_boxes(path).write(tmp_path / "out.json", {"1.jpg#0": ("robin", "robin", 0.9)})
    (found,) = read_boxes(tmp_path / "out.json").boxes
    assert found.label == "robin"


@pytest.mark.parametrize("make", [yolo, voc])
def test_a_class_with_line_breaks_and_control_characters(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path)
    found = read_boxes(path)
    found.write(tmp_path / "out", {found.boxes[0].id: ("a\nb\x1b", "a\nb\x1b", 0.9)})
    assert [box.label for box in read_boxes(tmp_path / "out").boxes] == ["a b?", "owl", "fox"]
