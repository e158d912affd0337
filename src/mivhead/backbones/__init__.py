"""Frozen backbones by name, file or address: images in, `Features` out.

Listing names imports neither PyTorch nor timm; loading does.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mivhead.backbones.paper import PAPER
from mivhead.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from mivhead.backbones.base import Backbone
    from mivhead.backbones.callables import from_callable
    from mivhead.backbones.module import from_module
    from mivhead.preset import Preset

__all__ = ["DEFAULT_BACKBONE", "from_callable", "from_module", "list_backbones", "load_backbone"]

DEFAULT_BACKBONE = "efficientnet_lite0"

# name -> the module whose `load(spec, weights=, preset=, device=, dtype=, **options)` makes it
_HOMES = dict.fromkeys(
    ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"),
    "mivhead.backbones.efficientnet_lite",
) | dict.fromkeys(PAPER, "mivhead.backbones.timm_models")

# how a spec begins -> its module, which gets the whole spec
_SCHEMES = {
    "timm:": "mivhead.backbones.timm_models",
    "hf:": "mivhead.backbones.transformers",
    "http://": "mivhead.backbones.http",
    "https://": "mivhead.backbones.http",
}


_LATER = {
    "from_callable": "mivhead.backbones.callables",
    "from_module": "mivhead.backbones.module",
}


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch on first use."""
    if name not in _LATER:
        raise AttributeError(f"module 'mivhead.backbones' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def list_backbones() -> list[str]:
    """Names that `load_backbone` takes.

    >>> "efficientnet_lite0" in list_backbones()
    True
    """
    return sorted(_HOMES)


def load_backbone(
    spec: str | Path = DEFAULT_BACKBONE,
    *,
    weights: str | Path | None = None,
    preset: Preset | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float16",
    **options: Any,
) -> Backbone:
    """Load a frozen backbone with its trained weights.

    Parameters
    ----------
    spec
        One of `list_backbones()`; `timm:NAME` for any model of timm; the path of an `.onnx` file;
        `hf:FOLDER_OR_ID` for a model of transformers; `http://...` or `https://...` for an API.
    weights
        A checkpoint to take instead of the usual weights (`.safetensors`, `.pth`), where the
        backbone is an architecture. `"random"` gives untrained weights, for tests of shapes only.
    preset
        Other taps, pool sizes or preprocessing than the ones that it suggests.
    device
        Where it runs, such as "cpu" or "cuda"; by default a GPU if there is one.
    dtype
        The type that features are rounded to: float16, float32 or float64.
    options
        What only some kinds of backbones take, such as `outputs` of an ONNX file.

    Examples
    --------
    >>> import numpy as np
    >>> backbone = load_backbone("efficientnet_lite0")
    >>> features = backbone.extract([np.zeros((60, 80, 3), np.uint8)])
    >>> list(features.layout.values())
    [(112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)]
    """
    spec = str(spec)
    home = _home(spec)
    from mivhead.backbones.base import default_device, storage_type

    backbone: Backbone = import_module(home).load(
        spec,
        weights=weights,
        preset=preset,
        device=default_device(device),
        dtype=storage_type(dtype),
        **options,
    )
    return backbone


def _home(spec: str) -> str:
    """Find the module that loads this spec."""
    for scheme, module in _SCHEMES.items():
        if spec.startswith(scheme):
            return module
    if spec.endswith(".onnx"):
        return "mivhead.backbones.onnx_model"
    if spec in _HOMES:
        return _HOMES[spec]
    nearest = difflib.get_close_matches(spec, _HOMES, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(_HOMES)}."
    raise InputError(f"There is no backbone named {spec!r}: {hint}")
