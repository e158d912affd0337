"""A PyTorch module as a backbone: the module, and the names of the layers to tap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor, nn

from mivhead.backbones.base import Identity, default_device, storage_type
from mivhead.backbones.checkpoints import state_hash
from mivhead.backbones.preprocessing import DecodedImage, preprocess
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset, spread_taps
from mivhead.backbones.taps import EMBEDDING, Parts, Taps, check_taps, join, read_output
from mivhead.features import Features
from mivhead.head.blocks import derive_presets

if TYPE_CHECKING:
    from mivhead.backbones.text import TextTower

_CHUNK = 4  # images per forward pass on a CPU: keeps activations in the processor's cache

Tapped: TypeAlias = Callable[[Tensor], list[Parts]]  # maps a batch to the parts of every tap
Tapping: TypeAlias = Callable[[nn.Module, Sequence[str], torch.dtype], Tapped]


class ModuleBackbone:
    """A frozen module whose tapped layers give the features.

    The model is put into evaluation mode and moved to the device; `weights` is the SHA-256 of its
    weights. If it was changed by `efficientnet_lite.mirror` (`mirrored`), it receives the images
    rotated by 180 degrees, and its maps are rotated back. `tapping` says how taps are read from a
    module; by default they are names of submodules, whose outputs are interpreted by shape
    (`mivhead.backbones.taps`). `rebuild` rebuilds the module as it was trained, if `model` was
    changed for speed. `texts` loads the text tower, where images and texts share a space.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        weights: str,
        preset: Preset,
        *,
        device: torch.device,
        dtype: DTypeLike | torch.dtype = "float16",
        mirrored: bool = False,
        tapping: Tapping | None = None,
        rebuild: Callable[[], nn.Module] | None = None,
        texts: Callable[[], TextTower] | None = None,
    ) -> None:
        self.identity = Identity(name, weights, preset.preprocessing, preset.taps)
        self.preset = preset
        self.dtype = storage_type(dtype)
        self.model = model
        self._device = device
        self._mirrored = mirrored
        self._rebuild = rebuild
        self._texts = texts
        self._tapping = tapping or hooked
        freeze(model, device)
        self._tapped = self._tapping(model, preset.taps, torch_type(self.dtype))

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        x = preprocess(images, self.preset.preprocessing)  # (n, 3, R, R)
        chunks = x.split(_CHUNK) if self._device.type == "cpu" else (x,)
        with torch.inference_mode():
            blocks = [self.run(chunk.to(self._device)) for chunk in chunks]
        return join(blocks, self.dtype)

    def run(self, x: Tensor) -> list[Parts]:
        """Return the parts of every tap for a normalised batch `(n, 3, R, R)`."""
        if not self._mirrored:
            return self._tapped(x)
        return [{"map": parts["map"].flip(2, 3)} for parts in self._tapped(x.flip(2, 3))]

    def in_float32(self) -> ModuleBackbone:
        """Return the same backbone on the CPU, with features in float32."""
        return ModuleBackbone(
            self.identity.name,
            self.model if self._device.type == "cpu" else deepcopy(self.model),
            self.identity.weights,
            self.preset,
            device=torch.device("cpu"),
            dtype="float32",
            mirrored=self._mirrored,
            tapping=self._tapping,
            rebuild=self._rebuild,
            texts=self._texts,
        )

    @cached_property
    def embed_texts(self) -> TextTower | None:
        """Maps sentences to vectors; None if the last tap shares no space with texts.

        The text tower is loaded with the first sentence.
        """
        if self._texts is None or self.preset.taps[-1] != EMBEDDING:
            return None
        tower = cache(self._texts)
        return lambda sentences: tower()(sentences)

    def copy_to_tune(self) -> tuple[nn.Module, Tapped]:
        """Return a copy of the module as it was trained, for tuning, and its deepest tap.

        The copy shares no memory with the backbone, and the tap is not rounded.
        """
        model = deepcopy(self.model) if self._rebuild is None else self._rebuild()
        freeze(model, self._device)
        return model, self._tapping(model, self.preset.taps[-1:], torch.float32)


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
        How the head treats each tap; by default derived from the shapes
        (`mivhead.head.blocks.derive_presets`).
    threshold : int, default=15
        T: a class with at most T shots gets augmented views.
    device, dtype : optional
        As for `mivhead.backbones.load_backbone`.

    Returns
    -------
    ModuleBackbone

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
    check_taps(name, taps, [each for each, _ in model.named_modules() if each])
    preprocessing = preprocessing or Preprocessing()
    place, kind = default_device(device), storage_type(dtype)
    weights = state_hash(model)
    freeze(model, place)
    if blocks is None:
        blocks = suggest_blocks(hooked(model, taps, torch_type(kind)), preprocessing.size, place)
    preset = Preset(taps, tuple(blocks), preprocessing, threshold)
    return ModuleBackbone(name, model, weights, preset, device=place, dtype=kind)


def hooked(model: nn.Module, taps: Sequence[str], dtype: torch.dtype) -> Tapped:
    """Return a function that taps the outputs of submodules."""
    outputs = Taps(model, taps, dtype)
    return lambda x: [read_output(out, tap) for out, tap in zip(outputs(x), taps, strict=True)]


def torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    """Return PyTorch's type of the same name."""
    kind: torch.dtype = getattr(torch, dtype.name)
    return kind


def freeze(model: nn.Module, device: torch.device) -> None:
    """Prepare a module for inference only."""
    # The fast convolution kernels read memory in channels-last order.
    model.eval().requires_grad_(False).to(device).to(memory_format=torch.channels_last)


def suggest_blocks(tapped: Tapped, size: int, device: torch.device) -> tuple[BlockPreset, ...]:
    """Derive the settings of each tap from the shapes of its output for a blank image."""
    with torch.inference_mode():
        blocks = tapped(torch.zeros(1, 3, size, size, device=device))
    return derive_presets(join([blocks], np.dtype("float32")))


class Tappable(Protocol):
    """A tower with named layers."""

    is_vit: bool

    def tap(self, taps: Sequence[str]) -> Tapped:
        """Return a function that taps some of its layers."""
        ...


def suggest_preset(
    tower: Tappable,
    layers: Sequence[str],
    pooled: tuple[str, ...],
    preprocessing: Preprocessing,
    device: torch.device,
) -> Preset:
    """Derive the settings of a tower: layers of a ViT over its depth, or the last two stages.

    `pooled` is the tap, if there is one, of the vector that heads on one vector per image use.
    """
    taps = spread_taps(layers) if tower.is_vit else tuple(layers[-2:])
    blocks = suggest_blocks(tower.tap(taps), preprocessing.size, device)
    if tower.is_vit:  # also without [CLS]
        blocks = tuple(replace(block, form="vit", tau=200.0) for block in blocks)
    more = tuple(BlockPreset(form="vit", tau=200.0, pooled=True) for _ in pooled)
    return Preset((*taps, *pooled), (*blocks, *more), preprocessing)
