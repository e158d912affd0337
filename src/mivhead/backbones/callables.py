"""A function from images to features as a backbone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike
from PIL import Image

from mivhead.backbones.base import DecodedImage, Identity, join, storage_type, to_pictures
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset, derive_presets
from mivhead.errors import InputError
from mivhead.features import Features

if TYPE_CHECKING:
    import torch


class CallableBackbone:
    """The backbone that `from_callable` returns."""

    def __init__(
        self,
        function: Callable[[list[Image.Image]], Any],
        identity: Identity,
        preset: Preset,
        dtype: np.dtype[Any],
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self._function = function

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        pictures = to_pictures(images, self.preset.preprocessing.size)
        features = Features(self._function(pictures))
        counts = len(features), len(features.blocks)
        if counts != (len(images), len(self.preset.taps)):
            raise InputError(
                f"{self.identity.name} received {len(images)} images and returned {features}, "
                f"expected {len(self.preset.taps)} blocks."
            )
        return join([[block.tensors for block in features.blocks]], self.dtype)


def from_callable(
    function: Callable[[list[Image.Image]], Any],
    *,
    name: str,
    version: str = "1",
    size: int = 224,
    blocks: Sequence[BlockPreset] | None = None,
    threshold: int = 15,
    dtype: DTypeLike | torch.dtype = "float16",
) -> CallableBackbone:
    """Turn a function from images to features into a backbone.

    Parameters
    ----------
    function : callable
        Takes a list of RGB PIL images of `size` x `size` and returns an array, or a list with one
        entry per block, shallow to deep: anything that `Features` accepts, with one row per image.
        The features of an image must not depend on the other images in its batch.
    version : str, default="1"
        Its version, stored with the name. A change of the code cannot be detected: change the
        version when the function returns other values.
    blocks : sequence of BlockPreset, optional
        How the head treats each block; by default derived from the shapes, for which the function
        is called once with a black image.
    threshold : int, default=15
        T: a class with at most T shots gets augmented views.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead.backbones import from_callable
    >>> def colours(images):
    ...     return np.stack([np.asarray(i.resize((4, 4)), np.float32) for i in images]) / 255
    >>> backbone = from_callable(lambda i: colours(i).reshape(-1, 16, 3), name="colours", size=32)
    >>> backbone.extract([np.zeros((60, 80, 3), np.uint8)])
    Features(n=1, block0: map 3x4x4 float16)
    """
    if blocks is None:
        blocks = derive_presets(Features(function([Image.new("RGB", (size, size))])))
    preprocessing = Preprocessing(size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    taps = tuple(f"block{i}" for i in range(len(blocks)))
    preset = Preset(taps, tuple(blocks), preprocessing, threshold)
    weights = hashlib.sha256(f"{name}\n{version}".encode()).hexdigest()
    identity = Identity(name, weights, preprocessing, taps)
    return CallableBackbone(function, identity, preset, storage_type(dtype))
