"""A backbone made of a PyTorch module and the names of the layers to tap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mivhead.backbones.base import Identity
from mivhead.backbones.images import ImageLike, preprocess
from mivhead.backbones.taps import Taps
from mivhead.features import Features
from mivhead.preset import Preset

_CHUNK = 4  # images per forward pass on a CPU: activations stay in the cache and off fresh memory


class ModuleBackbone:
    """A frozen module whose tapped layers give patch maps `(n, C, H, W)`.

    Parameters
    ----------
    name
        The name it was loaded by.
    model
        The module, with its weights; it is put into evaluation mode and moved to the device.
    weights
        SHA-256 of the weights.
    preset
        Its taps are tapped, its preprocessing is applied.
    device
        Where it runs.
    dtype
        The type that features are rounded to.
    mirrored
        Whether the model was changed by `mivhead.backbones.fast.mirror`: it is shown the images
        turned by 180 degrees, and its maps are turned back.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        weights: str,
        preset: Preset,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float16,
        mirrored: bool = False,
    ) -> None:
        self.identity = Identity(name, weights, preset.preprocessing, preset.taps)
        self.preset = preset
        self._device = device
        self._turn = _half_turn if mirrored else _as_is
        model = model.eval().requires_grad_(False).to(device)
        # Channels-last is the order in which the fast convolution kernels read memory.
        self._taps = Taps(model.to(memory_format=torch.channels_last), preset.taps, dtype)

    def extract(self, images: Sequence[ImageLike]) -> Features:
        """Features of one batch of decoded images, on the CPU, in their order."""
        x = self._turn(preprocess(images, self.preset.preprocessing))  # (n, 3, R, R)
        chunks = x.split(_CHUNK) if self._device.type == "cpu" else (x,)
        with torch.inference_mode():
            outputs = [self._taps(chunk.to(self._device)) for chunk in chunks]
        maps = (torch.cat(parts).cpu() for parts in zip(*outputs, strict=True))  # (n, C, H, W)
        return Features([self._turn(each) for each in maps])


def _half_turn(x: Tensor) -> Tensor:
    return x.flip(2, 3)


def _as_is(x: Tensor) -> Tensor:
    return x
