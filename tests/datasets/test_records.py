"""Meta-Dataset's records: sets written small by plain code and read back; damage is reported."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.datasets.records import RecordImage, crc32c, list_records, open_records, parse_example
from mivhead.errors import ImageError, InputError
from mivhead.images.sources import open_labelled
from tests.helpers.record_files import crc32c as plain_crc32c
from tests.helpers.record_files import (
    example,
    field,
    framed,
    varint,
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


def test_records_open_like_any_labelled_images(tmp_path):
    write_set(tmp_path / "birds", CLASSES, train=1, valid=1)
    images = open_labelled(tmp_path / "birds")
    assert images.ids[1:4] == ("robin/00001", "robin/00002", "wren/00000")
    assert images.labels == ("robin",) * 3 + ("wren",) * 2
    assert [first_value(images.load(row)) for row in range(5)] == [3, 4, 5, 6, 7]


def test_the_first_images_of_every_class(tmp_path):
    write_set(tmp_path / "birds", CLASSES, train=2)
    images = open_records(tmp_path / "birds", per_class=2)
    assert [first_value(images.load(row)) for row in range(len(images))] == [3, 4, 6, 7]


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


def test_a_missing_or_short_file(tmp_path):
    write_set(tmp_path / "birds", CLASSES)
    write_records(tmp_path / "birds" / "3.tfrecords", [png(6)])
    with pytest.raises(
        InputError, match=r"3\.tfrecords holds 1 images, but dataset_spec\.json says 2"
    ):
        open_labelled(tmp_path / "birds")
    (tmp_path / "birds" / "3.tfrecords").unlink()
    with pytest.raises(ImageError, match=r"3\.tfrecords does not exist"):
        open_labelled(tmp_path / "birds")


def test_the_error_of_a_damaged_image_names_its_file(tmp_path):
    write_set(tmp_path / "birds", [*CLASSES[:3], ("wren", [png(6), b"no image"])])
    images = open_labelled(tmp_path / "birds")
    with pytest.raises(ImageError, match=r"3\.tfrecords, image 1 is not a JPEG"):
        images.load(len(images) - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes_per_split": {"TRAIN": 0}}, "KeyError 'VALID'"),
        ({"classes_per_split": {"TRAIN": 0, "VALID": "x", "TEST": 2}}, "TypeError"),
        ({"classes_per_split": {"TRAIN": 4, "VALID": 0, "TEST": 0}}, "no images in its test split"),
        ({"class_names": ["a", "b"]}, "TypeError"),
        ({"class_names": {str(n): "same" for n in range(4)}}, "two classes named 'same'"),
        ({"file_pattern": "../{}.tfrecords"}, "has the file pattern"),
        ({"file_pattern": "all.tfrecords"}, "has the file pattern"),
        ({"file_pattern": 5}, "TypeError"),
        ({"images_per_class": {"0": "many"}}, "ValueError"),
    ],
)
def test_a_wrong_specification(change, message, tmp_path):
    document = write_set(tmp_path / "birds", CLASSES)
    write_specification(tmp_path / "birds", {**document, **change})
    with pytest.raises(InputError, match=message):
        open_labelled(tmp_path / "birds")


@pytest.mark.parametrize("content", ["[]", "{", "\xff", '{"split_subgraphs": {}}'])
def test_no_specification_at_all(content, tmp_path):
    (tmp_path / "dataset_spec.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"dataset_spec\.json (is not|cannot be read)"):
        open_labelled(tmp_path)


def test_an_unknown_split(tmp_path):
    write_set(tmp_path / "birds", CLASSES)
    with pytest.raises(InputError, match="split must be one of train, valid, test; got 'tests'"):
        open_records(tmp_path / "birds", split="tests")


def test_checksums_of_the_standard():
    # From RFC 3720, appendix B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


@given(st.binary(max_size=40) | st.integers(1000, 2100).map(lambda n: (b"some bytes" * 210)[:n]))
@settings(deadline=None, max_examples=60)
def test_checksum_equals_the_definition(data):
    assert crc32c(data) == plain_crc32c(data)


def test_images_come_back(tmp_path):
    images = [png(value) for value in range(5)]
    records = list_records(write_records(tmp_path / "0.tfrecords", images, 7))
    assert [RecordImage(record)() for record in records] == images
    assert parse_example(records[0].read())["label"] == [7]


def test_a_source_reads_in_another_process(tmp_path):
    (record,) = list_records(write_records(tmp_path / "0.tfrecords", [png(3)]))
    assert pickle.loads(pickle.dumps(RecordImage(record)))() == png(3)


def test_unusual_but_valid_messages():
    numbers = field(3, field(1, 5) + field(1, 300))  # not packed
    floats = field(2, field(1, b"\0\0\x80\x3f"))
    entries = [("count", numbers), ("weight", floats), ("empty", b"")]
    data = b"".join(field(1, field(1, n.encode()) + field(2, v)) for n, v in entries)
    unknown = field(9, 1) + varint(10 * 8 + 5) + b"\0\0\0\0" + varint(11 * 8 + 1) + bytes(8)
    found = parse_example(unknown + field(1, data))
    assert found == {"count": [5, 300], "weight": [], "empty": []}


@pytest.mark.parametrize("place", ["data", "checksum"])
def test_a_changed_byte_is_found_where_it_matters(place, tmp_path):
    path = write_records(tmp_path / "4.tfrecords", [png(1), png(2)])
    content = bytearray(path.read_bytes())
    content[-20 if place == "data" else -2] ^= 1
    path.write_bytes(content)
    first, second = list_records(path)
    assert RecordImage(first)() == png(1)
    with pytest.raises(ImageError, match=r"4\.tfrecords is corrupted: the checksum .* is wrong"):
        RecordImage(second)()


def test_a_changed_length_is_found(tmp_path):
    path = write_records(tmp_path / "4.tfrecords", [png(1)])
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(ImageError, match=r"not a TFRecord file, or is corrupted at byte 0"):
        list_records(path)


@pytest.mark.parametrize("left", [5, 30, -1])
def test_a_truncated_file(left, tmp_path):
    path = write_records(tmp_path / "4.tfrecords", [png(1)])
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ImageError, match=r"4\.tfrecords is (truncated|not a TFRecord file)"):
        list_records(path)


def test_other_files(tmp_path):
    (tmp_path / "a.tfrecords").write_bytes(b"hello, hello, hello")
    with pytest.raises(ImageError, match="not a TFRecord file"):
        list_records(tmp_path / "a.tfrecords")
    with pytest.raises(ImageError, match=r"b\.tfrecords does not exist"):
        list_records(tmp_path / "b.tfrecords")
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
        RecordImage(record)()


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=100)
def test_any_bytes_give_features_or_a_clear_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.tfrecords"
    path.write_bytes(framed(data))
    (record,) = list_records(path)
    with pytest.raises(ImageError):
        RecordImage(record)()
