"""The toy backbone of all tests: a few lines of NumPy, no network."""

from collections.abc import Sequence

import numpy as np

from mivhead import BlockPreset, Features, Preprocessing, Preset
from mivhead.backbones.base import DecodedImage, Identity, to_picture
from mivhead.errors import InputError

SIZE = 16


class TinyBackbone:
    """Colours of a 4 x 4 grid, edges of a 2 x 2 grid and, if asked for, the mean colour as a token.

    `seen` counts the images that were extracted.
    """

    def __init__(
        self,
        name: str = "tiny",
        threshold: int = 3,
        *,
        token: bool = False,
        weights: str = "0" * 64,
        dtype: str = "float16",
    ) -> None:
        preprocessing = Preprocessing(size=SIZE)
        taps: tuple[str, ...] = ("colours", "edges")
        blocks: tuple[BlockPreset, ...] = (BlockPreset((3,), heads=2), BlockPreset(heads=2))
        if token:
            taps += ("mean",)
            blocks += (BlockPreset(form="vit", tau=200.0, native=False, heads=3),)
        self.identity = Identity(name, weights, preprocessing, taps)
        self.dtype = dtype
        self.preset = Preset(taps, blocks, preprocessing, threshold)
        self.seen = 0

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        if not len(images):
            raise InputError("There are no images: give at least one.")
        self.seen += len(images)
        pixels = [to_picture(image, i, SIZE) for i, image in enumerate(images)]
        x = np.stack(pixels).astype(np.float32) / 255  # (n, 16, 16, 3)
        means = x.reshape(-1, 4, 4, 4, 4, 3).mean(axis=(2, 4)).transpose(0, 3, 1, 2)
        colours = np.concatenate([means, means**2], axis=1)  # (n, 6, 4, 4)
        edges = np.abs(np.diff(x, axis=1))[:, :14].reshape(-1, 2, 7, 2, 8, 3).mean(axis=(2, 4))
        both = np.concatenate([edges, 1 - edges], axis=3).transpose(0, 3, 1, 2)  # (n, 6, 2, 2)
        blocks = [{"map": colours}, {"map": both}]
        if "mean" in self.preset.taps:
            blocks.append({"token": x.mean(axis=(1, 2))})  # (n, 3)
        return Features(blocks).to(self.dtype)
