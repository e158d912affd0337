"""Image sets in Meta-Dataset's format: `dataset_spec.json` and one `.tfrecords` file per class.

The first half opens such a set; the second half reads TFRecord files and `tf.train.Example`
messages without TensorFlow, which would be too large a dependency for a few hundred lines.

Classes are numbered consecutively: first those of the training split, then validation, then test.
Omniglot is split by alphabet, and the classes of an alphabet have consecutive numbers.

A TFRecord file is a sequence of records: length (8 bytes), checksum of the length (4), data,
checksum of the data (4). Numbers are little-endian, checksums are masked CRC-32C. The data is a
protocol buffer that maps names to lists of bytes, floats or integers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mivhead._util.schema import parse_json
from mivhead.errors import ImageError, InputError, check_one_of, reading
from mivhead.images.decoding import MAX_FILE_BYTES
from mivhead.images.imageset import ImageSet, ImageSource, normal

SPECIFICATION = "dataset_spec.json"
SPLITS = ("train", "valid", "test")
_MAX_BYTES = 64 * 2**20
_POOL = "test"  # for classes that have separate images for training and testing


@dataclass(frozen=True)
class _RecordClass:
    """A class: its name, its file and the number of images according to the specification."""

    name: str
    file: Path
    images: int


def open_records(folder: Path, *, split: str = "test", per_class: int | None = None) -> ImageSet:
    """Open the classes of one split; no image is read yet.

    The folder contains `dataset_spec.json` and the records. Images are in the order of class
    numbers and records, at most `per_class` of each class. Omniglot's classes are named
    `alphabet.character`.
    """
    check_one_of("split", split, SPLITS)
    sources, labels = [], []
    names = set()
    for each in _classes(folder, _read_specification(folder), split):
        if each.name in names:
            raise InputError(f"{folder / SPECIFICATION} has two classes named {each.name!r}.")
        names.add(each.name)
        records = list_records(each.file)
        if len(records) != each.images:
            raise InputError(
                f"{each.file} holds {len(records):,} images, but {SPECIFICATION} says "
                f"{each.images:,}: convert or download the set again."
            )
        for number, record in enumerate(records[:per_class]):
            place = f"{each.file}, image {number}"
            sources.append(ImageSource(f"{each.name}/{number:05}", RecordImage(record), place))
            labels.append(each.name)
    if not sources:
        raise InputError(f"{folder} has no images in its {split} split.")
    return ImageSet(tuple(sources), tuple(labels))


def _read_specification(folder: Path) -> Mapping[str, Any]:
    path = folder / SPECIFICATION
    with reading(path, ValueError):
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is larger than {_MAX_BYTES // 2**20} MiB.")
        document = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a Meta-Dataset specification.")
    return document


def _classes(folder: Path, document: Mapping[str, Any], split: str) -> Iterator[_RecordClass]:
    """Yield the classes of a split; anything missing or of the wrong type is an error."""
    where = folder / SPECIFICATION
    try:
        pattern = document["file_pattern"]
        if "/" in pattern or "\\" in pattern or "{}" not in pattern:
            raise InputError(f"{where} has the file pattern {pattern!r}; expected {{}}.tfrecords.")
        for number, name in _names(document, split):
            images, file = document["images_per_class"][str(number)], str(number)
            if isinstance(images, dict):  # separate files for training and testing
                images, file = images[_POOL], f"{number}_{_POOL}"
            filled = pattern.replace("{}_{}", "{}").replace("{}", file)
            yield _RecordClass(normal(name), folder / filled, int(images))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{where} is not a supported Meta-Dataset specification: "
            f"{type(error).__name__} {error}."
        ) from error


def _names(document: Mapping[str, Any], split: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each class of a split."""
    names = document["class_names"]
    if "superclasses_per_split" not in document:
        for number in _span(document["classes_per_split"], split):
            yield number, str(names[str(number)])
        return
    sizes = document["classes_per_superclass"]
    titles = document["superclass_names"]
    for group in _span(document["superclasses_per_split"], split):
        first = sum(sizes[str(before)] for before in range(group))
        title = str(titles[str(group)])
        for number in range(first, first + sizes[str(group)]):
            member = str(names[str(number)]).removeprefix(f"{title}-")
            yield number, f"{title.replace('.', '_')}.{member}"


def _span(counts: Mapping[str, int], split: str) -> range:
    """Return the numbers of a split, which follow those of the preceding splits."""
    place = SPLITS.index(split)
    first = sum(counts[each.upper()] for each in SPLITS[:place])
    return range(first, first + counts[split.upper()])


# TFRecord files.

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER = _LENGTH.size + _CHECKSUM.size
_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits reversed
_BLOCK = 1024  # bytes looked up at once
# A checksum starts at 0xFFFFFFFF, which is its value after these four bytes when it starts at 0.
_START = bytes.fromhex("54641f64")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # field types of protocol buffers


