"""What a worker opens by itself: a data set's images and a backbone; neither can be sent to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.benchmark.config import BackboneConfig
from mivhead.datasets.sets import open_set
from mivhead.images.imageset import ImageSet


@dataclass(frozen=True)
class Source:
    """Where pictures and features come from.

    Parameters
    ----------
    backbone
        What to load; or a backbone, for jobs that stay in the process that made it.
    set, data
        Name of the data set, and the folder that it is in.
    device
        Where the backbone runs.
    """

    backbone: BackboneConfig | Backbone
    set: str
    data: Path
    device: str | None = None

    def open_backbone(self) -> Backbone:
        """Load the backbone, or take the one that this process loaded last."""
        if isinstance(self.backbone, BackboneConfig):
            return _load(self.backbone, self.device)
        return self.backbone

    def open_images(self) -> ImageSet:
        """Open the data set, or take the one that this process opened last."""
        return _open(self.set, self.data)


@lru_cache(maxsize=1)
def _load(config: BackboneConfig, device: str | None) -> Backbone:
    return load_backbone(config.source, weights=config.weights, device=device)


@lru_cache(maxsize=1)
def _open(name: str, data: Path) -> ImageSet:
    return open_set(name, data)
