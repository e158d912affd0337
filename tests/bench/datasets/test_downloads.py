"""Preparations, on tiny downloads in the real formats."""

import gzip
import json
import struct

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from mivhead.errors import InputError
from mivhead.images.sources import open_labelled
from mivhead_bench.datasets.catalogue import SETS, get_declared
from mivhead_bench.datasets.downloads import enlarge
from mivhead_bench.datasets.prepare import prepare_set
from mivhead_bench.datasets.sets import open_set
from tests.helpers.sample_files import make_folder, png

BIRDS, TEXTURES = (get_declared(name).labels for name in ("cu_birds", "dtd"))


def photograph(path, width=60, height=40):
    """Left to right red grows, top to bottom green: a pixel tells where it was."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    pixels = np.stack([4 * x, 4 * y, 0 * x], axis=-1).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=100, subsampling=0)


def corner(picture):
    """Where the top left pixel of a crop was in the photograph."""
    red, green, _ = np.asarray(picture.convert("RGB")).astype(int)[0, 0]
    return round(red / 4), round(green / 4)


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = head + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("ending", ["-idx{}-ubyte", ".idx{}-ubyte", "-idx{}-ubyte.gz"])
def test_mnist(ending, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
    labels = np.array([3, 1, 3, 0, 1, 9], np.uint8)
    write_idx(tmp_path / "raw" / f"t10k-images{ending.format(3)}", images)
    write_idx(tmp_path / "raw" / f"t10k-labels{ending.format(1)}", labels)
    write_idx(tmp_path / "raw" / f"train-images{ending.format(3)}", images[:1])
    assert prepare_set("mnist", tmp_path / "raw", tmp_path / "out") == {
        "0": 1,
        "1": 2,
        "3": 2,
        "9": 1,
    }
    prepared = open_labelled(tmp_path / "out")
    assert prepared.ids[:3] == ("0/00003.png", "1/00001.png", "1/00004.png")
    assert (np.asarray(prepared.load(1))[:, :, 0] == images[1]).all()


@pytest.mark.parametrize(
    ("name", "data_file", "names_file", "labels"),
    [
        ("cifar10", "test_batch.bin", "batches.meta.txt", 1),
        ("cifar100", "test.bin", "fine_label_names.txt", 2),
    ],
)
def test_cifar(name, data_file, names_file, labels, tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    fine = [1, 0, 1]
    rows = b"".join(
        bytes([7] * (labels - 1) + [label]) + image.tobytes()
        for label, image in zip(fine, colours, strict=True)
    )
    files = {data_file: rows, names_file: b"apple\nbear\n\n"}
    make_folder(tmp_path / "raw" / "cifar-binary", files)
    assert prepare_set(name, tmp_path / "raw", tmp_path / "out") == {"apple": 1, "bear": 2}
    pixels = np.asarray(open_labelled(tmp_path / "out").load(0))
    assert (pixels == np.moveaxis(colours[1], 0, -1)).all()


def test_aircraft_is_cropped_to_its_box(tmp_path):
    data = tmp_path / "raw" / "fgvc-aircraft-2013b" / "data"
    for name in ("0000001", "0000002", "0000003"):
        photograph(data / "images" / f"{name}.jpg")
    (data / "images_box.txt").write_text("0000001 5 6 35 26\n0000002 1 1 20 20\n0000003 9 3 19 8\n")
    (data / "images_variant_trainval.txt").write_text("0000001 Saab 2000\n0000002 A380\n")
    (data / "images_variant_test.txt").write_text("0000003 Spitfire\n")
    counts = prepare_set("aircraft", tmp_path / "raw", tmp_path / "out")
    assert counts == {"Saab 2000": 1, "Spitfire": 1}
    prepared = open_labelled(tmp_path / "out")
    assert prepared.ids == ("Saab 2000/0000001.jpg", "Spitfire/0000003.jpg")
    assert [prepared.load(i).size for i in range(2)] == [(30, 20), (10, 5)]
    assert [corner(prepared.load(i)) for i in range(2)] == [(5, 6), (9, 3)]


def test_mscoco_boxes_are_enlarged(tmp_path):
    photograph(tmp_path / "raw" / "train2017" / "000000000009.jpg")
    boxes = [(1, [20, 10, 20, 10]), (1, [50, 30, 10, 10]), (2, [0, 0, 9, 9]), (1, [99, 99, 5, 5])]
    document = {
        "images": [{"id": 9, "file_name": "000000000009.jpg"}],
        "categories": [{"id": 1, "name": "stop sign"}, {"id": 2, "name": "person"}],
        "annotations": [
            {"id": 100 + i, "image_id": 9, "category_id": category, "bbox": box}
            for i, (category, box) in enumerate(boxes)
        ],
    }
    path = tmp_path / "raw" / "annotations" / "instances_train2017.json"
    make_folder(path.parent, {path.name: json.dumps(document).encode()})
    # The person is not a test class; the last box lies outside of the photograph.
    assert prepare_set("mscoco", tmp_path / "raw", tmp_path / "out") == {"stop sign": 2}
    first, second = (open_labelled(tmp_path / "out", min_classes=1).load(i) for i in range(2))
    assert corner(first) == (18, 8)  # 20 - 0.1 * 20 and 10 - 0.1 * 10, half a pixel less, rounded
    assert first.size == (25, 13)
    assert corner(second) == (48, 28)
    assert second.size == (12, 12)  # up to the edges at 60 and 40


def test_enlarged_boxes_keep_their_centre():
    left, top, right, bottom = enlarge([100, 200, 50, 30], (1000, 1000))
    assert (left + right) / 2 == pytest.approx(125, abs=1)
    assert (top + bottom) / 2 == pytest.approx(215, abs=1)
    assert right - left == pytest.approx(60, abs=1)
    assert bottom - top == pytest.approx(36, abs=1)


def test_omniglot_is_inverted_and_named_by_alphabet(tmp_path):
    for alphabet in ("Tibetan", "Avesta"):
        folder = tmp_path / "raw" / "images_evaluation" / alphabet / "character01"
        folder.mkdir(parents=True)
        Image.new("1", (5, 5), 1).save(folder / "0965_01.png")
    make_folder(tmp_path / "raw" / "images_background" / "Greek" / "character01", {"1.png": png()})
    assert list(prepare_set("omniglot", tmp_path / "raw", tmp_path / "out")) == [
        "Avesta.character01",
        "Tibetan.character01",
    ]
    assert np.asarray(open_labelled(tmp_path / "out").load(0)).max() == 0


def test_isic_by_its_table(tmp_path):
    table = b"image,MEL,NV,BCC\nISIC_1,0.0,1.0,0.0\nISIC_2,1.0,0.0,0.0\nISIC_3,0.0,1.0,0.0\n"
    make_folder(
        tmp_path / "raw",
        {
            "truth/ISIC2018_Task3_Training_GroundTruth.csv": table,
            **{f"ISIC2018_Task3_Training_Input/ISIC_{i}.jpg": png(i) for i in range(1, 4)},
        },
    )
    assert prepare_set("ISIC", tmp_path / "raw", tmp_path / "out") == {"MEL": 1, "NV": 2}
    assert (tmp_path / "out" / "NV" / "ISIC_3.jpg").read_bytes() == png(3)


def test_chest_takes_images_with_one_finding(tmp_path):
    table = (
        b"Image Index,Finding Labels,Follow-up #\n1.png,Mass,0\n2.png,Mass|Nodule,0\n"
        b"3.png,No Finding,0\n4.png,Effusion,1\n5.png,Hernia,0\n"
    )
    images = {f"images_00{i}/images/{i}.png": png(i) for i in range(1, 6)}
    make_folder(tmp_path / "raw", {"Data_Entry_2017_v2020.csv": table, **images})
    assert prepare_set("ChestX", tmp_path / "raw", tmp_path / "out") == {"Effusion": 1, "Mass": 1}


def test_flowers_by_their_labels(tmp_path):
    make_folder(tmp_path / "raw", {f"jpg/image_{i:05}.jpg": png(i) for i in range(1, 5)})
    savemat(tmp_path / "raw" / "imagelabels.mat", {"labels": np.array([[77, 5, 98, 5]], np.uint8)})
    assert prepare_set("vgg_flower", tmp_path / "raw", tmp_path / "out") == {
        "005.english marigold": 2,
        "098.mexican petunia": 1,
    }
    copied = tmp_path / "out" / "005.english marigold" / "image_00004.jpg"
    assert copied.read_bytes() == png(4)


def test_drawings(tmp_path):
    names = get_declared("quickdraw").labels
    drawings = np.random.default_rng(0).integers(0, 256, (3, 784), dtype=np.uint8)
    (tmp_path / "raw").mkdir()
    for name in names:
        np.save(tmp_path / "raw" / f"{name}.npy", drawings)
    counts = prepare_set("quickdraw", tmp_path / "raw", tmp_path / "out", per_class=2)
    assert counts == dict.fromkeys(names, 2)
    second = np.asarray(open_labelled(tmp_path / "out").load(1))[:, :, 0]
    assert (second.ravel() == drawings[1]).all()
    full = prepare_set("quickdraw", tmp_path / "raw", tmp_path / "full", per_class=0)
    assert full == dict.fromkeys(names, 3)


def annotations(images, names):
    """An annotation file in the form of FGVCx Fungi."""
    return json.dumps(
        {
            "images": [{"id": i, "file_name": file} for i, (file, _) in enumerate(images)],
            "annotations": [
                {"id": 9 * i, "image_id": i, "category_id": label}
                for i, (_, label) in enumerate(images)
            ],
            "categories": [{"id": number, "name": name} for number, name in names.items()],
        }
    ).encode()


def test_fungi(tmp_path):
    names = {1: "Agaricus altipes", 8: "Agaricus campestris", 482: "Hygrophorus hypothejus "}
    train = [("images/1_A/a.jpg", 1), ("images/8_A/b.jpg", 8), ("images/8_A/c.jpg", 8)]
    val = [("images/482_H/d.jpg", 482)]
    files = {f"unpacked/{file}": png(i) for i, (file, _) in enumerate(train + val)}
    files |= {"train.json": annotations(train, names), "val.json": annotations(val, names)}
    make_folder(tmp_path / "raw", files)
    assert prepare_set("fungi", tmp_path / "raw", tmp_path / "out") == {
        "0008.Agaricus campestris": 2,
        "0482.Hygrophorus hypothejus": 1,
    }
    copied = tmp_path / "out" / "0008.Agaricus campestris" / "c.jpg"
    assert copied.read_bytes() == png(2)
    (tmp_path / "raw/unpacked/images/8_A/c.jpg").unlink()
    with pytest.raises(InputError, match="is missing: unpack all images"):
        prepare_set("fungi", tmp_path / "raw", tmp_path / "again")


def test_the_papers_size(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2, 28, 28), dtype=np.uint8)
    write_idx(tmp_path / "raw" / "t10k-images-idx3-ubyte", images)
    write_idx(tmp_path / "raw" / "t10k-labels-idx1-ubyte", np.array([3, 1], np.uint8))
    prepare_set("mnist", tmp_path / "raw", tmp_path / "data" / "mnist")
    assert open_set("mnist", tmp_path / "data").load(1).size == (28, 28)
    resized = open_set("mnist", tmp_path / "data", paper_sizes=True).load(1)
    expected = Image.fromarray(images[0]).resize((84, 84), Image.Resampling.LANCZOS)
    assert (np.asarray(resized)[:, :, 0] == np.asarray(expected)).all()
    assert {each.name for each in SETS if each.paper_size == 84} == {"mnist", "cifar10", "cifar100"}


@pytest.mark.parametrize(
    ("name", "files", "classes"),
    [
        ("cu_birds", [f"CUB/images/{c}/1.jpg" for c in (*BIRDS, "001.Albatross")], set(BIRDS)),
        ("dtd", [f"dtd/images/{c}/1.jpg" for c in (*TEXTURES, "grid")], set(TEXTURES)),
        (
            "traffic_sign",
            ["GTSRB/Final_Training/Images/00000/1.ppm", "GTSRB/Final_Training/Images/00001/1.ppm"],
            {"00000", "00001"},
        ),
        (
            "CropDisease",
            [f"new/{part}/{c}/1.jpg" for part in ("train", "valid") for c in
             ("Apple___Apple_scab", "Grape___healthy")],
            {"Apple___Apple_scab", "Grape___healthy"},
        ),
        ("EuroSAT", ["2750/AnnualCrop/1.jpg", "2750/Forest/1.jpg"], {"AnnualCrop", "Forest"}),
        ("Food101", ["food-101/images/apple_pie/1.jpg", "food-101/images/pho/2.jpg"],
         {"apple_pie", "pho"}),
    ],
)  # fmt: skip
def test_class_folders_are_copied(name, files, classes, tmp_path):
    litter = {"readme.txt": b"", ".DS_Store": b""}
    make_folder(tmp_path / "raw", {**{file: png(i) for i, file in enumerate(files)}, **litter})
    assert prepare_set(name, tmp_path / "raw", tmp_path / "out") == dict.fromkeys(classes, 1)
    assert set(open_labelled(tmp_path / "out").classes) == classes


def test_the_splits_have_meta_datasets_sizes():
    for name in ("aircraft", "cu_birds", "dtd", "mscoco", "vgg_flower", "quickdraw", "fungi"):
        declared = get_declared(name)
        assert len(set(declared.labels)) == len(declared.labels) == declared.classes


def test_fashion_mnist_has_names(tmp_path):
    images = np.zeros((3, 28, 28), np.uint8)
    write_idx(tmp_path / "raw" / "t10k-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "raw" / "t10k-labels-idx1-ubyte.gz", np.array([9, 0, 9], np.uint8))
    found = prepare_set("Fashion-MNIST", tmp_path / "raw", tmp_path / "out")
    assert found == {"T-shirt": 1, "ankle boot": 2}


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("imagenet_sketch", ["sketch/n01440764/1.jpg", "sketch/n01443537/1.jpg"], None),
        (
            "domainnet_quickdraw",
            ["quickdraw/aircraft_carrier/1.png", "quickdraw/alarm_clock/1.png"],
            None,
        ),
        (
            "ucf101",
            ["UCF-101-midframes/Apply_Eye_Makeup/1.jpg", "UCF-101-midframes/Archery/1.jpg"],
            None,
        ),
        ("trashnet", ["dataset-resized/cardboard/1.jpg", "dataset-resized/glass/1.jpg"], None),
        ("beans", ["train/bean_rust/1.jpg", "train/healthy/1.jpg", "test/bean_rust/2.jpg"], None),
        (
            "oxford_pets",
            ["images/Abyssinian_1.jpg", "images/Abyssinian_2.jpg", "images/great_pyrenees_7.jpg"],
            {"Abyssinian": 2, "great_pyrenees": 1},
        ),
    ],
)
def test_folders_of_photographs(name, files, expected, tmp_path):
    make_folder(tmp_path / "raw", dict.fromkeys(files, png()))
    found = prepare_set(name, tmp_path / "raw", tmp_path / "out")
    expected = expected or {each.split("/")[1]: 1 for each in files if not each.startswith("test")}
    assert found == expected


INFO = """
id: busi
name: BUSI
tasks:
  - {task_name: findings, task_target: MULTILABEL_CLASSIFICATION, labels: {0: a, 1: b}}
  - task_name: malignancy
    task_target: BINARY_CLASSIFICATION
    labels:
      0: benign
      1: malignant
"""


def medimeta(folder, labels, info=INFO):
    pytest.importorskip("yaml")
    make_folder(folder / "busi", {"info.yaml": info.encode()})
    (folder / "busi" / "images").mkdir()
    (folder / "busi" / "task_labels").mkdir()
    for number in range(len(labels)):
        Image.new("L", (4, 4), 10 * number).save(folder / "busi" / "images" / f"{number:06}.tiff")
    np.save(folder / "busi" / "task_labels" / "malignancy.npy", np.array(labels))


def test_medimeta(tmp_path):
    medimeta(tmp_path / "raw", [1, 0, 1])
    found = prepare_set("medimeta", tmp_path / "raw", tmp_path / "out")
    assert found == {"benign": 1, "malignant": 2}
    prepared = open_labelled(tmp_path / "out")
    assert prepared.ids == ("benign/000001.tiff", "malignant/000000.tiff", "malignant/000002.tiff")