@dataclass(frozen=True, slots=True)  # a set may have millions
class Record:
    """Location of one record; any process that can access the file can read it."""

    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Return its data after verifying the checksum."""
        with reading(self.path, kind=ImageError), self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
            end = file.read(_CHECKSUM.size)
        if len(end) < _CHECKSUM.size or masked_crc(data) != _CHECKSUM.unpack(end)[0]:
            raise ImageError(
                f"{self.path} is corrupted: the checksum of the record at byte {self.offset:,} is "
                "wrong; convert or download it again."
            )
        return data


@dataclass(frozen=True, slots=True)
class RecordImage:
    """Reads the encoded image of one record; the `get` of an `ImageSource`."""

    record: Record

    def __call__(self) -> bytes:
        """Return the content of the image file."""
        place = f"{self.record.path} at byte {self.record.offset:,}"
        try:
            image = parse_example(self.record.read()).get("image", [])
        except (ValueError, IndexError, struct.error) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"{place} is not a tf.train.Example: {error}.") from error
        if len(image) != 1 or not isinstance(image[0], bytes):
            raise ImageError(f"{place} has no feature 'image' with the content of one image.")
        return image[0]


def list_records(path: Path) -> list[Record]:
    """Return the records of a file; their data is neither read nor verified yet."""
    if not path.exists():
        raise ImageError(f"{path} does not exist.")
    with reading(path, kind=ImageError), path.open("rb") as file:
        return list(_scan(path, file, path.stat().st_size))


def _scan(path: Path, file: Any, size: int) -> Iterator[Record]:
    offset = 0
    while offset < size:
        file.seek(offset)
        header = file.read(_HEADER)
        if len(header) < _HEADER or (
            _length_crc(header[:8]) != _CHECKSUM.unpack_from(header, _LENGTH.size)[0]
        ):
            raise ImageError(
                f"{path} is not a TFRecord file, or is corrupted at byte {offset:,}; convert or "
                "download it again."
            )
        length = _LENGTH.unpack_from(header)[0]
        end = offset + _HEADER + length + _CHECKSUM.size
        if length > MAX_FILE_BYTES or end > size:
            raise ImageError(
                f"{path} is truncated: the record at byte {offset:,} has {length:,} bytes; convert "
                "or download it again."
            )
        yield Record(path, offset + _HEADER, length)
        offset = end


@lru_cache(maxsize=2**14)  # the records of a file have similar lengths
def _length_crc(length: bytes) -> int:
    return masked_crc(length)


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C as stored in TFRecord files: rotated, plus a constant.

    >>> hex(masked_crc(b"123456789"))
    '0xc78ab0e5'
    """
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli); the standard library has only CRC-32.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    tables, places = _tables(), np.arange(_BLOCK)
    # Leading zeros do not change a checksum that starts at 0: they fill the first block.
    padding = bytes(-(len(_START) + len(data)) % _BLOCK)
    blocks = np.frombuffer(padding + _START + data, np.uint8).reshape(-1, _BLOCK)
    crc = 0
    for block in blocks:
        mixed = block.copy()
        mixed[:4] ^= np.frombuffer(_CHECKSUM.pack(crc), np.uint8)
        crc = int(np.bitwise_xor.reduce(tables[places, mixed]))
    return crc ^ 0xFFFFFFFF


@cache
def _tables() -> Words:
    """Return what each value of each byte in a block contributes to the checksum of the block."""
    base = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        base = np.where(base & 1, (base >> 1) ^ _POLYNOMIAL, base >> 1).astype(np.uint32)
    tables = np.empty((_BLOCK, 256), np.uint32)  # (position, value)
    tables[-1] = base
    for place in range(_BLOCK - 2, -1, -1):  # followed by one more zero byte
        tables[place] = (tables[place + 1] >> 8) ^ base[tables[place + 1] & 0xFF]
    return tables


def parse_example(data: bytes) -> dict[str, list[bytes] | list[int]]:
    r"""Return the features of a `tf.train.Example` that hold bytes or integers.

    >>> parse_example(b"\n\x0f\n\r\n\x05label\x12\x04\x1a\x02\n\x00")
    {'label': []}
    """
    features: dict[str, list[bytes] | list[int]] = {}
    for number, part in _fields(data):
        if number == 1:  # features
            for _, entry in _fields(_as_bytes(part)):
                values = dict(_fields(_as_bytes(entry)))
                name = _as_bytes(values.get(1, b"")).decode()
                features[name] = _feature(_as_bytes(values.get(2, b"")))
    return features


def _feature(data: bytes) -> list[bytes] | list[int]:
    for number, values in _fields(data):
        listed = [value for _, value in _fields(_as_bytes(values))]
        if number == 1:  # a list of bytes
            return [_as_bytes(value) for value in listed]
        if number == 3:  # a list of integers, packed or not
            return [integer for value in listed for integer in _integers(value)]
    return []


def _integers(value: bytes | int) -> Iterator[int]:
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield number


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (_FIXED64, _BYTES, _FIXED32):
            raise ValueError(f"a field has the unknown type {kind}")
        length = 8 if kind == _FIXED64 else 4
        if kind == _BYTES:
            length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError("a field is truncated")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer and the position of the next field."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("an integer has more than 64 bits")


def _as_bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("an integer was found where bytes were expected")
    return value
