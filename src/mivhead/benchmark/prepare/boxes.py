"""Downloads of photographs with boxes around things: the boxes are cut out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mivhead.benchmark.prepare.items import Item, find_file
from mivhead.benchmark.prepare.splits import AIRCRAFT, THINGS
from mivhead.data.images import load_image
from mivhead.errors import InputError

ENLARGED = 1.2


def aircraft(raw: Path) -> Iterator[Item]:
    """FGVC-Aircraft: the test variants, cut to the box; that also cuts off the copyright line."""
    boxes_file = find_file(raw, "images_box.txt")
    boxes = dict(_pairs(boxes_file))
    for part in ("trainval", "test"):
        for name, variant in _pairs(boxes_file.with_name(f"images_variant_{part}.txt")):
            if variant in AIRCRAFT:
                try:
                    left, top, right, bottom = map(int, boxes[name].split())
                except (KeyError, ValueError):
                    raise InputError(f"{boxes_file} has no box of the image {name}.") from None
                photograph = load_image(boxes_file.with_name("images") / f"{name}.jpg")
                picture = photograph.crop((left, top, right, bottom))
                yield Item(variant, name, picture, photograph=True)


def mscoco(raw: Path) -> Iterator[Item]:
    """COCO, train2017: boxes of the test classes, enlarged 1.2 times about their centres."""
    path = find_file(raw, "instances_train2017.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        names = {each["id"]: each["name"] for each in document["categories"]}
        files = {each["id"]: Path(each["file_name"]).name for each in document["images"]}
        boxes: defaultdict[Any, list[tuple[Any, str, list[float]]]] = defaultdict(list)
        for each in document["annotations"]:
            label = names[each["category_id"]]
            if label in THINGS:
                boxes[each["image_id"]].append((each["id"], label, each["bbox"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not an annotation file of COCO: {error!r}.") from error
    folder = find_file(raw, files[next(iter(boxes))]).parent if boxes else raw
    for image in sorted(boxes):  # each photograph is decoded once, whatever its number of boxes
        photograph = load_image(folder / files[image])
        for number, label, box in boxes[image]:
            left, top, right, bottom = enlarge(box, photograph.size)
            if left < right and top < bottom:
                picture = photograph.crop((left, top, right, bottom))
                yield Item(label, f"{Path(files[image]).stem}_{number}", picture, photograph=True)


def enlarge(box: list[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Enlarge a box (left, top, width, height) about its centre, within an image of this size.

    COCO's whole numbers are the middles of pixels: half a pixel is taken off for Pillow's corners.

    >>> enlarge([10, 20, 10, 20], (100, 38))
    (8, 18, 21, 38)
    """
    edges = []
    for start, length, most in zip(box[:2], box[2:], size, strict=True):
        middle, half = start + length / 2, ENLARGED * length / 2
        first = max(round(middle - half - 0.5), 0)
        edges.append((first, min(round(middle + half - 0.5) + 1, most)))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first word of each line, and the rest."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        yield name, rest
