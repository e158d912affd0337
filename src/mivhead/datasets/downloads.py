"""Read the downloads of image sets: one function per set, registered under its name.

Each function takes the folder of an unpacked download and yields the images of the prepared set.
To add a set, declare it in `catalogue.py` and write such a function here, or a line for one that
consists of class folders; a set that the paper does not use has `benchmark=None`. A set that needs
no preparation needs no code: put its class folders into the data folder.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from mivhead._util.optional import need
from mivhead.errors import InputError, reading
from mivhead.images.decoding import load_image
from mivhead.images.imageset import is_image_name, is_litter, natural_key


@dataclass(frozen=True)
class Item:
    """One image of a prepared set."""

    label: str  # its class
    name: str  # file name without the suffix
    content: Path | Image.Image  # a file to copy unchanged, or an image to save
    # Whether an image is saved as JPEG, like the photograph it was cropped from, instead of PNG
    photograph: bool = False


Preparation: TypeAlias = Callable[..., Iterator[Item]]  # of a download's folder
PREPARATIONS: dict[str, Preparation] = {}  # by the name of the set in the catalogue


def _prepares(name: str) -> Callable[[Preparation], Preparation]:
    """Register a function as the preparation of a set."""

    def register(function: Preparation) -> Preparation:
        PREPARATIONS[name] = function
        return function

    return register


def _find_file(raw: Path, *names: str) -> Path:
    """Find the first of these names that exists in a download, at any depth."""
    for name in names:
        found = sorted(path for path in raw.rglob(name) if path.is_file())
        if found:
            return found[0]
    raise InputError(
        f"{raw} does not contain the file {names[0]}: give the folder of the unpacked download of "
        "this set."
    )


def _find_classes(raw: Path, known: str, within: Iterable[str]) -> Path:
    """Find the folder that holds the class folders.

    `known` is a class that every download has; `within` are names of the folder to prefer where
    there are several: the first match counts.
    """
    found = sorted({path.parent for path in raw.rglob(known) if path.is_dir()})
    if not found:
        raise InputError(
            f"{raw} does not contain the class folder {known}: give the folder of the unpacked "
            "download of this set."
        )
    for name in within:
        if named := [folder for folder in found if folder.name == name]:
            return named[0]
    if len(found) > 1:
        raise InputError(
            f"{raw} contains class folders in several places, such as {found[0]} and {found[1]}: "
            "give one of these folders."
        )
    return found[0]


def _list_images(folder: Path) -> list[Path]:
    """Return the images in a folder in the natural order of names."""
    found = (path for path in folder.iterdir() if is_image_name(path.name))
    return sorted((path for path in found if not is_litter(path.name)), key=_natural_key)


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder in the natural order of names."""
    found = (path for path in folder.iterdir() if path.is_dir() and not is_litter(path.name))
    return sorted(found, key=_natural_key)


def _natural_key(path: Path) -> tuple[object, ...]:
    return natural_key(path.name)


# Test classes of Meta-Dataset's splits.

AIRCRAFT = (
    *("737-400", "737-800", "757-200", "767-400", "ATR-42", "BAE-125", "Beechcraft 1900"),
    *("Boeing 717", "CRJ-200", "CRJ-700", "E-170", "L-1011", "MD-90", "Saab 2000", "Spitfire"),
)

TEXTURES = ("banded", "bumpy", "crosshatched", "knitted", "sprinkled", "stratified", "woven")

