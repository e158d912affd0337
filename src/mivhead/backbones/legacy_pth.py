"""Read the tensors of a `.pth` file in PyTorch's format before version 1.6, without PyTorch.

Such a file is five pickles (a magic number, a version, facts about the machine, the tensors as
references to storages, and the list of storages), followed by the raw values of the storages. A
pickle is a program. Python's `pickle` would run it; here it is interpreted by a few lines that know
the operations of these files only, and that can make nothing but numbers, strings, tuples, lists,
dictionaries and references to tensors.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.errors import InputError

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
MAX_DIMENSIONS = 8

_DICT, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
_STORAGES: dict[str, np.dtype[Any]] = {
    "torch FloatStorage": np.dtype("<f4"),
    "torch LongStorage": np.dtype("<i8"),
}


@dataclass(frozen=True)
class _Global:
    """A name that stands for a function or class of Python; it is never imported."""

    name: str


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype[Any]
    count: int


@dataclass(frozen=True)
class _Reference:
    """A tensor: where it is in a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in values


def read_legacy_pth(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file by name, in its order; nothing in the file is run.

    They are read-only, in their memory order in the file, which may hold nothing but a dictionary
    of tensors.
    """
    try:
        return _read(content)
    # What the interpreter and the views raise for anything unexpected.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise InputError(f"this is not a PyTorch file of plain tensors: {error}.") from error


def _read(content: bytes) -> dict[str, NDArray[Any]]:
    stream = io.BytesIO(content)
    magic, version, machine, document, keys = (_interpret(stream) for _ in range(5))
    if magic != MAGIC or version != VERSION or machine.get("little_endian") is not True:
        raise ValueError("it has another format")
    for name, each in document.items():
        if type(name) is not str or type(each) is not _Reference:
            raise ValueError(f"it contains {name!r:.80}, which is not a named tensor")
    needed = {each.storage.key: each.storage for each in document.values()}
    values: dict[str, NDArray[Any]] = {}
    for key in keys:
        storage = needed[key]
        if int.from_bytes(stream.read(8), "little") != storage.count:
            raise ValueError("a storage and its tensor have different sizes")
        values[key] = np.frombuffer(content, storage.dtype, storage.count, stream.tell())
        stream.seek(values[key].nbytes, io.SEEK_CUR)
    if stream.read(1):
        raise ValueError("it has more values than tensors")
    return {name: _view(values[each.storage.key], each) for name, each in document.items()}


def _view(values: NDArray[Any], tensor: _Reference) -> NDArray[Any]:
    """Return a tensor as a view of its storage, of which it must be a part."""
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    if len(tensor.shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a tensor has an impossible shape")
    steps = ((side - 1) * stride for side, stride in zip(tensor.shape, tensor.strides, strict=True))
    if 0 in tensor.shape or tensor.offset + sum(steps) >= len(values):
        raise ValueError("a tensor is larger than its storage")
    strides = [stride * values.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(
        values[tensor.offset :], tensor.shape, strides, writeable=False
    )


_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _interpret(stream: io.BytesIO) -> Any:
    """Interpret one pickle, operation by operation."""
    stack: list[Any] = []
    marks: list[list[Any]] = []  # the stacks below each mark
    memo: dict[int, Any] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(stream):
        name = operation.name
        if name == "STOP":
            (result,) = stack
            return result
        if name in _NUMBERS or name == "BINUNICODE":
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": {}}[name])
        elif name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, marks.pop()
            if name == "TUPLE":
                stack.append(tuple(items))
            elif name == "APPENDS":
                _expect(stack[-1], list).extend(items)
            else:
                _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "SETITEM":
            key, value = stack[-2:]
            del stack[-2:]
            _expect(stack[-1], dict)[key] = value
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        elif name == "BINPERSID":
            stack.append(_storage(*stack.pop()))
        elif name == "REDUCE":
            arguments = _expect(stack.pop(), tuple)
            stack.append(_make(_expect(stack.pop(), _Global), arguments))
        elif name == "BUILD":  # attributes of a dictionary: versions of layers, which are not used
            stack.pop()
            _expect(stack[-1], dict)
        elif name != "PROTO":
            raise ValueError(f"it uses the operation {name}")
    raise ValueError("it is truncated")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _storage(kind: str, dtype: _Global, key: str, device: str, count: int, part: None) -> _Storage:
    if (kind, device, part) != ("storage", "cpu", None) or type(key) is not str:
        raise ValueError("a storage is not plain")
    return _Storage(key, _STORAGES[_expect(dtype, _Global).name], _expect(count, int))


def _make(function: _Global, arguments: tuple[Any, ...]) -> Any:
    """Do what the two functions that occur in these files would do."""
    if function.name == _DICT and not arguments:
        return {}
    if function.name == _TENSOR:
        storage, offset, shape, strides, _requires_grad, _hooks = arguments
        return _Reference(
            _expect(storage, _Storage), offset, _expect(shape, tuple), _expect(strides, tuple)
        )
    raise ValueError(f"it calls {function.name}")
