"""Augmented views of support images: how many each image gets, their seeds, and how they are made.

The transforms are those of the authors' code: bicubic resize to the square, horizontal flip,
grayscale, then RandAugment with torchvision's defaults. There is no crop.

A view is determined by the random seed, the content of its image and its number, and by nothing
else. The same image therefore has the same views in every folder, task and command, and `miv fit`
and `miv bench run` share their features in the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from mivhead.errors import InputError

Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
ViewsRule: TypeAlias = Literal["few", "ceil", "floor"]  # how many views per image T / S gives

FEW = 4  # views of an image, and shots of a class that has views, by the rule "few"


@dataclass(frozen=True)
class Augmentation:
    """How a view is made; disable what would change the class (a mirrored digit is another symbol).

    Parameters
    ----------
    flip : float, default=0.5
        Probability of a horizontal flip.
    grayscale : float, default=0.2
        Probability of a conversion to grayscale.
    randaugment : bool, default=True
        Whether to apply RandAugment (two random operations on shape or colour).
    """

    flip: float = 0.5
    grayscale: float = 0.2
    randaugment: bool = True

    def __post_init__(self) -> None:
        for name in ("flip", "grayscale"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}, which is not a probability.")


def augment(
    image: Image.Image, size: int, seed: int, how: Augmentation | None = None
) -> Image.Image:
    """Make one augmented view in RGB; the same seed (see `view_seed`) gives the same view."""
    resized = image.resize((size, size), Image.Resampling.BICUBIC)
    how = how or Augmentation()
    random = Draws(seed)
    if random.uniform() < np.float32(how.flip):
        resized = ImageOps.mirror(resized)
    if random.uniform() < np.float32(how.grayscale):
        resized = resized.convert("L").convert("RGB")
    for _ in range(OPERATIONS if how.randaugment else 0):
        strongest, operation = _SPACE[random.integer(len(_SPACE))]
        strength = _strength(strongest)
        if strongest and random.uniform() <= 0.5:
            strength = -strength
        resized = operation(resized, strength)
    return resized


class Draws:
    """The random numbers that PyTorch's generator draws for this seed, without PyTorch.

    Both are the Mersenne Twister with 32 bits of seed, so that views are those of torchvision.
    Seeds are from 0 to 2^63 - 1.

    >>> random = Draws(0)
    >>> round(float(random.uniform()), 6), random.integer(14)
    (0.496257, 3)
    """

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed % 2**32)

    def uniform(self) -> np.float32:
        """Return a number from [0, 1), as `torch.rand(())` does."""
        return np.float32(self.integer(2**24) / 2**24)

    def integer(self, below: int) -> int:
        """Return one of 0 .. below - 1, as `torch.randint(below, ())` does."""
        return int(self._twister.randint(2**32, dtype=np.uint32)) % below


def views_per_image(shots: int, threshold: int, rule: ViewsRule = "ceil") -> int:
    """Return how many views each image of a class with this many shots gets.

    There are none if `shots` exceeds the threshold T. Otherwise there are ceil(T / shots), as in
    the authors' code (`"ceil"`), or max(1, floor(T / shots)), as in the paper (`"floor"`). `"few"`
    is `"ceil"` with at most 4 views, and none for more than 4 shots. T = 0 switches views off.

    >>> [views_per_image(shots, 15) for shots in (1, 2, 15, 16)]
    [15, 8, 1, 0]
    >>> views_per_image(2, 15, "floor")
    7
    >>> [views_per_image(shots, 15, "few") for shots in (1, 2, 4, 5)]
    [4, 4, 4, 0]
    """
    if shots > threshold or (rule == "few" and shots > FEW):
        return 0
    if rule == "floor":
        return threshold // shots
    views = -(-threshold // shots)
    return min(FEW, views) if rule == "few" else views


class ViewPlan(NamedTuple):
    """The augmented views to make from a set of images."""

    view_of: Integers  # (n_views,): row of the image that each view is made from
    numbers: Integers  # (n_views,): number of each view among the views of its image, from 0
    seed: int = 0  # random seed that the views depend on


NO_VIEWS = ViewPlan(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class ViewRule:
    """How many views the shots of a class have, and how they are made.

    With the content of an image, this is everything that its views depend on.

    >>> plan = ViewRule(threshold=2).plan(["cat", "cat", "dog"])
    >>> plan.view_of.tolist(), plan.numbers.tolist()
    ([0, 1, 2, 2], [0, 0, 0, 1])
    """

    threshold: int  # T: classes with at most T shots have views
    rule: ViewsRule = "ceil"  # see `views_per_image`
    seed: int = 0  # random seed that the views depend on
    augmentation: Augmentation = Augmentation()  # how a view is made

    def per_image(self, shots: int) -> int:
        """Return how many views each image of a class with this many shots has."""
        return views_per_image(shots, self.threshold, self.rule)

    def plan(self, labels: Sequence[Any] | np.ndarray[Any, Any]) -> ViewPlan:
        """Plan the views of a support set."""
        shots = Counter(labels)
        return number_views([self.per_image(shots[label]) for label in labels], self.seed)


def number_views(counts: Sequence[int], seed: int = 0) -> ViewPlan:
    """Plan `counts[i]` views of image i, numbered from 0."""
    view_of = np.repeat(np.arange(len(counts), dtype=np.int64), np.asarray(counts, np.int64))
    numbers = [number for count in counts for number in range(count)]
    return ViewPlan(view_of, np.array(numbers, dtype=np.int64), seed)


def view_seed(seed: int, content: str, number: int) -> int:
    """Return the seed of view `number` of an image with this content hash."""
    digest = hashlib.sha256(f"{seed} {number} {content}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


# RandAugment with torchvision's default settings (Cubuk et al. 2020, arXiv:1909.13719). Written out
# here because importing torchvision takes longer than augmenting a thousand images; the same seed
# gives the same pixels as torchvision's transform.

Picture: TypeAlias = Image.Image
Operation: TypeAlias = Callable[[Picture, float], Picture]

OPERATIONS = 2  # applied one after the other
BINS, CHOSEN = 31, 9  # bins of strength, from none to the strongest, and the one in use
FRACTION = CHOSEN / (BINS - 1)  # of the strongest
REACH = 150 / 331  # largest shift, as a fraction of the side


def _strength(strongest: float) -> float:
    # Each step is rounded to float32, as in torchvision.
    return float(np.float32(strongest) / np.float32(BINS - 1) * np.float32(CHOSEN))


def _affine(image: Picture, matrix: tuple[float, ...]) -> Picture:
    """Map each output pixel (x, y) to the input pixel (a x + b y + c, d x + e y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)