# fmt: off
FUNGI = frozenset((  # by their category numbers in the download
    8, 9, 19, 38, 44, 53, 55, 62, 63, 69, 70, 78, 93, 96, 99, 103, 105, 118, 129, 132, 141, 151,
    153, 156, 165, 175, 176, 179, 184, 190, 205, 220, 223, 232, 234, 247, 277, 279, 289, 291, 316,
    321, 326, 356, 359, 381, 382, 390, 393, 395, 397, 408, 413, 431, 433, 444, 453, 457, 460, 462,
    472, 479, 482, 484, 491, 492, 498, 501, 502, 505, 517, 535, 536, 539, 541, 574, 580, 584, 587,
    596, 600, 604, 609, 616, 618, 620, 627, 637, 651, 661, 674, 677, 680, 688, 695, 703, 713, 722,
    724, 726, 727, 729, 742, 760, 764, 765, 784, 787, 790, 792, 799, 803, 805, 807, 812, 817, 820,
    826, 834, 838, 849, 853, 857, 871, 885, 893, 904, 907, 909, 914, 915, 917, 935, 937, 938, 940,
    947, 955, 960, 963, 966, 971, 976, 987, 989, 997, 999, 1012, 1018, 1024, 1030, 1031, 1032,
    1033, 1034, 1062, 1076, 1077, 1084, 1086, 1094, 1096, 1098, 1104, 1105, 1107, 1111, 1115,
    1117, 1120, 1129, 1133, 1157, 1165, 1169, 1194, 1231, 1234, 1238, 1249, 1250, 1253, 1262,
    1264, 1265, 1273, 1280, 1299, 1305, 1314, 1318, 1344, 1348, 1352, 1362, 1366, 1373, 1376,
    1382, 1388,
))
# fmt: on

FLOWERS = {  # by their label numbers in the download
    5: "english marigold",
    9: "monkshood",
    15: "yellow iris",
    19: "balloon flower",
    35: "alpine sea holly",
    40: "lenten rose",
    41: "barbeton daisy",
    42: "daffodil",
    45: "bolero deep blue",
    46: "wallflower",
    65: "californian poppy",
    85: "desert-rose",
    89: "watercress",
    94: "foxglove",
    96: "camellia",
    98: "mexican petunia",
}

DRAWINGS = (
    *("angel", "animal migration", "axe", "bat", "beard", "bee", "bridge", "broom", "bucket"),
    *("butterfly", "cactus", "campfire", "cookie", "couch", "cow", "diving board", "donut"),
    *("drill", "eraser", "feather", "finger", "fire hydrant", "flashlight", "frying pan"),
    *("giraffe", "goatee", "hammer", "helicopter", "helmet", "hockey stick", "hourglass"),
    *("house", "kangaroo", "lantern", "mailbox", "mouse", "palm tree", "parrot", "rabbit"),
    *("rollerskates", "saw", "saxophone", "snowman", "spider", "stitches", "streetlight"),
    *("sweater", "table", "umbrella", "wheel", "wine bottle", "yoga"),
)

THINGS = (
    *("bicycle", "car", "airplane", "bus", "truck", "boat", "stop sign", "bench", "bird", "horse"),
    *("sheep", "cow", "giraffe", "tie", "frisbee", "skis", "baseball bat", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "spoon", "bowl", "banana", "apple", "orange"),
    *("hot dog", "pizza", "chair", "couch", "potted plant", "bed", "mouse", "keyboard", "toaster"),
    *("sink", "refrigerator", "vase", "scissors"),
)

BIRDS = (
    *("008.Rhinoceros_Auklet", "009.Brewer_Blackbird", "015.Lazuli_Bunting"),
    *("020.Yellow_breasted_Chat", "028.Brown_Creeper", "030.Fish_Crow", "035.Purple_Finch"),
    *("039.Least_Flycatcher", "045.Northern_Fulmar", "046.Gadwall", "082.Ringed_Kingfisher"),
    *("085.Horned_Lark", "094.White_breasted_Nuthatch", "101.White_Pelican", "103.Sayornis"),
    *("112.Great_Grey_Shrike", "118.House_Sparrow", "122.Harris_Sparrow", "128.Seaside_Sparrow"),
    *("133.White_throated_Sparrow", "134.Cape_Glossy_Starling", "137.Cliff_Swallow"),
    *("147.Least_Tern", "148.Green_tailed_Towhee", "163.Cape_May_Warbler"),
    *("168.Kentucky_Warbler", "169.Magnolia_Warbler", "170.Mourning_Warbler"),
    *("193.Bewick_Wren", "194.Cactus_Wren"),
)


CLOTHES = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


# Downloads that already consist of class folders, which are copied.


def _class_folders(known: str, *within: str, classes: Iterable[str] | None = None) -> Preparation:
    """Make a preparation that finds class folders, as `_find_classes` does, and copies them."""
    return lambda raw: _copy(_find_classes(raw, known, within), classes)


