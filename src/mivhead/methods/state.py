"""What a model file holds of a rival: its hyperparameters, the layout of features, tensors.

Reading trusts nothing: every key, type, name, shape and value is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor

from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.schema import from_json

# Belong to the run, not to the model; the MIV-head keeps its recipe and blocks in its own state.
NOT_STORED = frozenset({"random_state", "device", "verbose", "images_at_once", "recipe", "preset"})
MAX_SIZE = 2**20  # of a dimension; keeps a forged file from overflowing


def params_to_json(estimator: Any) -> dict[str, Any]:
    """Hyperparameters that are stored with a model, as plain values."""
    params: dict[str, Any] = estimator.get_params(deep=False)
    return {name: value for name, value in params.items() if name not in NOT_STORED}


def restore_params(estimator: Any, document: Any) -> None:
    """Set hyperparameters from JSON, checked against the annotations of the constructor."""
    init = type(estimator).__init__
    hints = get_type_hints(init)
    fields = [
        (name, hints[name], field(default=parameter.default))
        for name, parameter in inspect.signature(init).parameters.items()
        if name != "self" and name not in NOT_STORED
    ]
    schema = make_dataclass("Params", fields, frozen=True)
    estimator.set_params(**vars(from_json(schema, document, "config.params")))


def layout_to_json(layout: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Write a layout of features as plain values."""
    return {name: list(shape) for name, shape in layout.items()}


def read_layout(document: Any) -> Features:
    """Check a stored layout; it comes back as Features of no images.

    >>> read_layout({"block0.map": [8, 2, 2]})
    Features(n=0, block0: map 8x2x2 float32)
    """
    if not isinstance(document, Mapping):
        raise InputError(f"config.layout must be an object, got {document!r:.80}.")
    for name, shape in document.items():
        whole = isinstance(shape, list) and all(type(size) is int for size in shape)
        if not whole or not all(0 < size <= MAX_SIZE for size in shape):
            raise InputError(f"config.layout.{name} is not valid: {shape!r:.80}.")
    # Features check the names and the numbers of dimensions.
    return Features.from_tensors({k: torch.empty(0, *v) for k, v in document.items()})


def check_learned(
    tensors: Mapping[str, Tensor], dimensions: Mapping[str, str], known: Mapping[str, int]
) -> None:
    """Check tensors against the names of their dimensions; all must be there and be finite.

    Dimensions whose sizes are not known may have any, but the same everywhere. A tensor called
    `labels` holds class numbers, every other one floats.

    >>> check_learned({"means": torch.zeros(5, 3)}, {"means": "class channel"}, {"channel": 4})
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: tensor 'means' has shape (5, 3), expected class=5 channel=4.
    """
    if different := sorted(tensors.keys() ^ dimensions.keys()):
        kind = "unexpected" if different[0] in tensors else "missing"
        raise InputError(f"tensor {different[0]!r} is {kind}.")
    sizes = dict(known)
    for name, dims in dimensions.items():
        tensor, names = tensors[name], dims.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(names):
            raise InputError(f"tensor {name!r} has shape {shape}, expected ({', '.join(names)}).")
        for dim, size in zip(names, shape, strict=True):
            sizes.setdefault(dim, int(dim) if dim.isdigit() else size)
        if shape != tuple(sizes[dim] for dim in names):
            expected = " ".join(f"{dim}={sizes[dim]}" for dim in names)
            raise InputError(f"tensor {name!r} has shape {shape}, expected {expected}.")
        _check_values(name, tensor, sizes)


def _check_values(name: str, tensor: Tensor, sizes: Mapping[str, int]) -> None:
    expected = (torch.int64,) if name == "labels" else (torch.float32, torch.float64)
    if tensor.dtype not in expected:
        raise InputError(f"tensor {name!r} has type {tensor.dtype}, expected {expected[-1]}.")
    if name == "labels":
        if tensor.numel() and not (0 <= int(tensor.min()) <= int(tensor.max()) < sizes["class"]):
            raise InputError(f"tensor 'labels' must hold class numbers below {sizes['class']}.")
    elif not torch.isfinite(tensor).all():
        raise InputError(f"tensor {name!r} holds NaN or infinity.")
