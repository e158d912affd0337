"""TFRecord files: written by plain code here, read back; damage is found and named."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.errors import ImageError
from mivhead.images.records import RecordImage, crc32c, list_records, parse_example
from tests.helpers.record_files import crc32c as plain_crc32c
from tests.helpers.record_files import example, field, framed, varint, write_records
from tests.helpers.sample_files import png


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
    with pytest.raises(ImageError, match=r"4\.tfrecords is damaged: the checksum .* is wrong"):
        RecordImage(second)()


def test_a_changed_length_is_found(tmp_path):
    path = write_records(tmp_path / "4.tfrecords", [png(1)])
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(ImageError, match=r"4\.tfrecords is not a TFRecord file, or damaged at byt"):
        list_records(path)


@pytest.mark.parametrize("left", [5, 30, -1])
def test_a_file_that_was_cut_off(left, tmp_path):
    path = write_records(tmp_path / "4.tfrecords", [png(1)])
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ImageError, match=r"4\.tfrecords is (cut off|not a TFRecord file)"):
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
        field(1, 5),  # a number for the features
        field(1, field(1, field(1, b"image") + field(2, field(3, field(1, 5))))),  # a number
        b"\x0a\xff",  # cut off
        b"\x0f",  # an unknown type
        b"\xff" * 12,  # a number without end
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
