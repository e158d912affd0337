"""A PyTorch module as a backbone: the module, and the names of the layers to tap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor, nn

from mivhead.backbones.base import (
    DecodedImage,
    Identity,
    Parts,
    check_taps,
    default_device,
    join,
    preprocess,
    read_output,
    storage_type,
)
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset, derive_presets
from mivhead.errors import InputError
from mivhead.features import Features

if TYPE_CHECKING:
    from mivhead.backbones.text import TextTower

_CHUNK = 4  # images per forward pass on a CPU: keeps activations in the processor's cache

Tapped: TypeAlias = Callable[[Tensor], list[Parts]]  # maps a batch to the parts of every tap
Tapping: TypeAlias = Callable[[Any, Sequence[str]], Tapped]


class ModuleBackbone:
    """A frozen module whose tapped layers give the features.

    `tapping` says how taps are read from a module; by default they are names of submodules, whose
    outputs are interpreted by shape (`mivhead.backbones.base`).
    """

    embed_texts: TextTower | None = None  # where images and texts share a space

    def __init__(
        self,
        name: str,
        model: nn.Module,
        preset: Preset,
        *,
        device: torch.device,
        dtype: DTypeLike | torch.dtype = "float16",
        tapping: Tapping | None = None,
    ) -> None:
        self.identity = Identity(name, state_hash(model), preset.preprocessing, preset.taps)
        self.preset = preset
        self.dtype = storage_type(dtype)
        self.model = model
        self._device = device
        self._tapping = tapping or hooked
        self.run = self._tapping(model, preset.taps)

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        x = preprocess(images, self.preset.preprocessing)  # (n, 3, R, R)
        chunks = x.split(_CHUNK) if self._device.type == "cpu" else (x,)
        with torch.inference_mode():
            blocks = [self.run(chunk.to(self._device)) for chunk in chunks]
        return join(blocks, self.dtype)

    def copy_to_tune(self) -> tuple[nn.Module, Tapped]:
        """Return a copy of the module, for tuning, and its deepest tap."""
        model = deepcopy(self.model)
        return model, self._tapping(model, self.preset.taps[-1:])


def from_module(
    model: nn.Module,
    taps: Sequence[str],
    *,
    name: str,
    preprocessing: Preprocessing | None = None,
    blocks: Sequence[BlockPreset] | None = None,
    threshold: int = 15,
    device: str | torch.device | None = None,
    dtype: DTypeLike | torch.dtype = "float16",
) -> ModuleBackbone:
    """Turn a PyTorch module of your own, such as one of torchvision's, into a backbone.

    Parameters
    ----------
    model : nn.Module
        The module with its weights. It is frozen, put into evaluation mode and moved to `device`.
    taps : sequence of str
        Submodules as in `model.named_modules()`, shallow to deep. Their outputs may be maps
        `(n, C, H, W)` or `(n, H, W, C)`, tokens `(n, tokens, C)` or vectors `(n, C)`.
    name : str
        Its name. The identity consists of this name and the hash of the weights: give different
        names to modules that compute different things from equal weights.
    preprocessing : Preprocessing, optional
        Size, mean and standard deviation; by default 224 px and ImageNet's.
    blocks : sequence of BlockPreset, optional
        How the head treats each tap; by default derived from the shapes.
    threshold : int, default=15
        T: a class with at most T shots gets augmented views.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from mivhead.backbones import from_module
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 16, 16), torch.nn.ReLU())
    >>> backbone = from_module(model, ["1"], name="patches")
    >>> backbone.extract([np.zeros((60, 80, 3), np.uint8)])
    Features(n=1, block0: map 8x14x14 float16)
    """
    taps = tuple(taps)
    check_taps(name, taps, [layer for layer, _ in model.named_modules() if layer])
    preprocessing = preprocessing or Preprocessing()
    target = default_device(device)
    freeze(model, target)
    if blocks is None:
        blocks = suggest_blocks(hooked(model, taps), preprocessing.size, target)
    preset = Preset(taps, tuple(blocks), preprocessing, threshold)
    return ModuleBackbone(name, model, preset, device=target, dtype=dtype)


def state_hash(model: nn.Module) -> str:
    """Return the SHA-256 of the names, types, shapes and values of a model's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


class _AllFound(Exception):  # noqa: N818  # control flow, not an error
    """Raised when the deepest tap has been reached, to skip the rest of the forward pass."""


def hooked(model: nn.Module, taps: Sequence[str]) -> Tapped:
    """Return a function that runs a model up to its deepest tap and copies the outputs of taps."""
    lock = Lock()  # hooks belong to the model, so one pass at a time

    def run(x: Tensor) -> list[Parts]:
        outputs: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple) and output:
                output = output[0]  # layers of transformers return their tokens first
            if not isinstance(output, Tensor):
                kind = type(output).__name__
                raise InputError(f"The tap {name!r} returns a {kind}, not a tensor.")
            outputs[name] = output.clone(memory_format=torch.contiguous_format)
            # Exporting a graph drops the rest anyway, and cannot trace an exception.
            if len(outputs) == len(taps) and not torch.compiler.is_compiling():
                raise _AllFound

        with lock, ExitStack() as hooks:
            for name in taps:
                hook = model.get_submodule(name).register_forward_hook(partial(keep, name))
                hooks.enter_context(hook)
            with suppress(_AllFound):
                model(x)
        if list(outputs) != list(taps):
            raise InputError(
                "Taps must be listed once each, in the order in which they run: requested "
                f"{', '.join(taps)}, found {', '.join(outputs)}."
            )
        return [read_output(output, tap) for tap, output in outputs.items()]

    return run


def freeze(model: nn.Module, device: torch.device) -> None:
    """Prepare a module for inference only."""
    # The fast convolution kernels read memory in channels-last order.
    model.eval().requires_grad_(False).to(device).to(memory_format=torch.channels_last)


def suggest_blocks(tapped: Tapped, size: int, device: torch.device) -> tuple[BlockPreset, ...]:
    """Derive the settings of each tap from the shapes of its output for a blank image."""
    with torch.inference_mode():
        blocks = tapped(torch.zeros(1, 3, size, size, device=device))
    return derive_presets(join([blocks], np.dtype("float32")))
