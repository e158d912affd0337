"""Boxes in, boxes out: the objects that a detector found are the images, as crops of their photos.

`read_boxes` reads the JSON of MegaDetector, COCO JSON, YOLO's text files, Pascal VOC's XML files
and CSV files; `BoxFile.images` gives their crops as an `ImageSet`; `BoxFile.write` writes the same
format again, with decisions in it. Such documents come from anyone: their size is limited, what is
read of them is checked, what is not read is kept as it is, and a path that leaves the folder of the
photos is refused.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from PIL import Image

from mivhead._util.files import replacing
from mivhead._util.schema import parse_json
from mivhead._util.text import one_line
from mivhead.errors import ImageError, InputError, reading
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet, ImageSource, is_image_name, normal

MARGIN = 0.1  # of a box's longer side, added on each side
CONFIDENCE = 0.2  # of a detector, below which its boxes are left out
MAX_BYTES = 512 * 2**20  # of a document
MAX_FILES = 1_000_000  # of YOLO or Pascal VOC
MAX_BOXES = 10_000_000
MAX_SIDE = 2.0**31  # pixels
MAX_DEPTH = 100  # of elements of XML
PATH_COLUMNS = ("path", "file", "image", "filename", "file_name")
SIDES = ("x", "y", "w", "h")  # columns: left, top, width and height in pixels
LABEL_COLUMNS = ("label", "class")
SEPARATOR = "#"  # between a photo and the number of its box, in ids
FORMATS = "MegaDetector's or COCO's .json, a .csv, or a folder of YOLO's .txt or Pascal VOC's .xml"


@dataclass(frozen=True)
class Box:
    """One box of a photo."""

    photo: str  # path of the photo inside its folder, with `/`
    number: int  # its place among the boxes of the photo
    # Left, top, width and height: in pixels, or as shares of the photo's sides
    sides: tuple[float, float, float, float]
    relative: bool  # whether the sides are shares
    label: str | None  # the class that the document gives it
    confidence: float | None  # the detector's
    place: tuple[Any, ...]  # where it is in the document, for `BoxFile.write`

    @property
    def id(self) -> str:
        """Its name: the photo and the number of the box."""
        return f"{self.photo}{SEPARATOR}{self.number}"


@dataclass(frozen=True)
class BoxFile:
    """The boxes of a document, and the document itself."""

    path: Path
    format: str
    boxes: tuple[Box, ...]
    document: Any

    def confident(self, least: float = CONFIDENCE) -> tuple[Box, ...]:
        """Return the boxes that the detector is sure enough of, and those without a confidence."""
        kept = tuple(b for b in self.boxes if b.confidence is None or b.confidence >= least)
        if not kept:
            raise InputError(
                f"{self.path} has no box of a confidence of at least {least:g}: lower it with "
                "--box-confidence."
            )
        return kept

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

        Parameters
        ----------
        folder : str or Path
            The folder that the document's paths are relative to.
        labelled : bool, default=False
            Whether the boxes' classes are the labels; then every box must have one.
        margin : float, default=0.1
            How much of a box's longer side is added on each side.
        confidence : float, default=0.2
            Boxes that the detector is less sure of are left out.
        min_classes : int, default=1
            The minimum number of classes, if they are labelled.

        Returns
        -------
        ImageSet
        """
        folder = Path(folder)
        if not 0 <= margin <= 10:
            raise InputError(f"The margin must be from 0 to 10, got {margin}.")
        boxes = self.confident(confidence)
        load = lru_cache(maxsize=2)(load_image)  # boxes of one photo follow each other
        sources = tuple(
            ImageSource(box.id, partial(crop, box, folder, margin, load), f"{folder / box.photo}")
            for box in boxes
        )
        if not labelled:
            return ImageSet(sources)
        for box in boxes:
            if box.label is None:
                raise InputError(f"{self.path} gives no class to the box {box.id}.")
        images = ImageSet(sources, tuple(normal(str(box.label)) for box in boxes))
        if len(images.classes) < min_classes:
            raise InputError(
                f"{self.path} has only the class {', '.join(images.classes)}; at least "
                f"{min_classes} are required."
            )
        return images

    def write(self, path: str | Path, decisions: Mapping[str, tuple[str, str, float]]) -> None:
        """Write the document with decisions, in the same format.

        The path is a file or, for YOLO and Pascal VOC, a folder. By the id of a box there are the
        decision (a class, `unsure` or `none of these`), the most probable class, and its
        probability. Other boxes stay as they are.
        """
        path = Path(path)
        decided = [(box, *decisions[box.id]) for box in self.boxes if box.id in decisions]
        writer: Callable[[Path, Any, list[Any]], None] = _WRITERS[self.format]
        writer(path, copy.deepcopy(self.document), decided)