PREPARATIONS |= {
    "cu_birds": _class_folders(BIRDS[0], "images", classes=BIRDS),  # whole photographs
    "dtd": _class_folders(TEXTURES[0], "images", classes=TEXTURES),
    "traffic_sign": _class_folders("00000", "Images"),  # the training images
    "CropDisease": _class_folders("Apple___Apple_scab", "train", "color"),
    "EuroSAT": _class_folders("AnnualCrop", "2750", "EuroSAT_RGB"),
    "Food101": _class_folders("apple_pie", "images"),
    "imagenet_sketch": _class_folders("n01440764", "sketch"),
    "domainnet_quickdraw": _class_folders("aircraft_carrier", "quickdraw"),
    "ucf101": _class_folders("Apply_Eye_Makeup", "UCF-101-midframes"),  # frames of videos
    "trashnet": _class_folders("cardboard", "dataset-resized"),
    "beans": _class_folders("bean_rust", "train"),
}


@_prepares("oxford_pets")
def _oxford_pets(raw: Path) -> Iterator[Item]:
    """Oxford-IIIT Pet: the breed is in the name of the file, Abyssinian_12.jpg."""
    folder = _find_file(raw, "Abyssinian_1.jpg").parent
    for file in _list_images(folder):
        yield Item(file.stem.rpartition("_")[0], file.stem, file)


@_prepares("omniglot")
def _omniglot(raw: Path) -> Iterator[Item]:
    """Omniglot: the evaluation alphabets, white on black as in Meta-Dataset."""
    found = sorted(path for path in raw.rglob("images_evaluation") if path.is_dir())
    if not found:
        raise InputError(
            f"{raw} does not contain the folder images_evaluation: unpack "
            "images_evaluation.zip into it."
        )
    # Some unpackers put images_evaluation into another folder of the same name.
    for alphabet in _list_folders(found[-1]):
        for character in _list_folders(alphabet):
            for file in _list_images(character):
                inverted = ImageOps.invert(load_image(file))
                yield Item(f"{alphabet.name}.{character.name}", file.stem, inverted)


def _copy(root: Path, classes: Iterable[str] | None = None) -> Iterator[Item]:
    folders = _list_folders(root) if classes is None else [root / name for name in classes]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"{root} does not contain the class folder {folder.name}: unpack the download "
                "again."
            )
        for file in _list_images(folder):
            yield Item(folder.name, file.stem, file)


# Downloads with many images in one binary file.


Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

SAMPLED = {"quickdraw": 1000}  # images per class that are prepared, of more than 100,000

_CIFAR_SIDE = 32  # pixels
_UNSIGNED_BYTES = 8  # type code in the header of an IDX file


@_prepares("mnist")
def _mnist(raw: Path) -> Iterator[Item]:
    """MNIST: the 10,000 test images, white on black."""
    images = _read_idx(_find_idx(raw, "t10k-images", 3), 3)  # (image, row, column)
    labels = _read_idx(_find_idx(raw, "t10k-labels", 1), 1)  # (image)
    if len(images) != len(labels):
        raise InputError(f"{raw} has {len(images)} test images but {len(labels)} labels.")
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield Item(str(label), f"{number:05}", Image.fromarray(image))


@_prepares("fashion_mnist")
def _fashion_mnist(raw: Path) -> Iterator[Item]:
    """Fashion-MNIST: the 10,000 test images, in the format and with the file names of MNIST."""
    for item in _mnist(raw):
        yield Item(CLOTHES[int(item.label)], item.name, item.content)


@_prepares("cifar10")
def _cifar10(raw: Path) -> Iterator[Item]:
    """CIFAR-10, binary version: the 10,000 test images."""
    return _cifar(_find_file(raw, "test_batch.bin"), _find_file(raw, "batches.meta.txt"), 1)


@_prepares("cifar100")
def _cifar100(raw: Path) -> Iterator[Item]:
    """CIFAR-100, binary version: the 10,000 test images with fine labels."""
    return _cifar(_find_file(raw, "test.bin"), _find_file(raw, "fine_label_names.txt"), 2)


