"""Frozen backbones by name, file or URL: images in, `Features` out.

`load_backbone` looks up a specification in the tables below and calls `load` of the module named
there, which alone imports PyTorch, timm or OpenCLIP. To add a kind of backbone, write a module with
a `load` function and add a line to a table.

- Kinds: `efficientnet_lite`, `timm_models`, `open_clip_models`, `onnx_model`, `onnx_folder`,
  `http`; made of a function (`callables`) or of a PyTorch module (`module`).
- Shared: `base` and `preset`; `presets` (the named ones); `hub` finds weights, `text` embeds names.
"""

from __future__ import annotations

import difflib
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.imports import lazy
from mivhead.backbones.presets import NAMED, PAPER, PRESETS
from mivhead.errors import InputError

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

    from mivhead.backbones.base import Backbone as Backbone
    from mivhead.backbones.base import Identity as Identity
    from mivhead.backbones.base import preprocess as preprocess
    from mivhead.backbones.callables import from_callable as from_callable
    from mivhead.backbones.module import from_module as from_module
    from mivhead.backbones.preset import Preset

__all__ = [
    "DEFAULT_BACKBONE",
    "Backbone",
    "Identity",
    "from_callable",
    "from_module",
    "list_backbones",
    "load_backbone",
    "preprocess",
]

DEFAULT_BACKBONE = "efficientnet_lite0"

# prefix of a specification -> the module that loads it
_PREFIXES = {
    "timm:": "timm_models",
    "open_clip:": "open_clip_models",
    "hf-onnx:": "onnx_folder",
    "http://": "http",
    "https://": "http",
}
_RESIZABLE = ("timm:", "open_clip:", "hf-onnx:")  # whose input may have another size
_WITH_WEIGHTS = ("timm_models", "open_clip_models")  # that take a checkpoint
# name -> the module whose `load(spec, preset=, device=, dtype=, **options)` builds it
_NAMES = (
    dict.fromkeys(PRESETS, "efficientnet_lite")
    | dict.fromkeys(PAPER, "timm_models")
    | {name: _PREFIXES[f"{spec.partition(':')[0]}:"] for name, spec in NAMED.items()}
)

# `file.py:name` or `module:name`: a backbone in the user's own code
_OWN = re.compile(r".+\.py:\w+|[\w.]+:\w+")

__getattr__, _ = lazy(
    __name__,
    {
        "base": "Backbone Identity preprocess",
        "callables": "from_callable",
        "module": "from_module",
    },
)


def list_backbones() -> list[str]:
    """Return the names that `load_backbone` accepts, sorted.

    >>> "efficientnet_lite0" in list_backbones()
    True
    """
    return sorted(_NAMES)


def load_backbone(
    spec: str | Path | Backbone = DEFAULT_BACKBONE,
    *,
    weights: str | Path | None = None,
    preset: Preset | None = None,
    image_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: DTypeLike | torch.dtype = "float16",
    **options: Any,
) -> Backbone:
    """Load a frozen backbone with its trained weights.

    Parameters
    ----------
    spec : str, Path or Backbone, default="efficientnet_lite0"
        One of `list_backbones()`; `timm:NAME` for any model of timm; `open_clip:MODEL/TAG`,
        `open_clip:OWNER/NAME` or `open_clip:./FOLDER` for one of OpenCLIP; `hf-onnx:OWNER/NAME` or
        `hf-onnx:./FOLDER` for one in the layout of transformers.js, which needs no PyTorch; the
        path of an `.onnx` file; `http://...` or `https://...` for a service; `file.py:name` or
        `module:name` for a backbone in your own code (an object that follows the `Backbone`
        protocol, or a function or class that returns one when called without arguments; its
        identity must change whenever its features do, as cached features are found by it).
        An object that already follows the protocol is returned unchanged.
    weights : str or Path, optional
        A checkpoint to use instead of the pretrained weights (`.safetensors`, `.pth`), where the
        backbone is an architecture. `"random"` gives untrained weights, for testing shapes only.
    preset : Preset, optional
        Overrides the suggested taps, pool sizes and preprocessing.
    image_size : int, optional
        Side of the input in pixels, for models of timm and OpenCLIP and for `hf-onnx:`; by default
        the one that the model was trained with, or one near 224 if that is larger than 256 and the
        model is a ViT. A ViT's position embeddings are resampled.
    device : str or torch.device, optional
        Where the backbone runs, such as "cpu" or "cuda". By default the EfficientNet-Lites run on
        the CPU, in onnxruntime, and other backbones on a GPU if there is one.
    dtype : str, numpy.dtype or torch.dtype, default="float16"
        The type that features are rounded to: float16, float32 or float64.
    **options : dict
        Options of one kind of backbone, such as `outputs` of an ONNX file.

    Examples
    --------
    >>> import numpy as np
    >>> backbone = load_backbone("efficientnet_lite0")
    >>> features = backbone.extract([np.zeros((60, 80, 3), np.uint8)])
    >>> list(features.layout.values())
    [(112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)]
    """
    from mivhead.backbones.base import storage_type

    spec = str(spec) if isinstance(spec, Path) else spec
    module = module_of(spec) if isinstance(spec, str) else None
    if module in _WITH_WEIGHTS:
        options["weights"] = weights
    elif weights is not None:
        raise InputError("This backbone has its own weights: omit weights.")
    if not isinstance(spec, str) or module is None:
        return _load_own(spec) if isinstance(spec, str) else spec
    if image_size is not None:
        if not NAMED.get(spec, spec).startswith(_RESIZABLE):
            raise InputError(f"{spec} has a fixed input size: omit image_size={image_size}.")
        options["image_size"] = image_size
    load = import_module(f"{__name__}.{module}").load
    options |= {"preset": preset, "device": device, "dtype": storage_type(dtype)}
    backbone: Backbone = load(spec, **options)
    return backbone


def module_of(spec: str) -> str | None:
    """Return the module that loads a specification; None if the user's own code does."""
    if spec in _NAMES:
        return _NAMES[spec]
    for prefix, module in _PREFIXES.items():
        if spec.startswith(prefix):
            return module
    if spec.endswith(".onnx"):
        return "onnx_model"
    if _OWN.fullmatch(spec):
        return None
    nearest = difflib.get_close_matches(spec, _NAMES, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "`miv backbones list` shows all names."
    raise InputError(f"There is no backbone named {spec!r}: {hint}")


def _load_own(spec: str) -> Backbone:
    """Return the backbone at `file.py:name` or `module:name`; this runs the user's code."""
    from mivhead.backbones.base import Backbone

    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            named = runpy.run_path(place).get(name)
        else:
            named = getattr(import_module(place), name, None)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise InputError(f"The backbone {spec!r} cannot be imported: {error}.") from error
    if isinstance(named, type) or (callable(named) and not isinstance(named, Backbone)):
        named = named()
    if not isinstance(named, Backbone):
        raise InputError(
            f"{spec!r} must name an object with `identity`, `preset` and `extract`, or a function "
            f"that returns one; got {named!r:.80}."
        )
    return named
