"""RandAugment with torchvision's default settings: two random operations of shape or colour.

torchvision's own gives the same pixels from the same seed, but importing it takes longer than
augmenting a thousand images. (Cubuk et al. 2020, RandAugment, arXiv 1909.13719.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from PIL import Image, ImageEnhance, ImageOps

Picture: TypeAlias = Image.Image
Operation: TypeAlias = Callable[[Picture, float], Picture]

OPERATIONS = 2  # one after the other
BINS, CHOSEN = 31, 9  # of the strengths between nothing and the strongest
REACH = 150 / 331  # the farthest shift, as a share of the side


def rand_augment(image: Picture) -> Picture:
    """Apply random operations, drawn from PyTorch's global generator, to an RGB picture.

    >>> rand_augment(Image.new("RGB", (8, 8), "red")).size
    (8, 8)
    """
    for _ in range(OPERATIONS):
        strongest, operation = _SPACE[int(torch.randint(len(_SPACE), ()))]
        strength = 0.0
        if strongest:
            strength = _strength(strongest)
            if torch.rand(()) <= 0.5:
                strength = -strength
        image = operation(image, strength)
    return image


def _strength(strongest: float) -> float:
    return float(torch.linspace(0.0, strongest, BINS)[CHOSEN])  # rounded to float32, as theirs


def _affine(image: Picture, matrix: tuple[float, ...]) -> Picture:
    """Take each pixel (x, y) from (a x + b y + c, d x + e y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)


def _shift(side: int, sign: float) -> int:
    """Pixels to shift a picture of this side, forth or back."""
    return int(math.copysign(_strength(REACH * side), sign))


def _rotate(image: Picture, degrees: float) -> Picture:
    return image.rotate(degrees, Image.Resampling.BICUBIC)


def _enhance(kind: Callable[[Picture], Any]) -> Operation:
    def enhance(image: Picture, change: float) -> Picture:
        changed: Picture = kind(image).enhance(1.0 + change)
        return changed

    return enhance


def _posterize(image: Picture, _: float) -> Picture:
    return ImageOps.posterize(image, round(8 - 4 * CHOSEN / (BINS - 1)))


def _solarize(image: Picture, _: float) -> Picture:
    threshold = 255.0 * (1.0 - CHOSEN / (BINS - 1))
    return ImageOps.solarize(image, math.ceil(threshold))  # of whole values those from here up


# The strongest change, 0 where there is none to choose, and what to do. The order is torchvision's.
_SPACE: tuple[tuple[float, Operation], ...] = (
    (0.0, lambda image, _: image),
    (0.3, lambda image, slope: _affine(image, (1, slope, 0, 0, 1, 0))),
    (0.3, lambda image, slope: _affine(image, (1, 0, 0, slope, 1, 0))),
    (1.0, lambda image, sign: _affine(image, (1, 0, -_shift(image.width, sign), 0, 1, 0))),
    (1.0, lambda image, sign: _affine(image, (1, 0, 0, 0, 1, -_shift(image.height, sign)))),
    (30.0, _rotate),
    (0.9, _enhance(ImageEnhance.Brightness)),
    (0.9, _enhance(ImageEnhance.Color)),
    (0.9, _enhance(ImageEnhance.Contrast)),
    (0.9, _enhance(ImageEnhance.Sharpness)),
    (0.0, _posterize),
    (0.0, _solarize),
    (0.0, lambda image, _: ImageOps.autocontrast(image)),
    (0.0, lambda image, _: ImageOps.equalize(image)),
)
