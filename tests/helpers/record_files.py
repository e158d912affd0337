"""Write Meta-Dataset's files the slow and plain way, apart from the code that reads them."""

import json
import struct


def framed(data):
    """A record; its checksums are not read."""
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def varint(value):
    out = bytearray()
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes(out) + bytes([value])


def field(number, content):
    """A field of bytes, or of one number."""
    if isinstance(content, int):
        return varint(number * 8) + varint(content)
    return varint(number * 8 + 2) + varint(len(content)) + content


def example(image, label):
    """The message that Meta-Dataset's converter writes."""
    entries = (
        field(1, b"image") + field(2, field(1, field(1, image))),
        field(1, b"label") + field(2, field(3, field(1, varint(label)))),  # packed
    )
    return field(1, b"".join(field(1, entry) for entry in entries))


def write_records(path, images, label=0):
    path.write_bytes(b"".join(framed(example(image, label)) for image in images))
    return path


def write_set(folder, classes, train=0, valid=0, file_pattern="{}.tfrecords"):
    """Write a set of (name, images); the first classes are for training, then validation."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (_, images) in enumerate(classes):
        write_records(folder / f"{number}.tfrecords", images, number)
    document = {
        "name": folder.name,
        "classes_per_split": {"TRAIN": train, "VALID": valid, "TEST": len(classes) - train - valid},
        "images_per_class": {str(n): len(images) for n, (_, images) in enumerate(classes)},
        "class_names": {str(n): name for n, (name, _) in enumerate(classes)},
        "path": "/path/to/records",
        "file_pattern": file_pattern,
        "__class__": "DatasetSpecification",
    }
    write_specification(folder, document)
    return document


def write_specification(folder, document):
    (folder / "dataset_spec.json").write_text(json.dumps(document, indent=2))