def _shift(side: int, sign: float) -> int:
    """Return by how many pixels to shift an image of this side, in either direction."""
    return int(math.copysign(_strength(REACH * side), sign))


def _enhance(kind: Callable[[Picture], Any]) -> Operation:
    def enhance(image: Picture, change: float) -> Picture:
        changed: Picture = kind(image).enhance(1.0 + change)
        return changed

    return enhance


# The strongest change (0 if an operation has no strength) and the operation, as in torchvision.
_SPACE: tuple[tuple[float, Operation], ...] = (
    (0.0, lambda image, _: image),
    (0.3, lambda image, slope: _affine(image, (1, slope, 0, 0, 1, 0))),
    (0.3, lambda image, slope: _affine(image, (1, 0, 0, slope, 1, 0))),
    (1.0, lambda image, sign: _affine(image, (1, 0, -_shift(image.width, sign), 0, 1, 0))),
    (1.0, lambda image, sign: _affine(image, (1, 0, 0, 0, 1, -_shift(image.height, sign)))),
    (30.0, lambda image, degrees: image.rotate(degrees, Image.Resampling.BICUBIC)),
    (0.9, _enhance(ImageEnhance.Brightness)),
    (0.9, _enhance(ImageEnhance.Color)),
    (0.9, _enhance(ImageEnhance.Contrast)),
    (0.9, _enhance(ImageEnhance.Sharpness)),
    (0.0, lambda image, _: ImageOps.posterize(image, round(8 - 4 * FRACTION))),
    (0.0, lambda image, _: ImageOps.solarize(image, math.ceil(255 * (1 - FRACTION)))),
    (0.0, lambda image, _: ImageOps.autocontrast(image)),
    (0.0, lambda image, _: ImageOps.equalize(image)),
)
