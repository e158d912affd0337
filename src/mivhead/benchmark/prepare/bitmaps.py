"""Downloads that hold many images in one binary file: MNIST, CIFAR, Quick Draw."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from mivhead.benchmark.prepare.items import Item, find_file
from mivhead.benchmark.prepare.splits import DRAWINGS
from mivhead.errors import InputError

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

DRAWINGS_PER_CLASS = 1000  # of more than 100,000; a task takes hardly more than 100

_SIDE = 32  # of CIFAR's images
_UNSIGNED_BYTES = 8  # the type of values, in the head of an IDX file


def mnist(raw: Path) -> Iterator[Item]:
    """MNIST: the 10,000 test images, white on black."""
    images = _read_idx(_find_idx(raw, "t10k-images", 3), 3)  # (image, row, column)
    labels = _read_idx(_find_idx(raw, "t10k-labels", 1), 1)  # (image)
    if len(images) != len(labels):
        raise InputError(f"{raw} has {len(images)} test images, but {len(labels)} labels.")
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield Item(str(label), f"{number:05}", Image.fromarray(image))


def cifar10(raw: Path) -> Iterator[Item]:
    """CIFAR-10, binary version: the 10,000 test images."""
    return _cifar(find_file(raw, "test_batch.bin"), find_file(raw, "batches.meta.txt"), 1)


def cifar100(raw: Path) -> Iterator[Item]:
    """CIFAR-100, binary version: the 10,000 test images by fine class."""
    return _cifar(find_file(raw, "test.bin"), find_file(raw, "fine_label_names.txt"), 2)


def quickdraw(raw: Path) -> Iterator[Item]:
    """Quick, Draw! bitmaps: the first drawings of every test class, white on black."""
    for label in DRAWINGS:
        path = find_file(raw, f"{label}.npy")
        try:
            drawings = np.load(path, mmap_mode="r", allow_pickle=False)  # (drawing, pixel)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path} cannot be read: {error}.") from error
        if drawings.dtype != np.uint8 or drawings.shape[1:] != (28 * 28,):
            raise InputError(
                f"{path} holds {drawings.dtype} of shape {drawings.shape}; expected bitmaps, "
                "uint8 of shape (n, 784)."
            )
        for number, pixels in enumerate(drawings[:DRAWINGS_PER_CLASS]):
            yield Item(label, f"{number:05}", Image.fromarray(np.array(pixels).reshape(28, 28)))


def _cifar(path: Path, names_path: Path, label_bytes: int) -> Iterator[Item]:
    """Read rows of labels (the last one is meant) and the three colours, one after the other."""
    names = names_path.read_text(encoding="utf-8", errors="replace").split()
    length = label_bytes + 3 * _SIDE**2
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(data) or len(data) % length:
        raise InputError(f"{path} is damaged: {len(data):,} bytes are not rows of {length:,}.")
    for number, row in enumerate(data.reshape(-1, length)):
        label = int(row[label_bytes - 1])
        if label >= len(names):
            raise InputError(f"{path} has the label {label}, {names_path} only {len(names)} names.")
        colours = row[label_bytes:].reshape(3, _SIDE, _SIDE)  # (colour, row, column)
        pixels = np.ascontiguousarray(colours.transpose(1, 2, 0))  # (row, column, colour)
        yield Item(names[label], f"{number:05}", Image.fromarray(pixels))


def _find_idx(raw: Path, name: str, dimensions: int) -> Path:
    both = (f"{name}-idx{dimensions}-ubyte", f"{name}.idx{dimensions}-ubyte")
    return find_file(raw, *both, *(f"{each}.gz" for each in both))


def _read_idx(path: Path, dimensions: int) -> Bytes:
    """Read an IDX file: two zeros, type, dimensions, big-endian lengths, values."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    head = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:head], ">u4").astype(int) if len(data) >= head else np.zeros(1)
    if data[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]) or len(data) != head + shape.prod():
        raise InputError(f"{path} is not an IDX file of {dimensions} dimensions, or is damaged.")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)
