"""Where attention lies, as colour over an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 224  # pixels of a drawn image
HEAT = "#e8590c"


def square(image: Image.Image) -> Image.Image:
    """Bring an image to the size it is drawn in."""
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def overlay(
    image: Image.Image, heats: Sequence[NDArray[np.floating[Any]]]
) -> NDArray[np.floating[Any]]:
    """Tint a paler, grey image where the attention is."""
    grey = np.asarray(square(image).convert("L"), dtype=np.float64)[:, :, None] / 255
    pale = 0.3 + 0.7 * grey  # (SIDE, SIDE, 1)
    weight = 0.85 * np.mean([_enlarge(heat) for heat in heats], axis=0)[:, :, None]
    colour = np.array([int(HEAT[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    blended: NDArray[np.floating[Any]] = pale * (1 - weight) + colour * weight  # (SIDE, SIDE, 3)
    return blended


def _enlarge(heat: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """(H, W) to (SIDE, SIDE), from 0 at the lowest to 1 at the highest weight."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = np.asarray(smooth, dtype=np.float64)
    spread = float(values.max() - values.min())
    scaled: NDArray[np.floating[Any]] = (values - values.min()) / (spread or 1.0)
    return scaled
