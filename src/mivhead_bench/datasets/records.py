"""Image sets in Meta-Dataset's format: `dataset_spec.json` and one `.tfrecords` file per class.

Classes are numbered consecutively: first those of the training split, then validation, then test.
Omniglot is split by alphabet, and the classes of an alphabet have consecutive numbers.

A TFRecord file is a sequence of records: length (8 bytes, little-endian), checksum of the length
(4), data, checksum of the data (4). The data is a `tf.train.Example`. Checksums are not verified: a
damaged image fails when it is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
    text_format,
)

from mivhead._util.schema import parse_json
from mivhead.errors import ImageError, InputError, check_one_of, reading
from mivhead.images.decoding import MAX_FILE_BYTES
from mivhead.images.imageset import ImageSet, ImageSource, normal

SPECIFICATION = "dataset_spec.json"
SPLITS = ("train", "valid", "test")
MAX_BYTES = 64 * 2**20  # of a specification
_POOL = "test"  # for classes that have separate images for training and testing
_HEADER = struct.Struct("<QI")  # length of the data, and a checksum
_CHECKSUM = 4  # bytes, after the data

# The parts of tf.train.Example that hold images; the entries of a map are messages, too.
_EXAMPLE = """
name: "example.proto" package: "mivhead"
message_type { name: "Example" field {
  name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Features" } }
message_type { name: "Features" field {
  name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" } }
message_type { name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Feature" field {
  name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Bytes" } }
message_type { name: "Bytes" field {
  name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
"""


def open_records(folder: Path, *, split: str = "test") -> ImageSet:
    """Open the classes of one split, in the order of their numbers; no image is read yet.

    Omniglot's classes are named `alphabet.character`.
    """
    check_one_of("split", split, SPLITS)
    path = folder / SPECIFICATION
    with reading(path, ValueError):
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES // 2**20} MiB.")
        document = parse_json(path.read_text(encoding="utf-8"))
    with reading(path, LookupError, TypeError, ValueError, AttributeError):
        classes = list(_classes(document, split))
    sources: list[ImageSource] = []
    labels: list[str] = []
    for name, file, images in classes:
        records = list_records(folder / file)
        if name in labels or len(records) != images:
            raise InputError(f"{path} and {file} do not fit: convert or download the set again.")
        for number, record in enumerate(records):
            place = f"{folder / file}, image {number}"
            sources.append(ImageSource(f"{name}/{number:05}", record, place))
            labels.append(name)
    if not sources:
        raise InputError(f"{folder} has no images in its {split} split.")
    return ImageSet(tuple(sources), tuple(labels))


def _classes(document: Mapping[str, Any], split: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, file and number of images of the classes of a split."""
    pattern = str(document["file_pattern"])
    if "/" in pattern or "\\" in pattern or "{}" not in pattern:
        raise ValueError(f"the file pattern {pattern!r} is not like {{}}.tfrecords")
    for number, name in _names(document, split):
        images, file = document["images_per_class"][str(number)], str(number)
        if isinstance(images, dict):  # separate files for training and testing
            images, file = images[_POOL], f"{number}_{_POOL}"
        filled = pattern.replace("{}_{}", "{}").replace("{}", file)
        yield normal(name), filled, int(images)


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
    first = sum(counts[earlier.upper()] for earlier in SPLITS[:place])
    return range(first, first + counts[split.upper()])


@dataclass(frozen=True, slots=True)  # a set may have millions
class RecordImage:
    """Reads the encoded image of one record; the `get` of an `ImageSource`."""

    path: Path
    offset: int
    length: int

    def __call__(self) -> bytes:
        """Return the content of the image file."""
        place = f"The record of {self.path} at byte {self.offset:,}"
        with reading(place, message.DecodeError, kind=ImageError), self.path.open("rb") as file:
            file.seek(self.offset)
            example = _example().FromString(file.read(self.length))
        images = [e.value.bytes_list.value for e in example.features.feature if e.key == "image"]
        if len(images) != 1 or len(images[0]) != 1:
            raise ImageError(f"{place} has no feature 'image' with the content of one image.")
        content: bytes = images[0][0]
        return content


def list_records(path: Path) -> list[RecordImage]:
    """Return the records of a file; their data is not read yet."""
    records, offset = [], 0
    with reading(path, struct.error, kind=ImageError), path.open("rb") as file:
        size = path.stat().st_size
        while offset < size:
            file.seek(offset)
            length, _ = _HEADER.unpack(file.read(_HEADER.size))
            end = offset + _HEADER.size + length + _CHECKSUM
            if length > MAX_FILE_BYTES or end > size:
                raise ImageError(f"{path} is no TFRecord file, or damaged at byte {offset:,}.")
            records.append(RecordImage(path, offset + _HEADER.size, length))
            offset = end
    return records


@cache
def _example() -> Any:
    """Return the class of `tf.train.Example` messages."""
    file = text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("mivhead.Example"))
