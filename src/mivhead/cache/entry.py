"""One entry of the cache as bytes: the features of one image behind a checksum.

Layout: `mivcache`, CRC-32 of all that follows, length of the header, the header (JSON: name, type
and shape of every part, padded so that the values are aligned), the values. The checksum begins
with the entry's key, so that an entry under a wrong name is damaged too.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

Parts: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"

_MAGIC = b"mivcache"
_PREFIX = struct.Struct("<8sI")  # magic, checksum
_LENGTH = struct.Struct("<I")  # of the header
_ALIGN = 64


def encode(key: str, parts: Parts) -> bytes:
    """Pack the parts of one image, such as `block0.map`, under a key.

    >>> data = encode("ab", {"block0.token": np.ones(3, np.float16)})
    >>> decode("ab", data)
    {'block0.token': array([1., 1., 1.], dtype=float16)}
    >>> decode("other", data) is None
    True
    """
    arrays = {
        name: np.ascontiguousarray(part, part.dtype.newbyteorder("<")).reshape(part.shape)
        for name, part in parts.items()
    }
    described = [[name, part.dtype.str, list(part.shape)] for name, part in arrays.items()]
    header = json.dumps(described).encode()
    header += b" " * (-(_PREFIX.size + _LENGTH.size + len(header)) % _ALIGN)
    body: list[Any] = [_LENGTH.pack(len(header)), header, *arrays.values()]
    return b"".join([_PREFIX.pack(_MAGIC, _checksum(key, *body)), *body])  # the only copy


def decode(key: str, data: Any) -> dict[str, np.ndarray[Any, Any]] | None:
    """Unpack an entry as views of `data` (bytes or a memory map); None if it is damaged."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        return None
    magic, checksum = _PREFIX.unpack_from(view)
    body = view[_PREFIX.size :]
    if magic != _MAGIC or checksum != _checksum(key, body):
        return None
    # What has this checksum was written by `encode`: it needs no further check.
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    values = np.frombuffer(body[start:], np.uint8)
    return {
        name: values[place].view(kind).reshape(shape)
        for name, place, kind, shape in _read_header(bytes(body[_LENGTH.size : start]))
    }


@lru_cache(maxsize=64)  # all entries of a backbone have the same header
def _read_header(header: bytes) -> list[tuple[str, slice, str, tuple[int, ...]]]:
    """Name, place among the values, type and shape of every part."""
    parts = []
    start = 0
    for name, kind, shape in json.loads(header):
        end = start + math.prod(shape) * np.dtype(kind).itemsize
        parts.append((name, slice(start, end), kind, tuple(shape)))
        start = end
    return parts


def _checksum(key: str, *body: Any) -> int:
    checksum = zlib.crc32(key.encode())
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    return checksum
