"""Corrupted or incomplete downloads, and those of other sets: a clear error, nothing written."""

import io

import numpy as np
import pytest

from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead_bench.datasets.catalogue import ALL_SETS
from mivhead_bench.datasets.prepare import prepare_set
from tests.helpers.sample_files import make_folder, png


def test_an_empty_download(tmp_path):
    (tmp_path / "raw").mkdir()
    for declared in ALL_SETS:
        with pytest.raises(InputError, match="unpack"):
            prepare_set(declared.name, tmp_path / "raw", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["raw"], declared.name


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
    ("name", "files"),
    [
        ("mnist", {**MNIST, "t10k-images-idx3-ubyte": b""}),
        ("mnist", {**MNIST, "t10k-labels-idx1-ubyte": bytes([0, 0, 8, 1, 0, 0, 0, 0])}),
        ("mnist", {"t10k-images-idx3-ubyte.gz": b"x"}),
        ("cifar10", {"test_batch.bin": b"123", "batches.meta.txt": b"a b"}),
        ("cifar10", {"test_batch.bin": bytes([2] * 3073), "batches.meta.txt": b"a b"}),
        ("aircraft", {"images_box.txt": b"1 5 x", "images_variant_trainval.txt": b"1 Spitfire"}),
        ("mscoco", {"instances_train2017.json": b"{}"}),
        ("vgg_flower", {"imagelabels.mat": b"no labels"}),
        ("quickdraw", {"angel.npy": b"no array"}),
        ("quickdraw", {"angel.npy": npy(np.zeros((2, 9)))}),
        ("dtd", {"images/banded/1.jpg": png()}),
        ("EuroSAT", {"a/AnnualCrop/1.jpg": png(), "b/AnnualCrop/1.jpg": png()}),
        ("ISIC", {ISIC: b"name,NV\nx,1.0\n"}),
        ("ISIC", {ISIC: b"image,NV\nx,1.0\n"}),
        ("ISIC", {ISIC: b"image,NV,MEL\nx,1.0,1.0\n"}),
        ("ChestX", {"Data_Entry_2017.csv": b"Image Index,Finding Labels\n"}),
        ("medimeta", {"info.yaml": b"tasks: [1"}),
        ("medimeta", {"info.yaml": b"tasks: []"}),
    ],
)
def test_corrupted_downloads(name, files, tmp_path):
    make_folder(tmp_path / "raw", files)
    with pytest.raises(InputError):
        prepare_set(name, tmp_path / "raw", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_missing_photograph(tmp_path):
    make_folder(
        tmp_path / "raw",
        {"images_box.txt": b"1 0 0 5 5", "images_variant_trainval.txt": b"1 Spitfire"},
    )
    with pytest.raises(ImageError, match=r"1\.jpg"):
        prepare_set("aircraft", tmp_path / "raw", tmp_path / "out")


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
