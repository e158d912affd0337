"""Checkpoints: read without running code, loaded only if every tensor fits."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mivhead.errors import InputError

_WRAPPERS = (
    "state_dict",
    "model",
    "model_state_dict",
    "teacher",
)  # around the weights
_PREFIXES = ("module.", "backbone.")  # of networks that were wrapped for training
_SHOWN = 3  # names listed in an error
# What the readers raise for files that are corrupted, foreign or hold more than tensors.
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(struct.error, pickle.UnpicklingError, SafetensorError),
)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file or of a PyTorch checkpoint.

    A PyTorch checkpoint (`.pth`, `.pt`, `.bin`, ...) is read with `weights_only`. Training code
    often nests the tensors under `state_dict`, `model` or `teacher`, or prefixes their names with
    `module.` or `backbone.`: both are removed.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"The checkpoint {path} does not exist.")
    try:
        document = load_file(path) if path.suffix == ".safetensors" else _read_pickle(path)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{path} is not a checkpoint of plain tensors: {reason.rstrip('.')}."
        ) from error
    return _unwrap(document, path)


def load_exactly(model: nn.Module, tensors: Mapping[str, Tensor], name: str, origin: str) -> None:
    """Load tensors into a model; raise an error if one is missing, unexpected or misshapen."""
    expected = model.state_dict()
    # Counters that inference does not use and that older checkpoints lack.
    counters = {k for k in expected if k.endswith("num_batches_tracked")} - tensors.keys()
    problems = {
        "lacks": expected.keys() - tensors.keys() - counters,
        "also has": tensors.keys() - expected.keys(),
        "has with another shape": {
            k for k, v in expected.items() if k in tensors and tensors[k].shape != v.shape
        },
    }
    if any(problems.values()):
        found = "; ".join(f"it {verb} {_some(keys)}" for verb, keys in problems.items() if keys)
        raise InputError(f"{origin} is not a checkpoint of {name}: {found}.")
    model.load_state_dict({**{k: expected[k] for k in counters}, **tensors}, strict=True)


def state_hash(model: nn.Module) -> str:
    """Return the SHA-256 of the names, types, shapes and values of a model's state.

    >>> from torch import nn
    >>> one = nn.Linear(2, 2)
    >>> two = nn.Linear(2, 2)
    >>> state_hash(one) == state_hash(two)
    False
    >>> _ = two.load_state_dict(one.state_dict())
    >>> state_hash(one) == state_hash(two)
    True
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


def _read_pickle(path: Path) -> Any:
    """Read tensors, plain values and NumPy scalars, which training code often stores as well."""
    make_number: Any = np.float64(0).__reduce__()[0]
    kinds: list[Any] = [np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i8"))]
    allowed = [make_number, (make_number, "numpy.core.multiarray.scalar"), *kinds]  # old name
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, map_location="cpu", weights_only=True)


def _unwrap(document: Any, path: Path) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(document, Mapping) and isinstance(document.get(wrapper), Mapping):
            document = document[wrapper]
    if not isinstance(document, Mapping):
        raise InputError(f"{path} contains no named tensors.")
    tensors = {str(k): v for k, v in document.items() if isinstance(v, Tensor)}
    for prefix in _PREFIXES:
        inside = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        tensors = inside or tensors
    if not tensors:
        raise InputError(f"{path} contains no named tensors.")
    return tensors


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
