"""Frozen backbones by name: images in, `Features` out.

Listing names imports neither PyTorch nor timm; loading does.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from mivhead.errors import InputError

if TYPE_CHECKING:
    import torch

    from mivhead.backbones.base import Backbone
    from mivhead.preset import Preset

__all__ = ["DEFAULT_BACKBONE", "list_backbones", "load_backbone"]

DEFAULT_BACKBONE = "efficientnet_lite0"

# name -> the module whose `load(name, preset=, device=, dtype=)` makes it
_HOMES = dict.fromkeys(
    ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"),
    "mivhead.backbones.efficientnet_lite",
)


def list_backbones() -> list[str]:
    """Names that `load_backbone` takes.

    >>> "efficientnet_lite0" in list_backbones()
    True
    """
    return sorted(_HOMES)


def load_backbone(
    name: str = DEFAULT_BACKBONE,
    *,
    preset: Preset | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float16",
) -> Backbone:
    """Load a frozen backbone with its trained weights.

    Parameters
    ----------
    name
        One of `list_backbones()`.
    preset
        Other taps, pool sizes or preprocessing than the ones that it suggests.
    device
        Where it runs, such as "cpu" or "cuda"; by default a GPU if there is one.
    dtype
        The type that features are rounded to: float16, float32 or float64.

    Examples
    --------
    >>> import numpy as np
    >>> backbone = load_backbone("efficientnet_lite0")
    >>> backbone.extract([np.zeros((60, 80, 3), np.uint8)])
    Features(n=1, block0: map 112x14x14 float16; block1: map 1280x7x7 float16)
    """
    if name not in _HOMES:
        nearest = difflib.get_close_matches(name, _HOMES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(_HOMES)}."
        raise InputError(f"There is no backbone named {name!r}: {hint}")
    import torch

    if str(dtype).removeprefix("torch.") not in ("float16", "float32", "float64"):
        raise InputError(f"dtype must be float16, float32 or float64, got {str(dtype)!r}.")
    backbone: Backbone = import_module(_HOMES[name]).load(
        name,
        preset=preset,
        device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
    )
    return backbone
