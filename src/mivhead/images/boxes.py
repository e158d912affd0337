"""Boxes in, boxes out: the objects that a detector found are the images, as crops of their photos.

`open_boxes` reads the JSON of MegaDetector, COCO JSON and CSV files; `BoxFile.images` gives their
crops as an `ImageSet`; `BoxFile.write` writes the same format again, with decisions in it. Such
documents come from anyone: what is read of them is checked, what is not read is kept as it is, and
a path that leaves the folder of the photos is refused.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from mivhead._util.files import write_text
from mivhead._util.schema import parse_json
from mivhead._util.tables import LABELS, PATHS, read_columns, read_csv, to_csv
from mivhead.errors import ImageError, InputError, reading
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet, ImageSource, normal

MARGIN = 0.1  # of a box's longer side, added on each side
CONFIDENCE = 0.2  # of a detector, below which its boxes are left out
MAX_BYTES = 512 * 2**20  # of a document
MAX_SIDE = 2.0**31  # pixels

Decided = list[tuple["Box", str, str, float]]  # box, decision, most probable class, probability


@dataclass(frozen=True)
class Box:
    """One box of a photo."""

    photo: str  # path of the photo inside its folder, with `/`
    number: int  # its place among the boxes of the photo
    # Left, top, width and height: in pixels, or as fractions of the photo's sides
    sides: tuple[float, float, float, float]
    relative: bool  # whether the sides are fractions
    label: str | None = None  # the class that the document gives it
    confidence: float | None = None  # the detector's
    place: tuple[int, ...] = ()  # where it is in the document, for `BoxFile.write`

    @property
    def id(self) -> str:
        """Its name: the photo and the number of the box."""
        return f"{self.photo}#{self.number}"


@dataclass(frozen=True)
class BoxFile:
    """The boxes of a document, and the document itself."""

    path: Path
    boxes: tuple[Box, ...]
    document: Any
    writer: Callable[[Path, Any, Decided], None]

    def images(
        self,
        folder: str | Path,
        *,
        labelled: bool = False,
        margin: float = MARGIN,
        confidence: float = CONFIDENCE,
        min_classes: int = 1,
    ) -> ImageSet:
        """Return the crops as images; nothing is decoded until one is loaded.

        The document's paths are relative to `folder`. With `labelled`, the boxes' classes are the
        labels. `margin` is how much of a box's longer side is added on each side, and boxes below
        the `confidence` are left out.
        """
        folder = Path(folder)
        boxes = [b for b in self.boxes if b.confidence is None or b.confidence >= confidence]
        if not boxes:
            raise InputError(f"{self.path} has no box of a confidence of at least {confidence:g}.")
        load = lru_cache(maxsize=2)(load_image)  # boxes of one photo follow each other
        sources = tuple(
            ImageSource(box.id, partial(_crop, box, folder, margin, load), f"{folder / box.photo}")
            for box in boxes
        )
        if not labelled:
            return ImageSet(sources)
        for box in boxes:
            if box.label is None:
                raise InputError(f"{self.path} gives no class to the box {box.id}.")
        images = ImageSet(sources, tuple(normal(str(box.label)) for box in boxes))
        if len(images.classes) < min_classes:
            raise InputError(f"{self.path} has fewer than {min_classes} classes.")
        return images

    def write(self, path: str | Path, decisions: Mapping[str, tuple[str, str, float]]) -> None:
        """Write the document with decisions, in the same format; other boxes stay as they are.

        By the id of a box there are the decision (a class, `unsure` or `none of these`), the most
        probable class, and its probability.
        """
        decided = [(box, *decisions[box.id]) for box in self.boxes if box.id in decisions]
        self.writer(Path(path), copy.deepcopy(self.document), decided)


def _crop(
    box: Box, folder: Path, margin: float, load: Callable[[Path], Image.Image]
) -> Image.Image:
    """Cut a box and a margin around it out of its photo."""
    photo = load(folder / box.photo)
    width, height = photo.size
    scale = (width, height, width, height) if box.relative else (1, 1, 1, 1)
    left, top, wide, high = (side * by for side, by in zip(box.sides, scale, strict=True))
    right, bottom = left + wide, top + high
    if min(right, width) - max(left, 0) <= 0.5 or min(bottom, height) - max(top, 0) <= 0.5:
        raise ImageError(f"The box {box.id} lies outside its image of {width} x {height} pixels.")
    extra = margin * max(wide, high)
    left, top = max(0, math.floor(left - extra)), max(0, math.floor(top - extra))
    right, bottom = math.ceil(right + extra), math.ceil(bottom + extra)
    return photo.crop((left, top, min(width, right), min(height, bottom)))


def open_boxes(path: str | Path, folder: str | Path) -> BoxFile:
    """Read a document of boxes of the photos in a folder.

    Parameters
    ----------
    path : str or Path
        A `.json` file of MegaDetector or COCO, or a `.csv` file with the columns `file`, `x`, `y`,
        `w`, `h` (pixels) and perhaps `label`.
    folder : str or Path
        The folder of the photos, which paths in the document are relative to.

    Returns
    -------
    BoxFile
        The boxes; its method `images` returns their crops.
    """
    path = Path(path)
    if not Path(folder).is_dir():
        raise InputError(f"With boxes, give the folder of the photos; {folder} is not one.")
    if not path.is_file():  # reading a pipe could block
        raise InputError(f"The boxes {path} are not a file.")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES // 2**20} MiB.")
    box_file = _read_csv(path) if path.suffix.lower() in (".csv", ".tsv") else _read_json(path)
    if not box_file.boxes:
        raise InputError(f"{path} has no boxes.")
    return box_file


def _number_boxes(boxes: Iterable[Box]) -> tuple[Box, ...]:
    counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return tuple(replace(box, number=next(counts[box.photo])) for box in boxes)


def _box(path: Path, photo: Any, sides: Any, label: Any, conf: Any, place: Any, rel: bool) -> Box:
    """Return a box that a document describes, checked."""
    text = str(photo).replace("\\", "/")
    parts = PurePosixPath(text).parts
    absolute = text.startswith("/") or text[1:2] == ":"
    if not isinstance(photo, str) or not parts or absolute or ".." in parts or "\0" in text:
        raise InputError(
            f"{path} names the photo {str(photo)[:200]!r}: write paths relative to the folder."
        )
    try:
        left, top, wide, high = (float(side) for side in sides)
        sizes = (left, top, wide, high)
        confidence = None if conf is None else float(conf)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{path}: a box of {text[:200]} does not consist of numbers.") from None
    largest = 2.0 if rel else MAX_SIDE
    fits = all(math.isfinite(side) and abs(side) <= largest for side in sizes)
    if not fits or wide <= 0 or high <= 0 or not 0 <= (confidence or 0) <= 1:
        raise InputError(f"{path}: the box {sizes} of {text[:200]} is not valid.")
    name = str(label).strip() if isinstance(label, str) else ""
    return Box("/".join(parts), 0, sizes, rel, name or None, confidence, place)


# JSON: MegaDetector's and COCO's. A document of another form raises what Python raises.


def _read_json(path: Path) -> BoxFile:
    wrong = (ValueError, TypeError, AttributeError, LookupError)
    with reading(f"{path}, which is neither MegaDetector's nor COCO's JSON,", *wrong):
        document = parse_json(path.read_bytes())
        if "detection_categories" in document:
            boxes = _number_boxes(_megadetector(document, path))
            return BoxFile(path, boxes, document, _write_megadetector)
        return BoxFile(path, _number_boxes(_coco(document, path)), document, _write_coco)


def _megadetector(document: dict[str, Any], path: Path) -> Iterator[Box]:
    names = document["detection_categories"]
    finer = document.get("classification_categories", {})
    for i, image in enumerate(document["images"]):
        for j, box in enumerate(image.get("detections") or ()):  # None: it was not readable
            label = names[box["category"]]
            if box.get("classifications"):
                label = finer[box["classifications"][0][0]]
            yield _box(path, image["file"], box["bbox"], label, box.get("conf"), (i, j), True)


def _write_megadetector(path: Path, document: Any, decided: Decided) -> None:
    names: dict[str, str] = document.setdefault("classification_categories", {})
    numbers = {name: number for number, name in names.items()}
    unused = (str(number) for number in itertools.count() if str(number) not in names)
    for box, decision, label, probability in decided:
        ranked = []
        for name in dict.fromkeys((decision, label)):
            if name not in numbers:
                numbers[name] = next(unused)
                names[numbers[name]] = name
            ranked.append([numbers[name], round(probability, 4)])
        i, j = box.place
        document["images"][i]["detections"][j]["classifications"] = ranked
    _write_json(path, document)


def _coco(document: dict[str, Any], path: Path) -> Iterator[Box]:
    photos = {image["id"]: image["file_name"] for image in document["images"]}
    names = {category["id"]: category.get("name") for category in document["categories"]}
    for i, box in enumerate(document["annotations"]):
        photo, label = photos[box["image_id"]], names[box["category_id"]]
        yield _box(path, photo, box["bbox"], label, box.get("score"), (i,), False)


def _write_coco(path: Path, document: Any, decided: Decided) -> None:
    ids = {category.get("name"): category["id"] for category in document["categories"]}
    largest = max((number for number in ids.values() if isinstance(number, int)), default=0)
    for box, decision, label, probability in decided:
        if decision not in ids:
            largest += 1
            ids[decision] = largest
            document["categories"].append({"id": largest, "name": decision})
        annotation = document["annotations"][box.place[0]]
        annotation["detected_category_id"] = annotation["category_id"]
        annotation |= {"category_id": ids[decision], "score": round(probability, 4), "label": label}
    _write_json(path, document)


def _write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, ensure_ascii=False), "backslashreplace")


# CSV.


def _read_csv(path: Path) -> BoxFile:
    content = path.read_bytes()
    rows = [row for _, row in read_csv(BytesIO(content), str(path))]
    columns = read_columns(BytesIO(content), str(path), PATHS, *"xywh", optional=LABELS)
    boxes = (
        _box(path, photo, sides, label, None, (i,), False)
        for i, (_, (photo, *sides, label)) in enumerate(columns, start=1)
    )
    return BoxFile(path, _number_boxes(boxes), rows, _write_csv)


def _write_csv(path: Path, rows: list[list[str]], decided: Decided) -> None:
    added = ["decision", "predicted", "probability"]
    by_row = {box.place[0]: [decision, label, p] for box, decision, label, p in decided}
    header, *body = rows
    cells = [
        [*row, *[None] * (len(header) - len(row)), *by_row.get(i, [None] * 3)]
        for i, row in enumerate(body, start=1)
    ]
    write_text(path, to_csv([*header, *added], cells))