@_prepares("quickdraw")
def _quickdraw(raw: Path, per_class: int | None) -> Iterator[Item]:
    """Quick, Draw!: the first bitmaps of every test class, or all, white on black."""
    for label in DRAWINGS:
        path = _find_file(raw, f"{label}.npy")
        with reading(path, ValueError, EOFError):
            drawings = np.load(path, mmap_mode="r", allow_pickle=False)  # (drawing, pixel)
        if drawings.dtype != np.uint8 or drawings.shape[1:] != (28 * 28,):
            raise InputError(
                f"{path} holds {drawings.dtype} of shape {drawings.shape}; expected uint8 of shape "
                "(n, 784)."
            )
        for number, pixels in enumerate(drawings[:per_class]):
            yield Item(label, f"{number:05}", Image.fromarray(np.array(pixels).reshape(28, 28)))


def _cifar(path: Path, names_path: Path, label_bytes: int) -> Iterator[Item]:
    """Read rows of labels, of which the last one counts, followed by the three colour planes."""
    names = names_path.read_text(encoding="utf-8", errors="replace").split()
    length = label_bytes + 3 * _CIFAR_SIDE**2
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(data) or len(data) % length:
        raise InputError(
            f"{path} is corrupted: {len(data):,} bytes are not a multiple of {length:,}."
        )
    for number, row in enumerate(data.reshape(-1, length)):
        label = int(row[label_bytes - 1])
        if label >= len(names):
            raise InputError(
                f"{path} has the label {label}, but {names_path} has only {len(names)} names."
            )
        colours = row[label_bytes:].reshape(3, _CIFAR_SIDE, _CIFAR_SIDE)  # (colour, row, column)
        pixels = np.ascontiguousarray(colours.transpose(1, 2, 0))  # (row, column, colour)
        yield Item(names[label], f"{number:05}", Image.fromarray(pixels))


def _find_idx(raw: Path, name: str, dimensions: int) -> Path:
    both = (f"{name}-idx{dimensions}-ubyte", f"{name}.idx{dimensions}-ubyte")
    return _find_file(raw, *both, *(f"{each}.gz" for each in both))


def _read_idx(path: Path, dimensions: int) -> Bytes:
    """Read an IDX file: two zeros, type, dimensions, big-endian lengths, values."""
    with reading(path, EOFError, zlib.error):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    header = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:header], ">u4").astype(int) if len(data) >= header else np.zeros(1)
    if data[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]) or len(data) != header + shape.prod():
        raise InputError(f"{path} is corrupted, or not an IDX file of {dimensions} dimensions.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


# Downloads of photographs with bounding boxes, which are cropped.


ENLARGEMENT = 1.2  # of COCO's boxes, as in Meta-Dataset


@_prepares("aircraft")
def _aircraft(raw: Path) -> Iterator[Item]:
    """FGVC-Aircraft: the test variants, cropped to the box, which excludes the copyright line."""
    boxes_file = _find_file(raw, "images_box.txt")
    boxes = dict(_pairs(boxes_file))
    for part in ("trainval", "test"):
        for name, variant in _pairs(boxes_file.with_name(f"images_variant_{part}.txt")):
            if variant in AIRCRAFT:
                try:
                    left, top, right, bottom = map(int, boxes[name].split())
                except (KeyError, ValueError):
                    raise InputError(f"{boxes_file} has no box for the image {name}.") from None
                photograph = load_image(boxes_file.with_name("images") / f"{name}.jpg")
                picture = photograph.crop((left, top, right, bottom))
                yield Item(variant, name, picture, photograph=True)


@_prepares("fungi")
def _fungi(raw: Path) -> Iterator[Item]:
    """FGVCx Fungi 2018: training and validation photographs of the test classes."""
    for name in ("train.json", "val.json"):
        path = _find_file(raw, name)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            names = {each["id"]: str(each["name"]).strip() for each in document["categories"]}
            files = {each["id"]: PurePosixPath(each["file_name"]) for each in document["images"]}
            chosen = [
                (files[each["image_id"]], each["category_id"])
                for each in document["annotations"]
                if each["category_id"] in FUNGI
            ]
            labels = {number: f"{number:04}.{names[number]}" for _, number in chosen}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is not an annotation file of FGVCx Fungi: {error!r}."
            ) from error
        if chosen:
            first = chosen[0][0]  # such as images/0008_Agaricus/1.jpg
            root = _find_file(raw, first.name).parents[len(first.parts) - 1]
            for file, number in chosen:
                yield Item(labels[number], file.stem, _existing(root / file, path))


