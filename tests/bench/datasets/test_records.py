"""Meta-Dataset's records: sets written small by plain code and read back; damage is reported."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.errors import ImageError, InputError
from mivhead_bench.datasets.records import list_records, open_records
from tests.helpers.record_files import (
    example,
    field,
    framed,
    write_records,
    write_set,
    write_specification,
)
from tests.helpers.sample_files import png

CLASSES = [
    ("hawk", [png(0), png(1)]),
    ("owl", [png(2)]),
    ("robin", [png(3), png(4), png(5)]),
    ("wren", [png(6), png(7)]),
]


def first_value(picture):
    return int(np.asarray(picture)[0, 0, 0])


def write_omniglot(folder):
    """Two alphabets for training, one for validation, two for testing; 2, 1, 1, 3, 2 characters."""
    sizes = (2, 1, 1, 3, 2)
    titles = ("Greek", "Latin", "Tagalog", "Anglo-Saxon", "Oriya.old")
    pairs = zip(titles, sizes, strict=True)
    names = [f"{title}-character{i + 1:02}" for title, size in pairs for i in range(size)]
    document = write_set(folder, [(name, [png(i)] * 2) for i, name in enumerate(names)])
    del document["classes_per_split"]
    document |= {
        "superclasses_per_split": {"TRAIN": 2, "VALID": 1, "TEST": 2},
        "classes_per_superclass": {str(i): size for i, size in enumerate(sizes)},
        "superclass_names": {str(i): title for i, title in enumerate(titles)},
        "__class__": "BiLevelDatasetSpecification",
    }
    write_specification(folder, document)
    return document


@pytest.mark.parametrize(
    ("split", "classes", "values"),
    [("train", ("hawk",), [0, 1]), ("valid", ("owl",), [2]), ("test", ("robin", "wren"), [3, 4])],
)
def test_each_split_has_its_classes(split, classes, values, tmp_path):
    write_set(tmp_path / "birds", CLASSES, train=1, valid=1)
    images = open_records(tmp_path / "birds", split=split)
    assert images.classes == classes
    assert [first_value(images.load(row)) for row in range(len(values))] == values


def test_classes_named_by_numbers(tmp_path):
    write_set(tmp_path / "signs", [(0, [png(1)]), (1, [png(2)])])
    assert open_records(tmp_path / "signs").classes == ("0", "1")


def test_omniglot_by_alphabet(tmp_path):
    write_omniglot(tmp_path / "omniglot")
    images = open_records(tmp_path / "omniglot")
    assert images.classes == (
        "Anglo-Saxon.character01",
        "Anglo-Saxon.character02",
        "Anglo-Saxon.character03",
        "Oriya_old.character01",
        "Oriya_old.character02",
    )
    assert [first_value(images.load(row)) for row in range(0, 10, 2)] == [4, 5, 6, 7, 8]
    assert open_records(tmp_path / "omniglot", split="valid").classes == ("Tagalog.character01",)


def test_images_for_testing_in_a_file_of_their_own(tmp_path):
    document = write_set(tmp_path / "set", [("a", []), ("b", [])])
    document["file_pattern"] = "{}_{}.tfrecords"
    document["images_per_class"] = {str(n): {"train": 5, "test": n + 1} for n in range(2)}
    write_specification(tmp_path / "set", document)
    for number in range(2):
        write_records(tmp_path / "set" / f"{number}_test.tfrecords", [png(number)] * (number + 1))
    assert open_records(tmp_path / "set").labels == ("a", "b", "b")


@pytest.mark.parametrize(
    "change",
    [
        {"classes_per_split": {"TRAIN": 0}},
        {"classes_per_split": {"TRAIN": 4, "VALID": 0, "TEST": 0}},
        {"class_names": {str(n): "same" for n in range(4)}},
        {"file_pattern": "../{}.tfrecords"},
        {"images_per_class": {str(n): 2 for n in range(4)}},
    ],
)
def test_a_wrong_specification(change, tmp_path):
    document = write_set(tmp_path / "birds", CLASSES)
    write_specification(tmp_path / "birds", {**document, **change})
    with pytest.raises(InputError):
        open_records(tmp_path / "birds")


def test_the_error_of_a_damaged_image_names_its_file(tmp_path):
    write_set(tmp_path / "birds", [*CLASSES[:3], ("wren", [png(6), b"no image"])])
    images = open_records(tmp_path / "birds")
    with pytest.raises(ImageError, match=r"3\.tfrecords, image 1 is not a JPEG"):
        images.load(len(images) - 1)


def test_images_come_back(tmp_path):
    images = [png(value) for value in range(5)]
    records = list_records(write_records(tmp_path / "0.tfrecords", images, 7))
    assert [record() for record in records] == images


def test_a_source_reads_in_another_process(tmp_path):
    (record,) = list_records(write_records(tmp_path / "0.tfrecords", [png(3)]))
    assert pickle.loads(pickle.dumps(record))() == png(3)


def test_other_files(tmp_path):
    (tmp_path / "a.tfrecords").write_bytes(b"hello, hello, hello")
    truncated = write_records(tmp_path / "b.tfrecords", [png(1)])
    truncated.write_bytes(truncated.read_bytes()[:-1])
    for name in ("a", "b", "c"):
        with pytest.raises(ImageError, match=f"{name}.tfrecords"):
            list_records(tmp_path / f"{name}.tfrecords")
    assert list_records(write_records(tmp_path / "empty.tfrecords", [])) == []


@pytest.mark.parametrize(
    "message",
    [
        field(1, field(1, field(1, b"other") + field(2, b""))),  # no image
        field(1, 5),  # an integer for the features
        field(1, field(1, field(1, b"image") + field(2, field(3, field(1, 5))))),  # an integer
        b"\x0a\xff",  # truncated
        b"\x0f",  # an unknown type
        b"\xff" * 12,  # an endless integer
        example(b"", 0)[:-3],
    ],
)
def test_a_record_without_an_image(message, tmp_path):
    path = tmp_path / "4.tfrecords"
    path.write_bytes(framed(message))
    (record,) = list_records(path)
    with pytest.raises(ImageError, match=r"4\.tfrecords at byte 12 "):
        record()


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=100)
def test_any_bytes_give_features_or_a_clear_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.tfrecords"
    path.write_bytes(framed(data))
    (record,) = list_records(path)
    with pytest.raises(ImageError):
        record()
