"""A backbone of ten lines, for tests of what comes after it."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from mivhead import BlockPreset, Features, Preprocessing, Preset
from mivhead.backbones.base import Identity

SIZE = 16


class TinyBackbone:
    """Colours of a 4 x 4 grid, and edges of a 2 x 2 grid."""

    def __init__(
        self,
        name: str = "tiny",
        threshold: int = 3,
        *,
        weights: str = "0" * 64,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        preprocessing = Preprocessing(size=SIZE)
        self.identity = Identity(name, weights, preprocessing, ("colours", "edges"))
        self.dtype = dtype
        blocks = (BlockPreset((3,), heads=2), BlockPreset(heads=2))
        self.preset = Preset(("colours", "edges"), blocks, preprocessing, threshold)
        self.seen = 0

    def extract(self, images: Sequence[Image.Image]) -> Features:
        self.seen += len(images)
        size = (SIZE, SIZE)
        x = np.stack([np.asarray(i.convert("RGB").resize(size), np.float32) for i in images]) / 255
        means = x.reshape(-1, 4, 4, 4, 4, 3).mean(axis=(2, 4)).transpose(0, 3, 1, 2)
        colours = np.concatenate([means, means**2], axis=1)  # (n, 6, 4, 4)
        edges = np.abs(np.diff(x, axis=1))[:, :14].reshape(-1, 2, 7, 2, 8, 3).mean(axis=(2, 4))
        both = np.concatenate([edges, 1 - edges], axis=3).transpose(0, 3, 1, 2)  # (n, 6, 2, 2)
        return Features([colours, both]).to(self.dtype)
