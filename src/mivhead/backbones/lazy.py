"""A backbone that is loaded when the first image comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mivhead.backbones.base import Backbone, Identity
from mivhead.backbones.images import ImageLike
from mivhead.features import Features
from mivhead.preset import Preset


class LazyBackbone:
    """A backbone whose identity is known before it is loaded.

    If all features are in the cache, its weights are not read and its library is not imported,
    which takes longer than training on a few images.

    Parameters
    ----------
    identity
        What the loaded backbone will be.
    preset
        The settings it suggests for the head.
    dtype
        The type that features are rounded to.
    load
        Loads it.
    """

    def __init__(
        self, identity: Identity, preset: Preset, dtype: torch.dtype, load: Callable[[], Backbone]
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self._load = load
        self._loaded: Backbone | None = None

    def extract(self, images: Sequence[ImageLike]) -> Features:
        """Features of one batch of decoded images, on the CPU, in their order."""
        return self.loaded().extract(images)

    def loaded(self) -> Backbone:
        """Load the backbone, the first time, and return it."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded
