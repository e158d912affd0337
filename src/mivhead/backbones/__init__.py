"""Frozen backbones by name, file or address: images in, `Features` out.

How a backbone is found: `load_backbone` looks up the specification in the tables below and calls
`load` of the module named there. The facts of the named backbones (preset, weights) are in
`mivhead.backbones.presets`; the default one is built in `mivhead.backbones.efficientnet_lite`.

To add a kind of backbone, write a module with a `load` function and add a line to one of the
tables. From your own code, pass any object that follows the `Backbone` protocol, or name it as
`file.py:name` or `module:name`.

PyTorch, timm and transformers are imported only for the backbones that run in them.

- Kinds: `efficientnet_lite` (for GPUs and tuning `efficientnet_lite_network`), `timm_models`,
  `open_clip_models`, `transformers`, `onnx_model`, `onnx_folder`, `http`; made of a function
  (`callables`), of a PyTorch module (`module`), or of several backbones (`joint`).
- What they share: `base` (the protocol, and the identity of a backbone), `preset` and `presets`,
  `preprocessing`, `taps`, and for services `wire` and `transport`.
- Where weights come from: `checkpoints`, `legacy_pth`, `hub`, `hub_folders`.
- What else is known: `text` (vectors of class names), `background` (pictures of nothing in
  particular), `classes` (how well a backbone recognises an image), `speed`.
"""

from __future__ import annotations

import difflib
import re
import runpy
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.lazy import lazy
from mivhead.backbones.presets import NAMED, PAPER, PRESETS
from mivhead.errors import InputError

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

    from mivhead.backbones.base import Backbone as Backbone
    from mivhead.backbones.base import Identity as Identity
    from mivhead.backbones.callables import from_callable as from_callable
    from mivhead.backbones.module import from_module as from_module
    from mivhead.backbones.preprocessing import preprocess as preprocess
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

# prefix or suffix of a specification -> its module, which receives the whole specification
_PREFIXES = {
    "timm:": "mivhead.backbones.timm_models",
    "open_clip:": "mivhead.backbones.open_clip_models",
    "hf:": "mivhead.backbones.transformers",
    "hf-onnx:": "mivhead.backbones.onnx_folder",
    "http://": "mivhead.backbones.http",
    "https://": "mivhead.backbones.http",
}
_SUFFIXES = {".onnx": "mivhead.backbones.onnx_model"}
# kinds of backbones whose input may have another size
_RESIZABLE = ("timm:", "open_clip:", "hf:", "hf-onnx:")

# name -> the module whose `load(spec, weights=, preset=, device=, dtype=, **options)` builds it
_NAMES = (
    dict.fromkeys(PRESETS, "mivhead.backbones.efficientnet_lite")
    | dict.fromkeys(PAPER, "mivhead.backbones.timm_models")
    | {name: _PREFIXES[f"{spec.partition(':')[0]}:"] for name, spec in NAMED.items()}
)

# `file.py:name` or `module:name`: a backbone in the user's own code
_OWN = re.compile(r"(?P<file>.+\.py):(?P<in_file>\w+)|(?P<module>[\w.]+):(?P<in_module>\w+)")

__getattr__, _ = lazy(
    __name__,
    {
        "base": "Backbone Identity",
        "callables": "from_callable",
        "module": "from_module",
        "preprocessing": "preprocess",
    },
)


def list_backbones() -> list[str]:
    """Return the names that `load_backbone` accepts, sorted.

    Returns
    -------
    list of str

    Examples
    --------
    >>> "efficientnet_lite0" in list_backbones()
    True
    """
    return sorted(_NAMES)


def load_backbone(
    spec: str | Path | Backbone | Sequence[str | Path | Backbone] = DEFAULT_BACKBONE,
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
    spec : str, Path, Backbone or sequence of them, default="efficientnet_lite0"
        One of `list_backbones()`; `timm:NAME` for any model of timm; `open_clip:MODEL/TAG`,
        `open_clip:OWNER/NAME` or `open_clip:FOLDER` for one of OpenCLIP; `hf:FOLDER_OR_ID` for one
        of transformers; `hf-onnx:FOLDER_OR_ID` for one in the layout of transformers.js, which
        needs no PyTorch; the path of an `.onnx` file; `http://...` or `https://...` for a service;
        `file.py:name` or `module:name` for a backbone in your own code (an object that follows the
        `Backbone` protocol, or a function or class that returns one when called without arguments;
        its identity must change whenever its features do, as cached features are found by it).
        An object that already follows the protocol is returned unchanged. Several backbones, as a
        list or as names joined by `+`, become one that has the blocks of all of them.
    weights : str or Path, optional
        A checkpoint to use instead of the pretrained weights (`.safetensors`, `.pth`), where the
        backbone is an architecture. `"random"` gives untrained weights, for testing shapes only.
    preset : Preset, optional
        Overrides the suggested taps, pool sizes and preprocessing.
    image_size : int, optional
        Side of the input in pixels, for models of timm, OpenCLIP and transformers; by default
        the one that the model was trained with, or one near 224 if that is larger than 256 and the
        model is a ViT. A ViT's position embeddings are resampled.
    device : str or torch.device, optional
        Where the backbone runs, such as "cpu" or "cuda". By default the EfficientNet-Lites run on
        the CPU, in onnxruntime, and other backbones on a GPU if there is one.
    dtype : str, numpy.dtype or torch.dtype, default="float16"
        The type that features are rounded to: float16, float32 or float64.
    **options : dict
        Options of one kind of backbone, such as `outputs` of an ONNX file.

    Returns
    -------
    Backbone

    Examples
    --------
    >>> import numpy as np
    >>> backbone = load_backbone("efficientnet_lite0")
    >>> features = backbone.extract([np.zeros((60, 80, 3), np.uint8)])
    >>> list(features.layout.values())
    [(112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)]
    """
    if isinstance(spec, str) and (parts := split_names(spec)):
        spec = parts
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if weights is not None or image_size is not None:
            raise InputError(
                "weights and image_size are for a single backbone: load each of several backbones "
                "with `load_backbone`, and pass a list of them."
            )
        return _load_joint(spec, preset, device=device, dtype=dtype, **options)
    if not isinstance(spec, str | Path):
        return _without_weights(spec, weights)
    spec = str(spec)
    module = _find_module(spec)
    if module is None:
        return _without_weights(_load_own(spec), weights)
    if image_size is not None:
        if not NAMED.get(spec, spec).startswith(_RESIZABLE):
            raise InputError(
                f"{spec} has a fixed input size: leave out image_size={image_size} (--image-size)."
            )
        options["image_size"] = image_size
    from mivhead.backbones.base import storage_type

    backbone: Backbone = import_module(module).load(
        spec,
        weights=weights,
        preset=preset,
        device=device,
        dtype=storage_type(dtype),
        **options,
    )
    return backbone


def split_names(spec: str) -> list[str]:
    """Split names that are joined by `+`; none if this is the specification of one backbone.

    >>> split_names("efficientnet_lite0+timm:resnet50"), split_names("my+network.onnx")
    (['efficientnet_lite0', 'timm:resnet50'], [])
    """
    parts = spec.split("+")
    return parts if len(parts) > 1 and all(map(known_module, parts)) else []


def _load_joint(
    specs: Sequence[str | Path | Backbone], preset: Preset | None, **how: Any
) -> Backbone:
    """Load several backbones; a preset says which taps they have."""
    from mivhead.backbones.joint import JointBackbone, split_taps
    from mivhead.backbones.preset import BlockPreset, Preset

    if len(specs) == 1:
        return load_backbone(specs[0], preset=preset, **how)
    parts = [load_backbone(spec, **how) for spec in specs]
    if preset is not None:
        for i, taps in enumerate(split_taps(preset.taps, len(parts))):
            if isinstance(specs[i], str | Path) and taps != parts[i].preset.taps:
                own = Preset(
                    taps, tuple(BlockPreset() for _ in taps), parts[i].preset.preprocessing
                )
                parts[i] = load_backbone(specs[i], preset=own, **how)
    return JointBackbone(parts)


def known_module(spec: str) -> str | None:
    """Return the module that loads a name, a file or an address; None for anything else."""
    if spec in _NAMES:
        return _NAMES[spec]
    for prefix, module in _PREFIXES.items():
        if spec.startswith(prefix):
            return module
    for suffix, module in _SUFFIXES.items():
        if spec.endswith(suffix):
            return module
    return None


def _find_module(spec: str) -> str | None:
    """Return the module that loads `spec`, or None if the user's own code does."""
    if module := known_module(spec):
        return module
    if _OWN.fullmatch(spec):
        return None
    nearest = difflib.get_close_matches(spec, _NAMES, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "`miv backbones list` shows all names."
    raise InputError(f"There is no backbone named {spec!r}: {hint}")


def check_name(spec: str) -> None:
    """Raise an error that suggests the nearest name if `spec` cannot name a backbone.

    >>> check_name("resnet5")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: There is no backbone named 'resnet5': did you mean 'resnet50'?
    """
    _find_module(spec)


def _load_own(spec: str) -> Backbone:
    """Return the backbone at `file.py:name` or `module:name`; this runs the user's code."""
    from mivhead.backbones.base import Backbone

    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InputError(f"The backbone {spec!r} names the file {place}, which does not exist.")
        found = runpy.run_path(place).get(name)
    else:
        try:
            found = getattr(import_module(place), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, but something that it imports does not
            raise InputError(
                f"The backbone {spec!r} names the module {place}, which cannot be imported: "
                "install it, or name its file as FILE.py:NAME."
            ) from None
    if callable(found) and (isinstance(found, type) or not isinstance(found, Backbone)):
        found = found()
    if not isinstance(found, Backbone):
        raise InputError(
            f"{spec!r} must name an object with `identity`, `preset` and `extract`, or a function "
            f"that returns one; got {found!r:.80}."
        )
    return found


def _without_weights(backbone: Backbone, weights: str | Path | None) -> Backbone:
    if weights is not None:
        raise InputError(
            f"weights={str(weights)!r} cannot be combined with a backbone of your own, which "
            "already has its weights: omit weights."
        )
    return backbone
