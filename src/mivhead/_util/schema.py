"""Frozen dataclasses to JSON and back, with a closed schema.

Reading trusts nothing: unknown keys and wrong types are errors that name the place. A missing key
takes the field's default.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

MAX_NESTING = 100  # of lists and objects in a JSON document


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document of unknown origin; raise a ValueError if it is not one."""
    try:
        document = json.loads(text)
        inner = [document]
        for _ in range(MAX_NESTING + 1):  # more could exhaust the stack of whoever handles it
            inner = [
                part
                for value in inner
                if isinstance(value, dict | list)
                for part in (value.values() if isinstance(value, dict) else value)
            ]
        if inner:
            raise RecursionError
    except RecursionError:
        raise ValueError("the JSON document is nested too deeply") from None
    return document


def to_json(value: Any) -> Any:
    """Return a dataclass of numbers, strings, None, tuples and dataclasses as plain values."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return [to_json(part) for part in value] if isinstance(value, tuple) else value


def from_json(kind: type[T], document: Any, where: str) -> T:
    """Make a dataclass from a JSON object, checking every key and type.

    >>> from mivhead.backbones.preset import BlockPreset
    >>> from_json(BlockPreset, {"tau": "high"}, "block0")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: block0.tau is not valid: 'high'.
    """
    if not isinstance(document, Mapping):
        raise InputError(f"{where} must be an object, got {document!r:.80}.")
    hints = _hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if unknown := sorted(set(document) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{where} has the unknown key {unknown[0]!r}.{hint}")
    values = {}
    for name, field in known.items():
        if name in document:
            values[name] = _read(hints[name], document[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where} lacks the key {name!r}.")
    return kind(**values)


# Evaluating annotations takes longer than checking values.
_hints: Callable[[Any], dict[str, Any]] = lru_cache(maxsize=128)(get_type_hints)


def check_types(value: Any) -> None:
    """Check the fields of a dataclass that a user filled in.

    >>> from mivhead.head.recipe import Recipe
    >>> Recipe(steps=1.5)
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: steps is not valid: 1.5.
    """
    for name, hint in _hints(type(value)).items():
        chosen = getattr(value, name)
        if get_origin(hint) is Literal:
            check_one_of(name, chosen, get_args(hint))
        _read(hint, chosen.item() if hasattr(chosen, "item") else chosen, name)  # of NumPy


def split_tensors(
    tensors: Mapping[str, NDArray[Any]], groups: Sequence[str]
) -> tuple[dict[str, NDArray[Any]], ...]:
    """Sort tensors named `group.name` into their groups; refuse a name without a known group."""
    sorted_: dict[str, dict[str, NDArray[Any]]] = {group: {} for group in groups}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        if group not in sorted_:
            raise InputError(f"tensor {name!r} is unexpected.")
        sorted_[group][rest] = tensor
    return tuple(sorted_.values())


def check_tensors(tensors: Mapping[str, NDArray[Any]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that exactly these float32 tensors exist, with these shapes, and are finite."""
    import numpy as np

    if different := sorted(tensors.keys() ^ shapes.keys()):
        kind = "unexpected" if different[0] in tensors else "missing"
        raise InputError(f"tensor {different[0]!r} is {kind}.")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]) or tensor.dtype != np.float32:
            raise InputError(
                f"tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"expected float32 of shape {tuple(shapes[name])}."
            )
        if not np.isfinite(tensor).all():
            raise InputError(f"tensor {name!r} holds NaN or infinity.")


def _read(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return from_json(kind, value, where)  # type: ignore[arg-type]  # kind is a class
    origin, args = get_origin(kind), get_args(kind)
    if type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        return None if value is None else _read(inner, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) == len(value):
            return tuple(_read(k, v, where) for k, v in zip(kinds, value, strict=True))
    elif origin is Literal and isinstance(value, str) and value in args:
        return value
    elif kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif (kind in (bool, int, str) or origin in (dict, list)) and type(value) is (origin or kind):
        return value
    raise InputError(f"{where} is not valid: {value!r:.80}.")
