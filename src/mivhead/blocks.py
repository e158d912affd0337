"""`Block`: one block's output for n images, and how arrays are read into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mivhead.errors import InputError

Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"

FLOATS = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Block:
    """One block's output: a patch map `(n, C, H, W)`, a token `(n, C)`, or both."""

    map: Tensor | None = None
    token: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parts that are there, by name."""
        return {k: v for k, v in (("map", self.map), ("token", self.token)) if v is not None}

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return next(iter(self.tensors.values())).shape[1]

    def apply(self, change: Callable[[Tensor], Tensor]) -> Block:
        """Change every part in the same way."""
        return Block(**{k: change(v) for k, v in self.tensors.items()})


def is_array(x: object) -> bool:
    """Whether x is a NumPy array or a PyTorch tensor."""
    return isinstance(x, np.ndarray | Tensor)


def describe(x: object) -> str:
    """Type and shape of anything, for errors."""
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def read_block(entry: Any, name: str) -> Block:
    """Read one entry of a list of blocks, which is called `name` in errors."""
    if isinstance(entry, Block):
        entry = entry.tensors
    if isinstance(entry, Mapping):
        if not entry or set(entry) - {"map", "token"}:
            raise InputError(
                f"{name}: a block has the keys 'map' and/or 'token', got {sorted(entry)}."
            )
        parts = {k: _tensor(v, f"{name}.{k}") for k, v in entry.items() if v is not None}
    else:
        tensor = _tensor(entry, name)
        if tensor.ndim == 2:
            parts = {"token": tensor}
        elif tensor.ndim == 3:
            parts = {"map": _patches_to_map(tensor)}
        else:
            parts = {"map": tensor}
    if not parts:
        raise InputError(f"{name}: a block needs a map, a token or both.")
    for part, ndim, expected in (("map", 4, "(n, C, H, W)"), ("token", 2, "(n, C)")):
        if part in parts and (parts[part].ndim != ndim or 0 in parts[part].shape[1:]):
            raise InputError(
                f"{name}.{part} has shape {tuple(parts[part].shape)}, expected {expected} "
                "with no empty dimension."
            )
    if len({t.shape[1] for t in parts.values()}) > 1:
        shapes = ", ".join(f"{k} {tuple(t.shape)}" for k, t in parts.items())
        raise InputError(f"{name}: map and token must have the same channels, got {shapes}.")
    return Block(**parts)


def _tensor(x: Any, name: str) -> Tensor:
    if not is_array(x):
        raise InputError(f"{name}: expected a NumPy array or a PyTorch tensor, got {describe(x)}.")
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        x = x.copy()  # PyTorch knows no read-only tensors
    try:
        tensor = torch.as_tensor(x).detach()
    except TypeError:
        raise InputError(f"{name}: arrays of type {x.dtype} cannot be used.") from None
    if tensor.dtype not in FLOATS:
        raise InputError(
            f"{name} has type {str(tensor.dtype).removeprefix('torch.')}, "
            "expected float16, float32 or float64."
        )
    if tensor.ndim not in (2, 3, 4):
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, expected (n, C), (n, patches, C) "
            "or (n, C, H, W)."
        )
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        bad = (~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0, 0]
        raise InputError(
            f"{name} of shape {tuple(tensor.shape)} holds NaN or infinity (first in image {bad})."
        )
    return tensor


def _patches_to_map(patches: Tensor) -> Tensor:
    """(n, P, C) to (n, C, s, s) for P = s * s; otherwise (n, C, P, 1), which has no grid."""
    n, count, channels = patches.shape
    side = math.isqrt(count)
    height, width = (side, side) if side * side == count else (count, 1)
    return patches.transpose(1, 2).reshape(n, channels, height, width)
