"""Read the downloads of image sets whose images have to be found, cropped or decoded.

A download that consists of class folders is declared in `sets.toml` and needs no code. For others,
a function takes the folder of the unpacked download and yields the images of the prepared set.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import yaml  # type: ignore[import-untyped]
from PIL import Image, ImageOps
from scipy.io import loadmat

from mivhead.errors import InputError, reading
from mivhead.images.decoding import load_image
from mivhead.images.imageset import is_image_name, is_litter, natural_key
from mivhead_bench.datasets.catalogue import DataSet, get_declared

PER_CLASS = 1000  # of Quick Draw's images, which are more than 100,000 per class
ENLARGEMENT = 1.2  # of COCO's boxes, as in Meta-Dataset
ONE_CLASS = ("MULTICLASS_CLASSIFICATION", "BINARY_CLASSIFICATION")  # tasks of MedIMeta

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


@dataclass(frozen=True)
class Item:
    """One image of a prepared set."""

    label: str  # its class
    name: str  # file name without the suffix
    content: Path | Image.Image  # a file to copy unchanged, or an image to save
    # Whether an image is saved as JPEG, like the photograph it was cropped from, instead of PNG
    photograph: bool = False


def read_download(declared: DataSet, raw: Path, per_class: int = PER_CLASS) -> Iterator[Item]:
    """Yield the images of a declared set, from the folder of its download."""
    if declared.folders is not None:
        return _class_folders(declared, raw)
    if declared.name == "quickdraw":
        return _quickdraw(raw, per_class)
    return _READERS[declared.name](raw)


def _labels(name: str) -> tuple[str, ...]:
    return get_declared(name).labels


def _find_file(raw: Path, *names: str) -> Path:
    """Find the first of these names that exists in a download, at any depth."""
    for name in names:
        files = sorted(path for path in raw.rglob(name) if path.is_file())
        if files:
            return files[0]
    raise InputError(f"{raw} does not contain the file {names[0]}: unpack the download into it.")


def _list_images(folder: Path) -> list[Path]:
    names = (p for p in folder.iterdir() if is_image_name(p.name) and not is_litter(p.name))
    return sorted(names, key=lambda path: natural_key(path.name))


def _list_folders(folder: Path) -> list[Path]:
    folders = (path for path in folder.iterdir() if path.is_dir() and not is_litter(path.name))
    return sorted(folders, key=lambda path: natural_key(path.name))


def _existing(file: Path | None, name: object, table: Path) -> Path:
    if file is None or not file.is_file():
        raise InputError(f"The image {name}, listed in {table}, is missing: unpack all images.")
    return file


# Class folders, which are copied.


def _class_folders(declared: DataSet, raw: Path) -> Iterator[Item]:
    """Copy the class folders that lie beside the one that every download of the set has."""
    known = declared.folders
    homes = sorted({path.parent for path in raw.rglob(str(known)) if path.is_dir()})
    named = [home for name in declared.within for home in homes if home.name == name]
    if not homes or (len(homes) > 1 and not named):
        where = "in several places: give one of them" if homes else "nowhere: unpack the download"
        raise InputError(f"{raw} contains the class folder {known} {where}.")
    root = (named or homes)[0]
    folders = [root / name for name in declared.labels] or _list_folders(root)
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{root} has no class folder {folder.name}: unpack it again.")
        for file in _list_images(folder):
            yield Item(folder.name, file.stem, file)


def _oxford_pets(raw: Path) -> Iterator[Item]:
    """Oxford-IIIT Pet: the breed is in the name of the file, Abyssinian_12.jpg."""
    for file in _list_images(_find_file(raw, "Abyssinian_1.jpg").parent):
        yield Item(file.stem.rpartition("_")[0], file.stem, file)


def _omniglot(raw: Path) -> Iterator[Item]:
    """Omniglot: the evaluation alphabets, white on black as in Meta-Dataset."""
    folders = sorted(path for path in raw.rglob("images_evaluation") if path.is_dir())
    if not folders:
        raise InputError(f"{raw} has no folder images_evaluation: unpack images_evaluation.zip.")
    # Some unpackers put images_evaluation into another folder of the same name.
    for alphabet in _list_folders(folders[-1]):
        for character in _list_folders(alphabet):
            for file in _list_images(character):
                inverted = ImageOps.invert(load_image(file))
                yield Item(f"{alphabet.name}.{character.name}", file.stem, inverted)


# Many images in one binary file.


def _mnist(raw: Path) -> Iterator[Item]:
    """MNIST: the 10,000 test images, white on black."""
    images = _read_idx(raw, "t10k-images", 3)  # (image, row, column)
    labels = _read_idx(raw, "t10k-labels", 1)  # (image)
    if len(images) != len(labels):
        raise InputError(f"{raw} has {len(images)} test images but {len(labels)} labels.")
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield Item(str(label), f"{number:05}", Image.fromarray(image))


def _fashion_mnist(raw: Path) -> Iterator[Item]:
    """Fashion-MNIST: the 10,000 test images, in the format and with the file names of MNIST."""
    for item in _mnist(raw):
        yield Item(_labels("fashion_mnist")[int(item.label)], item.name, item.content)


def _read_idx(raw: Path, name: str, dimensions: int) -> Bytes:
    """Read an IDX file: two zeros, type (8: bytes), dimensions, big-endian lengths, values."""
    names = (f"{name}-idx{dimensions}-ubyte", f"{name}.idx{dimensions}-ubyte")
    path = _find_file(raw, *names, *(f"{file_name}.gz" for file_name in names))
    with reading(path, EOFError, zlib.error):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    header = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:header], ">u4").astype(int) if len(data) >= header else np.zeros(1)
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) != header + shape.prod():
        raise InputError(f"{path} is corrupted, or not an IDX file of {dimensions} dimensions.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _cifar10(raw: Path) -> Iterator[Item]:
    """CIFAR-10, binary version: the 10,000 test images."""
    return _cifar(_find_file(raw, "test_batch.bin"), _find_file(raw, "batches.meta.txt"), 1)


def _cifar100(raw: Path) -> Iterator[Item]:
    """CIFAR-100, binary version: the 10,000 test images with fine labels."""
    return _cifar(_find_file(raw, "test.bin"), _find_file(raw, "fine_label_names.txt"), 2)


def _cifar(path: Path, names_path: Path, label_bytes: int) -> Iterator[Item]:
    """Read rows of labels, of which the last one counts, followed by the three colour planes."""
    names = names_path.read_text(encoding="utf-8", errors="replace").split()
    length = label_bytes + 3 * 32 * 32
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(data) or len(data) % length:
        raise InputError(f"{path} is corrupted: it has {len(data):,} bytes.")
    for number, row in enumerate(data.reshape(-1, length)):
        label = int(row[label_bytes - 1])
        if label >= len(names):
            raise InputError(f"{path} has the label {label}, and {names_path} no name for it.")
        colours = row[label_bytes:].reshape(3, 32, 32)  # (colour, row, column)
        pixels = np.ascontiguousarray(colours.transpose(1, 2, 0))  # (row, column, colour)
        yield Item(names[label], f"{number:05}", Image.fromarray(pixels))


def _quickdraw(raw: Path, per_class: int) -> Iterator[Item]:
    """Quick, Draw!: the first bitmaps of every test class, or all, white on black."""
    for label in _labels("quickdraw"):
        path = _find_file(raw, f"{label}.npy")
        with reading(path, ValueError, EOFError):
            drawings = np.load(path, mmap_mode="r", allow_pickle=False)  # (drawing, pixel)
        if drawings.dtype != np.uint8 or drawings.shape[1:] != (28 * 28,):
            raise InputError(f"{path} holds no bitmaps of 28 x 28 pixels.")
        for number, pixels in enumerate(drawings[: per_class or None]):
            yield Item(label, f"{number:05}", Image.fromarray(np.array(pixels).reshape(28, 28)))


# Photographs with bounding boxes, which are cropped.


def _aircraft(raw: Path) -> Iterator[Item]:
    """FGVC-Aircraft: the test variants, cropped to the box, which excludes the copyright line."""
    boxes_file = _find_file(raw, "images_box.txt")
    boxes = dict(_pairs(boxes_file))
    for part in ("trainval", "test"):
        for name, variant in _pairs(boxes_file.with_name(f"images_variant_{part}.txt")):
            if variant in _labels("aircraft"):
                try:
                    left, top, right, bottom = map(int, boxes[name].split())
                except (KeyError, ValueError):
                    raise InputError(f"{boxes_file} has no box for the image {name}.") from None
                photograph = load_image(boxes_file.with_name("images") / f"{name}.jpg")
                picture = photograph.crop((left, top, right, bottom))
                yield Item(variant, name, picture, photograph=True)


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first word and the rest of each line."""
    with reading(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        yield name, rest


def _mscoco(raw: Path) -> Iterator[Item]:
    """COCO, train2017: boxes of the test classes, enlarged 1.2 times around their centres."""
    path = _find_file(raw, "instances_train2017.json")
    with reading(path, ValueError, KeyError, TypeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        names = {category["id"]: category["name"] for category in document["categories"]}
        files = {entry["id"]: Path(entry["file_name"]).name for entry in document["images"]}
        boxes: defaultdict[Any, list[tuple[Any, str, list[float]]]] = defaultdict(list)
        for annotation in document["annotations"]:
            label = names[annotation["category_id"]]
            if label in _labels("mscoco"):
                boxes[annotation["image_id"]].append((annotation["id"], label, annotation["bbox"]))
    folder = _find_file(raw, files[next(iter(boxes))]).parent if boxes else raw
    for image in sorted(boxes):  # each photograph is decoded only once
        photograph = load_image(folder / files[image])
        for number, label, box in boxes[image]:
            left, top, right, bottom = enlarge(box, photograph.size)
            if left < right and top < bottom:
                picture = photograph.crop((left, top, right, bottom))
                yield Item(label, f"{Path(files[image]).stem}_{number}", picture, photograph=True)


def enlarge(box: list[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Enlarge a box (left, top, width, height) around its centre, within an image of this size.

    COCO's integers are the centres of pixels, Pillow's their corners: they differ by half a pixel.

    >>> enlarge([10, 20, 10, 20], (100, 38))
    (8, 18, 21, 38)
    """
    edges = []
    for start, length, limit in zip(box[:2], box[2:], size, strict=True):
        centre, half = start + length / 2, ENLARGEMENT * length / 2
        first = max(round(centre - half - 0.5), 0)
        edges.append((first, min(round(centre + half - 0.5) + 1, limit)))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


# Images with a table of their classes.


def _fungi(raw: Path) -> Iterator[Item]:
    """FGVCx Fungi 2018: training and validation photographs of the test classes."""
    for name in ("train.json", "val.json"):
        path = _find_file(raw, name)
        with reading(path, ValueError, KeyError, TypeError):
            document = json.loads(path.read_text(encoding="utf-8"))
            names = {
                category["id"]: str(category["name"]).strip() for category in document["categories"]
            }
            files = {entry["id"]: PurePosixPath(entry["file_name"]) for entry in document["images"]}
            chosen = [
                (files[annotation["image_id"]], annotation["category_id"])
                for annotation in document["annotations"]
                if str(annotation["category_id"]) in _labels("fungi")
            ]
            labels = {number: f"{number:04}.{names[number]}" for _, number in chosen}
        if chosen:
            first = chosen[0][0]  # such as images/0008_Agaricus/1.jpg
            root = _find_file(raw, first.name).parents[len(first.parts) - 1]
            for file, number in chosen:
                yield Item(labels[number], file.stem, _existing(root / file, file, path))


def _isic(raw: Path) -> Iterator[Item]:
    """ISIC 2018, task 3: the class is the ground-truth column whose value is 1."""
    table = _find_file(raw, "ISIC2018_Task3_Training_GroundTruth.csv")
    files = _by_stem(raw)
    for row in _rows(table, "image"):
        name = row.pop("image")
        chosen = [column for column, value in row.items() if value in ("1", "1.0")]
        if len(chosen) != 1:
            raise InputError(f"{table} assigns {len(chosen)} classes to {name}; expected 1.")
        yield Item(chosen[0], name, _existing(files.get(name), name, table))


def _chest(raw: Path) -> Iterator[Item]:
    """ChestX-ray14: images with exactly one finding, which is one of seven."""
    table = _find_file(raw, "Data_Entry_2017*.csv")
    files = _by_stem(raw)
    for row in _rows(table, "Image Index", "Finding Labels"):
        if row["Finding Labels"] in _labels("ChestX"):
            name = Path(row["Image Index"]).stem
            yield Item(row["Finding Labels"], name, _existing(files.get(name), name, table))


def _flowers(raw: Path) -> Iterator[Item]:
    """102 Category Flower Dataset: the test classes; label i belongs to image i."""
    table = _find_file(raw, "imagelabels.mat")
    try:
        numbers = [int(number) for number in loadmat(table)["labels"].ravel()]
    # scipy raises almost any exception for a corrupted file; only its reader runs in this block.
    except Exception as error:
        raise InputError(f"{table} cannot be read: {error!r}.") from error
    labels = {int(label[:3]): label for label in _labels("vgg_flower")}
    files = _by_stem(raw)
    for number, label in enumerate(numbers, start=1):
        if label in labels:
            name = f"image_{number:05}"
            yield Item(labels[label], name, _existing(files.get(name), name, table))


def _rows(table: Path, *columns: str) -> Iterator[dict[str, str]]:
    with (
        reading(table, UnicodeDecodeError, csv.Error),
        table.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file)
        if missing := sorted(set(columns) - set(reader.fieldnames or ())):
            raise InputError(f"{table} has no column {missing[0]!r}.")
        yield from reader


def _by_stem(raw: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(raw.rglob("*")) if is_image_name(path.name)}


def _medimeta(raw: Path) -> Iterator[Item]:
    """One of MedIMeta's 19 sets: the images, and the labels of its first task with one class."""
    path = _find_file(raw, "info.yaml")
    with reading(path, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        info = yaml.safe_load(path.read_text(encoding="utf-8"))
        tasks = [task for task in info["tasks"] if task["task_target"] in ONE_CLASS]
        task = tasks[0]
        names = {int(number): str(name) for number, name in task["labels"].items()}
        file = _find_file(path.parent, f"{Path(str(task['task_name'])).name}.npy")
        labels = [names[int(label)] for label in np.ravel(np.load(file, allow_pickle=False))]
    for number, label in enumerate(labels):
        image = path.parent / "images" / f"{number:06}.tiff"
        yield Item(label, f"{number:06}", _existing(image, image, path))


_READERS: dict[str, Callable[[Path], Iterator[Item]]] = {  # by the name of the set
    "omniglot": _omniglot,
    "fungi": _fungi,
    "vgg_flower": _flowers,
    "mscoco": _mscoco,
    "aircraft": _aircraft,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "ISIC": _isic,
    "ChestX": _chest,
    "medimeta": _medimeta,
    "fashion_mnist": _fashion_mnist,
    "oxford_pets": _oxford_pets,
}
