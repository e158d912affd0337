"""Corrupted or incomplete downloads, and those of other sets: a clear error, nothing written."""

import io

import numpy as np
import pytest

from mivhead.datasets.downloads import PREPARATIONS
from mivhead.datasets.prepare import prepare_set
from mivhead.errors import ImageError, InputError, NotAvailableError
from tests.helpers.sample_files import make_folder, png


def test_an_empty_download(tmp_path):
    (tmp_path / "raw").mkdir()
    for name in PREPARATIONS:
        with pytest.raises(
            InputError, match=r"raw does not contain the (file|class folder|folder) .*: (give|unp)"
        ):
            prepare_set(name, tmp_path / "raw", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["raw"], name


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


MNIST = {
    "t10k-images-idx3-ubyte": bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 9]),
    "t10k-labels-idx1-ubyte": bytes([0, 0, 8, 1, 0, 0, 0, 1, 5]),
}
ISIC = "ISIC2018_Task3_Training_GroundTruth.csv"


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("mnist", {**MNIST, "t10k-images-idx3-ubyte": b""}, "not an IDX file of 3 dim"),
        ("mnist", {**MNIST, "t10k-images-idx3-ubyte": MNIST["t10k-images-idx3-ubyte"] + b"x"},
         "not an IDX file"),
        ("mnist", {**MNIST, "t10k-labels-idx1-ubyte": bytes([0, 0, 8, 1, 0, 0, 0, 0])},
         "1 test images but 0 labels"),
        ("mnist", {"t10k-images-idx3-ubyte.gz": b"x"}, r"ubyte\.gz cannot be read"),
        ("cifar10", {"test_batch.bin": b"123", "batches.meta.txt": b"a b"},
         "3 bytes are not a multiple"),
        ("cifar10", {"test_batch.bin": bytes([2] * 3073), "batches.meta.txt": b"a b"},
         "has the label 2, but .* has only 2 names"),
        ("aircraft", {"images_box.txt": b""}, "images_variant_trainval.txt cannot be read"),
        ("aircraft", {"images_box.txt": b"1 5 x", "images_variant_trainval.txt": b"1 Spitfire"},
         "no box for the image 1"),
        ("mscoco", {"instances_train2017.json": b"{}"}, "not a COCO annotation file"),
        ("vgg_flower", {"imagelabels.mat": b"no labels"}, r"imagelabels\.mat cannot be read"),
        ("quickdraw", {"angel.npy": b"no array"}, r"angel\.npy cannot be read"),
        ("quickdraw", {"angel.npy": npy(np.zeros((2, 9)))}, r"float64 of shape \(2, 9\); expected"),
        ("dtd", {"images/banded/1.jpg": png()}, "does not contain the class folder bumpy"),
        ("EuroSAT", {"a/AnnualCrop/1.jpg": png(), "b/AnnualCrop/1.jpg": png()}, "several places"),
        ("ISIC", {ISIC: b"name,NV\nx,1.0\n"}, "has no column 'image'"),
        ("ISIC", {ISIC: b"image,NV\nx,1.0\n"}, "The image x, listed in .*, is missing"),
        ("ISIC", {ISIC: b"image,NV,MEL\nx,1.0,1.0\n"}, "assigns 2 classes to x; expected 1"),
        ("ISIC", {ISIC: b"\xff\xfe"}, "cannot be read"),
        ("ChestX", {"Data_Entry_2017.csv": b"Image Index,Finding Labels\n"},
         "does not contain images of"),
    ],
)  # fmt: skip
def test_corrupted_downloads(name, files, message, tmp_path):
    make_folder(tmp_path / "raw", files)
    with pytest.raises(InputError, match=message):
        prepare_set(name, tmp_path / "raw", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_missing_photograph(tmp_path):
    make_folder(
        tmp_path / "raw",
        {"images_box.txt": b"1 0 0 5 5", "images_variant_trainval.txt": b"1 Spitfire"},
    )
    with pytest.raises(ImageError, match=r"1\.jpg does not exist"):
        prepare_set("aircraft", tmp_path / "raw", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_photos", "not a declared set; `miv data list` shows them"),
    ],
)
def test_sets_without_a_preparation(name, message, tmp_path):
    with pytest.raises(InputError, match=message):
        prepare_set(name, tmp_path, tmp_path / "out")


def test_outputs_are_never_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="out already exists"):
        prepare_set("mnist", tmp_path, tmp_path / "out")
    with pytest.raises(InputError, match="none is not a folder"):
        prepare_set("mnist", tmp_path / "none", tmp_path / "new")


def test_an_output_that_cannot_be_written(tmp_path):
    make_folder(tmp_path / "raw", {**MNIST, "file": b""})
    with pytest.raises(NotAvailableError, match="Nothing was written"):
        prepare_set("mnist", tmp_path / "raw", tmp_path / "raw" / "file" / "out")
