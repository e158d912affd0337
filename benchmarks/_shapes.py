"""Shapes of backbones' features, and sizes of tasks, to measure the head's speed on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mivhead import Features
from mivhead.backbones.efficientnet_lite import PRESETS
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.backbones.presets import PAPER
from mivhead.features import SupportSet

DRAWN = 200  # images whose features are drawn; more images repeat them


@dataclass(frozen=True)
class Shapes:
    """What a backbone gives: the shape of each block's map, and whether it has tokens."""

    maps: tuple[tuple[int, int, int], ...]
    blocks: tuple[BlockPreset, ...]
    tokens: bool = False

    def features(self, images: int) -> Features:
        """Draw random features, stored in half precision."""
        drawn, generator = min(images, DRAWN), np.random.default_rng(0)

        def normal(*shape: int) -> NDArray[np.float32]:
            return generator.standard_normal((drawn, *shape), np.float32)

        parts: dict[str, NDArray[np.float16]] = {}
        for i, shape in enumerate(self.maps):
            parts[f"block{i}.map"] = np.maximum(normal(*shape), 0).astype(np.float16)
            if self.tokens:
                parts[f"block{i}.token"] = normal(shape[0]).astype(np.float16)
        features = Features.from_tensors(parts)
        return features if drawn == images else features[np.arange(images) % drawn]


@dataclass(frozen=True)
class Task:
    """Classes, shots of each class, and augmented views of each shot."""

    ways: int
    shots: int
    views: int

    @property
    def support(self) -> int:
        """Support images."""
        return self.ways * self.shots

    @property
    def images(self) -> int:
        """Pseudo-queries: the support and its views."""
        return self.support * (1 + self.views)

    def labels(self) -> NDArray[np.int64]:
        """Class numbers of all pseudo-queries, the support first."""
        return np.tile(np.repeat(np.arange(self.ways), self.shots), 1 + self.views)

    def view_of(self) -> NDArray[np.int64]:
        """Give the support image that each view was made from."""
        return np.tile(np.arange(self.support), self.views)

    def support_set(self, features: Features) -> SupportSet:
        """Take features of all pseudo-queries as those of the support and its views."""
        shots, views = features[: self.support], features[self.support :]
        return SupportSet(shots, self.labels()[: self.support], views, self.view_of())


def _paper(name: str, *maps: tuple[int, int, int], tokens: bool = False) -> Shapes:
    return Shapes(maps, PAPER[name].preset.blocks[: len(maps)], tokens)  # no pooled vector


LITE0: Preset = PRESETS["efficientnet_lite0"]
SHAPES = {
    "EfficientNet-Lite0, two blocks": Shapes(
        ((112, 14, 14), (320, 7, 7)), (BlockPreset((13, 11, 9, 8)), BlockPreset((6, 5, 4)))
    ),
    "EfficientNet-Lite0, as shipped": Shapes(
        ((112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)), LITE0.blocks
    ),
    "ViT-S/16": _paper("dino_vits16", *[(384, 14, 14)] * 4, tokens=True),
    "ViT-S/8": _paper("dino_vits8", *[(384, 28, 28)] * 4, tokens=True),
    "ResNet-50": _paper("resnet50", (1024, 14, 14), (2048, 7, 7)),
    "CLIP ViT-L/14": _paper("clip_vitl14", *[(1024, 16, 16)] * 2, tokens=True),
}
TASKS = {
    "5-way 1-shot": Task(5, 1, 15),
    "10-way 5-shot": Task(10, 5, 3),
    "50-way 10-shot": Task(50, 10, 2),
}