def crop(
    box: Box, folder: Path, margin: float, load: Callable[[Path], Image.Image] = load_image
) -> Image.Image:
    """Cut a box and a margin around it out of its photo."""
    photo = load(folder / box.photo)
    width, height = photo.size
    scale = (width, height, width, height) if box.relative else (1, 1, 1, 1)
    left, top, wide, high = (side * by for side, by in zip(box.sides, scale, strict=True))
    across = min(left + wide, width) - max(left, 0)
    down = min(top + high, height) - max(top, 0)
    if min(across, down) <= 0.5:  # pixels
        raise ImageError(
            f"The box {box.id} (left {left:g}, top {top:g}, width {wide:g}, height {high:g}) lies "
            f"outside its image of {width} x {height} pixels."
        )
    extra = margin * max(wide, high)
    edges = (left - extra, top - extra, left + wide + extra, top + high + extra)
    return photo.crop(
        (
            max(0, math.floor(edges[0])),
            max(0, math.floor(edges[1])),
            min(width, math.ceil(edges[2])),
            min(height, math.ceil(edges[3])),
        )
    )


def read_boxes(path: str | Path) -> BoxFile:
    """Read a document of boxes, whose format is found by its content.

    Parameters
    ----------
    path : str or Path
        A `.json` file of MegaDetector or COCO, a `.csv` file with the columns `file`, `x`, `y`,
        `w`, `h` (pixels) and perhaps `label`, or a folder of YOLO's `.txt` files (and their
        `classes.txt`) or of Pascal VOC's `.xml` files.

    Returns
    -------
    BoxFile

    Raises
    ------
    InputError
        If it is none of these, is not valid or has no boxes.
    """
    path = Path(path)
    if path.is_dir():
        found = _read_folder(path)
    elif not path.exists():
        raise InputError(f"The boxes {path} do not exist.")
    elif path.suffix.lower() == ".json":
        found = _read_json(path)
    elif path.suffix.lower() in (".csv", ".tsv"):
        found = _read_csv(path)
    elif path.suffix.lower() == ".xml":
        found = _read_voc(path, [path])
    else:
        raise InputError(f"{path} has no boxes that can be read: give {FORMATS} files.")
    if not found.boxes:
        raise InputError(f"{path} has no boxes.")
    if len(found.boxes) > MAX_BOXES:
        raise InputError(f"{path} has more than {MAX_BOXES:,} boxes.")
    return found


def open_boxes(path: str | Path, folder: str | Path) -> BoxFile:
    """Read a document of boxes of the photos in a folder.

    Parameters
    ----------
    path : str or Path
        The document: MegaDetector or COCO JSON, a folder of YOLO or Pascal VOC files, or a CSV.
    folder : str or Path
        The folder of the photos, which paths in the document are relative to.

    Returns
    -------
    BoxFile
        The boxes; its method `images` returns their crops.
    """
    if not Path(folder).is_dir():
        raise InputError(f"With boxes, give the folder of the photos; {folder} is not one.")
    return with_suffixes(read_boxes(path), Path(folder))


def _content(path: Path) -> bytes:
    with reading(path):
        if not path.is_file():
            raise InputError(f"{path} is not a regular file.")  # reading a pipe could block
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES // 2**20} MiB.")
        return path.read_bytes()


def _text(path: Path) -> str:
    try:
        return _content(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not encoded in UTF-8.") from None


def _photo(name: Any, path: Path) -> str:
    """Return the path of a photo inside its folder; raise an error if it leaves the folder."""
    text = str(name).replace("\\", "/")
    parts = PurePosixPath(text).parts
    absolute = text.startswith("/") or (len(text) > 1 and text[1] == ":")
    if not isinstance(name, str) or not parts or absolute or ".." in parts or "\0" in text:
        hint = ": write paths relative to the folder of the photos" if absolute else ""
        raise InputError(f"{path} names the photo {str(name)[:200]!r}, outside the folder{hint}.")
    return "/".join(parts)


def _sides(values: Any, where: str) -> tuple[float, float, float, float]:
    """Return left, top, width and height, checked."""
    try:
        left, top, wide, high = (float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: a box needs four numbers, got {str(values)[:80]}.") from None
    numbers = (left, top, wide, high)
    if not all(math.isfinite(n) and abs(n) < MAX_SIDE for n in numbers) or wide <= 0 or high <= 0:
        raise InputError(f"{where}: the box {[float(f'{n:g}') for n in numbers]} is not valid.")
    return numbers


def _share(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{where}: a confidence must be from 0 to 1, got {str(value)[:40]}.")
    return float(value)


def _listed(document: Any, key: str, path: Path) -> list[dict[str, Any]]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InputError(f"{path} needs a list of objects {key!r}.")
    return found


def _named(names: Any, key: Any, path: Path, what: str) -> str:
    """Return the name of a category."""
    found = names.get(key) if isinstance(names, dict) and isinstance(key, int | str) else None
    if not isinstance(found, str) or not found:
        raise InputError(f"{path} has a box of the {what} {str(key)[:40]!r}, which has no name.")
    return found


# MegaDetector and COCO.


def _read_json(path: Path) -> BoxFile:
    try:
        document = parse_json(_content(path))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not valid JSON.") from error
    if isinstance(document, dict) and "detection_categories" in document:
        return BoxFile(path, "megadetector", tuple(_megadetector(document, path)), document)
    if isinstance(document, dict) and "annotations" in document:
        return BoxFile(path, "coco", tuple(_coco(document, path)), document)
    raise InputError(
        f"{path} is neither MegaDetector's output (detection_categories, images) nor COCO's "
        "(images, annotations, categories)."
    )


def _megadetector(document: dict[str, Any], path: Path) -> Iterable[Box]:
    names = document["detection_categories"]
    finer = document.get("classification_categories")
    counts: Counter[str] = Counter()
    for i, image in enumerate(_listed(document, "images", path)):
        photo = _photo(image.get("file"), path)
        detections = image.get("detections") or []  # None where a photo could not be read
        if not isinstance(detections, list) or not all(isinstance(d, dict) for d in detections):
            raise InputError(f"{path}: the detections of {photo} are not a list of objects.")
        for j, each in enumerate(detections):
            where = f"{path}, {photo}"
            sides = _sides(each.get("bbox"), where)
            if any(abs(side) > 2 for side in sides):
                raise InputError(f"{where}: MegaDetector's boxes are shares of the photo.")
            label = _named(names, each.get("category"), path, "detection category")
            ranked = each.get("classifications")
            if isinstance(ranked, list) and ranked:
                first = ranked[0][0] if isinstance(ranked[0], list) and ranked[0] else None
                label = _named(finer, first, path, "classification category")
            confidence = _share(each.get("conf"), where)
            yield Box(photo, counts[photo], sides, True, label, confidence, (i, j))
            counts[photo] += 1


def _write_megadetector(path: Path, document: Any, decided: list[Any]) -> None:
    categories: dict[str, str] = {}
    for _, decision, label, _ in decided:
        for name in (decision, label):
            categories.setdefault(name, str(len(categories)))
    for box, decision, label, probability in decided:
        i, j = box.place
        ranked = [[categories[decision], round(probability, 4)]]
        if label != decision:
            ranked.append([categories[label], round(probability, 4)])
        document["images"][i]["detections"][j]["classifications"] = ranked
    document["classification_categories"] = {number: name for name, number in categories.items()}
    _write_json(path, document)


def _coco(document: dict[str, Any], path: Path) -> Iterable[Box]:
    photos: dict[Any, str] = {}
    for image in _listed(document, "images", path):
        photos[_key(image.get("id"), path)] = _photo(image.get("file_name"), path)
    categories = _listed(document, "categories", path)
    names = {_key(each.get("id"), path): each.get("name") for each in categories}
    counts: Counter[str] = Counter()
    for i, each in enumerate(_listed(document, "annotations", path)):
        key = _key(each.get("image_id"), path)
        if key not in photos:
            raise InputError(f"{path} has a box of the image id {key!r}, which it does not list.")
        photo = photos[key]
        where = f"{path}, annotation {i}"
        label = _named(names, _key(each.get("category_id"), path), path, "category id")
        sides = _sides(each.get("bbox"), where)
        score = _share(each.get("score"), where)
        yield Box(photo, counts[photo], sides, False, label, score, (i,))
        counts[photo] += 1


def _key(value: Any, path: Path) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"{path} has an id that is neither a number nor a string: {value!r:.40}.")
    return value


def _write_coco(path: Path, document: Any, decided: list[Any]) -> None:
    named = [each for each in document["categories"] if isinstance(each.get("name"), str)]
    ids = {each["name"]: each["id"] for each in named}
    largest = max((each for each in ids.values() if isinstance(each, int)), default=0)
    for box, decision, label, probability in decided:
        if decision not in ids:
            largest += 1
            ids[decision] = largest
            document["categories"].append({"id": largest, "name": decision})
        each = document["annotations"][box.place[0]]
        each["detected_category_id"] = each["category_id"]
        each |= {"category_id": ids[decision], "score": round(probability, 4), "label": label}
    _write_json(path, document)


def _write_json(path: Path, document: Any) -> None:
    with replacing(path) as part:
        text = json.dumps(document, ensure_ascii=False)
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a character


# CSV.


def _read_csv(path: Path) -> BoxFile:
    text = _text(path)
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    with reading(path, csv.Error):
        rows = list(csv.reader(io.StringIO(text), delimiter=delimiter, strict=True))
    header = [cell.strip().casefold() for cell in rows[0]] if rows else []
    photo_at = next((header.index(name) for name in PATH_COLUMNS if name in header), None)
    if photo_at is None or not all(side in header for side in SIDES):
        raise InputError(
            f"{path} needs a header with a path column ({', '.join(PATH_COLUMNS)}) and the columns "
            f"x, y, w, h (pixels); got {', '.join(header)[:200]}."
        )
    places = [header.index(side) for side in SIDES]
    label_at = next((header.index(name) for name in LABEL_COLUMNS if name in header), None)
    boxes: list[Box] = []
    counts: Counter[str] = Counter()
    for line, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) < len(header):
            raise InputError(f"{path}, line {line}: expected {len(header)} cells.")
        photo = _photo(row[photo_at].strip(), path)
        label = row[label_at].strip() if label_at is not None else ""
        sides = _sides([row[place] for place in places], f"{path}, line {line}")
        boxes.append(Box(photo, counts[photo], sides, False, label or None, None, (line - 1,)))
        counts[photo] += 1
    return BoxFile(path, "csv", tuple(boxes), (delimiter, rows))


def _write_csv(path: Path, document: Any, decided: list[Any]) -> None:
    from mivhead.spreadsheets import to_csv

    _, rows = document
    added = ["decision", "predicted", "probability"]
    by_row = {box.place[0]: [decision, label, p] for box, decision, label, p in decided}
    cells = [
        [*row, *by_row.get(i, [None] * len(added))]
        for i, row in enumerate(rows)
        if i and any(cell.strip() for cell in row)
    ]
    with replacing(path) as part:
        part.write_text(to_csv([*rows[0], *added], cells, raw=False, excel=False), "utf-8")


# Folders: YOLO's text files and Pascal VOC's XML files.


def _read_folder(path: Path) -> BoxFile:
    for suffix, read in ((".xml", _read_voc), (".txt", _read_yolo)):
        files = sorted(each for each in path.rglob(f"*{suffix}") if not each.is_symlink())
        if len(files) > MAX_FILES:
            raise InputError(f"{path} has more than {MAX_FILES:,} files.")
        if files:
            return read(path, files)
    raise InputError(f"{path} has no boxes that can be read: give {FORMATS} files.")


def _read_yolo(path: Path, files: Sequence[Path]) -> BoxFile:
    names = _text(path / "classes.txt").splitlines() if (path / "classes.txt").is_file() else []
    named = {str(i): name.strip() for i, name in enumerate(names)}
    boxes: list[Box] = []
    lines: dict[str, list[str]] = {}
    for file in files:
        inside = file.relative_to(path)
        if inside.as_posix() == "classes.txt":
            continue
        kept = [line for line in _text(file).splitlines() if line.strip()]
        lines[inside.as_posix()] = kept
        for number, line in enumerate(kept):
            category, *rest = line.split()
            where = f"{file}, line {number + 1}"
            if len(rest) not in (4, 5):
                raise InputError(f"{where}: expected a class, four numbers and maybe a confidence.")
            across, down, wide, high = _sides(rest[:4], where)
            if max(across, down, wide, high) > 2:
                raise InputError(f"{where}: YOLO's boxes are shares of the photo.")
            label = _named(named, category, path / "classes.txt", "class") if names else category
            confidence = _number(rest[4], where) if len(rest) == 5 else None
            sides = (across - wide / 2, down - high / 2, wide, high)  # from the centre
            photo = inside.with_suffix("").as_posix()  # the suffix is found with the photos
            place = (inside.as_posix(), number)
            boxes.append(Box(photo, number, sides, True, label, confidence, place))
    return BoxFile(path, "yolo", tuple(boxes), (lines, names))


def _number(text: str, where: str) -> float | None:
    try:
        return _share(float(text), where)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: {text[:40]!r} is not a number.") from None


def _write_yolo(path: Path, document: Any, decided: list[Any]) -> None:
    lines, names = document
    names = [name.strip() for name in names] or _number_names(lines, decided)
    numbers = {name: i for i, name in enumerate(names)}
    for box, decision, _, probability in decided:
        if decision not in numbers:
            numbers[decision] = len(names)
            names.append(one_line(decision))
        file, number = box.place
        sides = lines[file][number].split()[1:5]
        lines[file][number] = " ".join([str(numbers[decision]), *sides, f"{probability:.4f}"])
    for file, kept in lines.items():
        with replacing(path / file, make_folders=True) as part:
            part.write_text("\n".join(kept) + "\n" if kept else "", encoding="utf-8")
    with replacing(path / "classes.txt", make_folders=True) as part:
        part.write_text("\n".join(names) + "\n", encoding="utf-8")


def _number_names(lines: Mapping[str, list[str]], decided: list[Any]) -> list[str]:
    """Without names, keep the numbers of boxes that are not decided: each is its own name."""
    done = {box.place for box, *_ in decided}
    kept = {
        line.split()[0]
        for file, found in lines.items()
        for number, line in enumerate(found)
        if (file, number) not in done
    }
    taken = [int(each) for each in kept if re.fullmatch("[0-9]{1,4}", each)]
    return [str(number) for number in range(max(taken, default=-1) + 1)]


def _read_voc(path: Path, files: Sequence[Path]) -> BoxFile:
    boxes: list[Box] = []
    counts: Counter[str] = Counter()
    trees: dict[str, Any] = {}
    for file in files:
        root = _parse_xml(file)
        inside = file.relative_to(path).as_posix() if path.is_dir() else file.name
        trees[inside] = root
        folder = PurePosixPath(inside).parent
        photo = _photo((folder / (root.findtext("filename") or "")).as_posix(), file)
        for number, each in enumerate(root.iter("object")):
            names = ("xmin", "ymin", "xmax", "ymax")
            left, top, right, bottom = _corners([each.findtext(f"bndbox/{n}") for n in names], file)
            sides = _sides((left, top, right - left, bottom - top), str(file))
            label = (each.findtext("name") or "").strip() or None
            boxes.append(Box(photo, counts[photo], sides, False, label, None, (inside, number)))
            counts[photo] += 1
    return BoxFile(path, "voc", tuple(boxes), trees)


class _Plain(ElementTree.TreeBuilder):
    """Builds elements, and refuses what could make a small file large or exhaust the stack."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._depth = 0

    def doctype(self, *_: str | None) -> None:
        raise InputError(f"{self._file} has a DOCTYPE, which annotations do not need; remove it.")

    def start(self, tag: Any, attrs: Any, /) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InputError(f"{self._file} is nested more than {MAX_DEPTH} elements deep.")
        return super().start(tag, attrs)

    def end(self, tag: Any, /) -> Any:
        self._depth -= 1
        return super().end(tag)


def _parse_xml(file: Path) -> Any:
    try:
        return ElementTree.fromstring(_content(file), ElementTree.XMLParser(target=_Plain(file)))
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} is not valid XML: {error}.") from error


def _corners(texts: Sequence[str | None], file: Path) -> list[float]:
    try:
        return [float(text or "") for text in texts]
    except ValueError:
        raise InputError(f"{file}: a bndbox needs xmin, ymin, xmax and ymax.") from None


def _write_voc(path: Path, document: Any, decided: list[Any]) -> None:
    objects = {inside: list(root.iter("object")) for inside, root in document.items()}
    for box, decision, label, probability in decided:
        inside, number = box.place
        each = objects[inside][number]
        extra = {"name": decision, "predicted": label, "confidence": f"{probability:.4f}"}
        for tag, text in extra.items():
            child = each.find(tag)
            if child is None:
                child = ElementTree.SubElement(each, tag)
            child.text = one_line(text)
    single = len(document) == 1 and path.suffix.lower() == ".xml"
    for inside, root in document.items():
        with replacing(path if single else path / inside, make_folders=True) as part:
            part.write_bytes(ElementTree.tostring(root, encoding="utf-8"))


def with_suffixes(found: BoxFile, folder: Path) -> BoxFile:
    """Add the suffixes of YOLO's photos, which are named without them."""
    if found.format != "yolo":
        return found
    names = {
        path.relative_to(folder).with_suffix("").as_posix(): path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if is_image_name(path.name)
    }
    boxes = []
    for box in found.boxes:
        if box.photo not in names:
            raise InputError(f"{folder} has no photo {box.photo}, of which {found.path} has boxes.")
        boxes.append(Box(**{**vars(box), "photo": names[box.photo]}))
    return BoxFile(found.path, found.format, tuple(boxes), found.document)


_WRITERS: dict[str, Any] = {
    "megadetector": _write_megadetector,
    "coco": _write_coco,
    "csv": _write_csv,
    "yolo": _write_yolo,
    "voc": _write_voc,
}
