"""How a method that tunes the backbone sees it, and images: a copy of its module, and pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mivhead.backbones.base import Backbone, preprocess, to_picture
from mivhead.backbones.efficientnet_lite import WEIGHTS, read_weights
from mivhead.backbones.module import ModuleBackbone, freeze, hooked
from mivhead.errors import InputError
from mivhead.extraction.pipeline import LoadedImage
from mivhead.images.augmentation import NO_VIEWS, ViewPlan, augment, view_seed
from mivhead.images.imageset import ImageSet

PREDICTED = 4  # images per pass in prediction on a CPU: activations stay in its cache
# Pixels whose activations are kept at once on a CPU: 32 images at 224 px.
MAX_PIXELS = 32 * 224 * 224
BYTES_PER_PIXEL = 2000  # of activations with gradients: about 3 GB for 32 images with a ResNet-50
MEMORY_FRACTION = 0.6  # of a device's free memory that activations may take

Pixels: TypeAlias = NDArray[np.uint8]  # (image, R, R, 3), resized already
Tapped: TypeAlias = Callable[[Tensor], Sequence[Mapping[str, Tensor]]]


class Network(nn.Module):
    """A copy of a backbone's module whose deepest tap gives one vector per image, with gradients.

    `tapped` returns the parts (`map`, `token`) of the copy's taps, `prepare` turns pixels into its
    normalised input, and `size` is the side R of that input.
    """

    def __init__(
        self,
        model: nn.Module,
        tapped: Tapped,
        prepare: Callable[[Pixels], Tensor],
        size: int,
        name: str,
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.head: nn.Module = nn.Identity()  # on the pooled vector
        self.size, self.name = size, name
        self._tapped, self._prepare = tapped, prepare

    def forward(self, x: Tensor) -> Tensor:
        """Pool a normalised batch (n, 3, R, R) to (n, channel)."""
        parts = self._tapped(x)[-1]
        pooled = parts["token"] if "token" in parts else parts["map"].mean(dim=(2, 3))
        embedded: Tensor = self.head(pooled)
        return embedded

    def batch(self, pixels: Pixels) -> Tensor:
        """Normalise pixels to the input (n, 3, R, R), where the module is."""
        return self._prepare(pixels).to(self.device)

    def embed(self, pixels: Pixels, chunk: int | None = None) -> Tensor:
        """Vectors (image, channel) without gradients, some images at a time."""
        with torch.no_grad():
            parts = split(pixels, chunk or predicted_at_once(self))
            return torch.cat([self(self.batch(part)) for part in parts])

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next(self.model.parameters()).device

    def blank(self) -> Tensor:
        """One image of zeros (1, 3, R, R)."""
        return torch.zeros(1, 3, self.size, self.size, device=self.device)

    def map_features(self) -> nn.Parameter:
        """Add a linear map after the pooled vector, at first the identity; return its matrix."""
        with torch.no_grad():
            channels = int(self(self.blank()).shape[1])
        weight = nn.Parameter(torch.eye(channels, device=self.device))
        self.head = nn.Linear(channels, channels, bias=False, device="meta")
        self.head.weight = weight
        return weight


def network_of(backbone: Backbone, method: str) -> Network:
    """Copy the backbone's module for a method that tunes it; the backbone stays as it is."""
    name, preset = backbone.identity.name, backbone.preset
    if name in WEIGHTS:
        model, tapped = _efficientnet_lite(name, preset.taps[-1])
    else:
        if not isinstance(backbone, ModuleBackbone):
            raise InputError(
                f"{method} tunes the backbone, so it needs a torch module, and {name} only gives "
                "features: choose a backbone of timm or `from_module`, or another method."
            )
        model, tapped = backbone.copy_to_tune()
    prepare = partial(preprocess, preprocessing=preset.preprocessing)
    return Network(model, tapped, prepare, preset.preprocessing.size, name)


def _efficientnet_lite(name: str, tap: str) -> tuple[nn.Module, Tapped]:
    """Build mivhead's default backbone, which runs without PyTorch, as a module of timm."""
    model = timm.create_model(f"tf_{name}", pretrained=False)
    arrays = zip(model.state_dict(), read_weights(name).values(), strict=True)
    weights = {key: torch.tensor(array) for key, array in arrays}
    model.load_state_dict(weights, strict=True)
    freeze(model, torch.device("cpu"))
    return model, hooked(model, [tap])


def load_pixels(images: ImageSet, size: int, plan: ViewPlan = NO_VIEWS) -> tuple[Pixels, Pixels]:
    """Decode images and make their planned views: (image, R, R, 3) and (view, R, R, 3)."""
    pixels = np.empty((len(images), size, size, 3), np.uint8)
    views = np.empty((len(plan.view_of), size, size, 3), np.uint8)
    for row, source in enumerate(images.sources):
        image = LoadedImage(source)
        pixels[row] = np.asarray(to_picture(image.picture, row, size))
        for i in np.flatnonzero(plan.view_of == row):
            seed = view_seed(plan.seed, image.hash, int(plan.numbers[i]))
            views[i] = np.asarray(augment(image.picture, size, seed))
    return pixels, views


def check_is_vit(network: Network, method: str) -> None:
    """Raise an error if a network is not a ViT, by its layers and not by its class.

    A ViT has LayerNorms, and its only convolutions cut the image into patches.
    """
    modules = list(network.model.modules())
    convolutional = any(isinstance(m, nn.Conv2d) and m.kernel_size != m.stride for m in modules)
    if convolutional or not any(isinstance(m, nn.LayerNorm) for m in modules):
        raise InputError(f"{method} tunes vision transformers; {network.name} is not one.")


def chunk_size(network: Network, images: int | None = None) -> int:
    """Images whose activations are kept at once: as given, or by the input and the memory.

    A larger batch passes the network twice per step (`train`), which would bias times: on a GPU,
    the chunk is therefore as large as its free memory allows.
    """
    if images is not None:
        return images
    usual = max(1, MAX_PIXELS // network.size**2)
    free = free_memory(network.device)
    if free is None:
        return usual
    return max(usual, int(MEMORY_FRACTION * free / (BYTES_PER_PIXEL * network.size**2)))


def predicted_at_once(network: Network) -> int:
    """Images per pass without gradients: few on a CPU, and as many as fit on a GPU."""
    return PREDICTED if network.device.type == "cpu" else chunk_size(network)


def free_memory(device: torch.device | str) -> int | None:
    """Return the free bytes of a GPU; None for a CPU, or if the device does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def split(pixels: Pixels, chunk: int) -> list[Pixels]:
    """Split images into parts that pass the network at once."""
    return [pixels[start : start + chunk] for start in range(0, len(pixels), chunk)]