def _existing(file: Path, table: Path) -> Path:
    if not file.is_file():
        raise InputError(f"The image {file}, listed in {table}, is missing: unpack all images.")
    return file


@_prepares("mscoco")
def _mscoco(raw: Path) -> Iterator[Item]:
    """COCO, train2017: boxes of the test classes, enlarged 1.2 times around their centres."""
    path = _find_file(raw, "instances_train2017.json")
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
        raise InputError(f"{path} is not a COCO annotation file: {error!r}.") from error
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


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first word and the rest of each line."""
    with reading(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        yield name, rest


# Downloads of images with a table of their classes.


FINDINGS = (
    *("Atelectasis", "Cardiomegaly", "Effusion", "Infiltration"),
    *("Mass", "Nodule", "Pneumothorax"),
)


@_prepares("ISIC")
def _isic(raw: Path) -> Iterator[Item]:
    """ISIC 2018, task 3: the class is the ground-truth column whose value is 1."""
    table = _find_file(raw, "ISIC2018_Task3_Training_GroundTruth.csv")
    files = _by_stem(raw)
    for row in _rows(table, "image"):
        name = row.pop("image")
        chosen = [column for column, value in row.items() if value in ("1", "1.0")]
        if len(chosen) != 1:
            raise InputError(f"{table} assigns {len(chosen)} classes to {name}; expected 1.")
        yield Item(chosen[0], name, _file(files, name, table))


@_prepares("ChestX")
def _chest(raw: Path) -> Iterator[Item]:
    """ChestX-ray14: images with exactly one finding, which is one of seven."""
    table = _find_file(raw, "Data_Entry_2017*.csv")
    files = _by_stem(raw)
    for row in _rows(table, "Image Index", "Finding Labels"):
        if row["Finding Labels"] in FINDINGS:
            name = Path(row["Image Index"]).stem
            yield Item(row["Finding Labels"], name, _file(files, name, table))


@_prepares("vgg_flower")
def _flowers(raw: Path) -> Iterator[Item]:
    """102 Category Flower Dataset: the test classes; label i belongs to image i."""
    from scipy.io import loadmat

    table = _find_file(raw, "imagelabels.mat")
    try:
        labels = [int(label) for label in loadmat(table)["labels"].ravel()]
    # scipy raises almost any exception for a corrupted file; only its reader runs in this block.
    except Exception as error:
        raise InputError(f"{table} cannot be read: {error!r}.") from error
    files = _by_stem(raw)
    for number, label in enumerate(labels, start=1):
        if label in FLOWERS:
            name = f"image_{number:05}"
            yield Item(f"{label:03}.{FLOWERS[label]}", name, _file(files, name, table))


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


def _file(files: dict[str, Path], name: str, table: Path) -> Path:
    if name not in files:
        raise InputError(
            f"The image {name}, listed in {table}, is missing: unpack all images next to it."
        )
    return files[name]


# MedIMeta: 19 medical sets in one format.


_CLASSIFICATION = ("MULTICLASS_CLASSIFICATION", "BINARY_CLASSIFICATION")


@_prepares("medimeta")
def _medimeta(raw: Path) -> Iterator[Item]:
    """One set of MedIMeta: the images, and the labels of its first task with one class each."""
    yaml = need("yaml", "timm")
    path = _find_file(raw, "info.yaml")
    try:
        info = yaml.safe_load(path.read_text(encoding="utf-8"))
        task = next(each for each in info["tasks"] if each["task_target"] in _CLASSIFICATION)
        names = {int(number): str(name) for number, name in task["labels"].items()}
        labels = np.load(
            _find_file(path.parent, f"{Path(str(task['task_name'])).name}.npy"), allow_pickle=False
        )
    except StopIteration:
        raise InputError(f"{path} has no task whose images have one class each.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} does not describe a set of MedIMeta: {error!r:.200}.") from error
    for number, label in enumerate(np.ravel(labels).tolist()):
        if int(label) not in names:
            raise InputError(f"{path} has no name for the label {label}.")
        file = path.parent / "images" / f"{number:06}.tiff"
        yield Item(names[int(label)], f"{number:06}", _existing(file, path))
