"""Augmented views of a support image: which, how many, and with what seeds.

The transforms are the authors': bicubic resize to the square, horizontal flip, grayscale, then
RandAugment with torchvision's defaults. No crop.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from mivhead.errors import InputError

ViewsRule: TypeAlias = Literal["ceil", "floor"]
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# Views are drawn from PyTorch's global generator, as torchvision does; all threads share it.
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Augmentation:
    """How a view is made; leave out what would change the meaning (a flip turns digits wrong).

    Parameters
    ----------
    flip
        Probability of a horizontal flip.
    grayscale
        Probability of losing all colour.
    randaugment
        Whether RandAugment (two random operations of shape or colour) is applied.
    """

    flip: float = 0.5
    grayscale: float = 0.2
    randaugment: bool = True

    def __post_init__(self) -> None:
        for name in ("flip", "grayscale"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is {getattr(self, name)}; expected a probability, 0 to 1."
                )


def augment(
    image: Image.Image, size: int, seed: int, how: Augmentation | None = None
) -> Image.Image:
    """Make one augmented view; the same seed gives the same view.

    While it runs, PyTorch's global CPU generator is seeded (and put back afterwards) for the whole
    process, so calls wait for each other; code in other threads should draw from its own generator.

    Parameters
    ----------
    image
        An RGB picture; it is not changed.
    size
        Side of the square that is returned.
    seed
        From 0 to 2^63 - 1, such as one of `plan_views`.
    how
        By default `Augmentation()`, the authors' settings.

    Examples
    --------
    >>> view = augment(Image.new("RGB", (40, 20), "red"), size=16, seed=3)
    >>> view.size, view.mode
    ((16, 16), 'RGB')
    """
    resized = image.resize((size, size), Image.Resampling.BICUBIC)
    how = how or Augmentation()
    with _LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if torch.rand(()) < how.flip:
            resized = ImageOps.mirror(resized)
        if torch.rand(()) < how.grayscale:
            resized = resized.convert("L").convert("RGB")
        return rand_augment(resized) if how.randaugment else resized


def views_per_image(shots: int, threshold: int, rule: ViewsRule = "ceil") -> int:
    """Count the views of each image of a class with this many shots.

    None above the threshold T; else ceil(T / shots) as in the authors' code (`"ceil"`), or
    max(1, floor(T / shots)) as in the paper (`"floor"`). T = 0 means no views at all.

    Examples
    --------
    >>> [views_per_image(shots, 15) for shots in (1, 2, 15, 16)]
    [15, 8, 1, 0]
    >>> views_per_image(2, 15, "floor")
    7
    """
    if shots < 1 or threshold < 0:
        raise InputError(f"shots is {shots} and threshold {threshold}; expected >= 1 and >= 0.")
    if rule not in ("ceil", "floor"):
        raise InputError(f"views_rule is {rule!r}; expected 'ceil' or 'floor'.")
    if shots > threshold:
        return 0
    return -(-threshold // shots) if rule == "ceil" else threshold // shots


def plan_views(
    labels: Sequence[Any] | np.ndarray[Any, Any],
    threshold: int,
    rule: ViewsRule = "ceil",
    seed: int = 0,
) -> tuple[Integers, Integers]:
    """Plan the views of a support set: the row each is made from, and its seed.

    A view's seed depends on `seed`, its image's row and its number only, not on other images.

    Examples
    --------
    >>> view_of, seeds = plan_views(["cat", "cat", "dog"], threshold=2)
    >>> view_of.tolist(), len(set(seeds.tolist()))
    ([0, 1, 2, 2], 4)
    """
    shots = Counter(labels)
    views = [
        (row, number)
        for row, label in enumerate(labels)
        for number in range(views_per_image(shots[label], threshold, rule))
    ]
    rows = np.array([row for row, _ in views], dtype=np.int64)
    seeds = np.array([_view_seed(seed, row, number) for row, number in views], dtype=np.int64)
    return rows, seeds


def _view_seed(seed: int, row: int, number: int) -> int:
    sequence = np.random.SeedSequence(seed, spawn_key=(row, number))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


# RandAugment with torchvision's default settings: two random operations of shape or colour.
#
# torchvision's own gives the same pixels from the same seed, but importing it takes longer than
# augmenting a thousand images. (Cubuk et al. 2020, RandAugment, arXiv 1909.13719.)


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
