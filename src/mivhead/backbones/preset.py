"""Presets: the settings that belong to a backbone, and how they follow from its shapes.

How the head is trained is a `Recipe` (`mivhead.head.recipe`). This module imports neither NumPy nor
PyTorch, so that listing backbones is quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    from mivhead.features import Features


USUAL_SIZE, LARGEST_USUAL_SIZE = 224, 256  # pixels
_DEPTHS = (1 / 2, 2 / 3, 5 / 6, 1)  # of the taps
SMALLEST_POOL = 3  # side of the smallest pooled map
MAX_SIZE = 4096  # pixels; keeps a forged file from asking for memory


@dataclass(frozen=True)
class BlockPreset:
    """How the head treats one block.

    Parameters
    ----------
    pool_sizes : tuple of int, default=()
        Sides of the adaptive-max-pooled candidates, in addition to the map itself.
    native : bool, default=True
        Whether the unpooled map is a candidate too.
    form : {"cnn", "vit"}, default="cnn"
        `"cnn"`: patches are L2-normalised in the attention score. `"vit"`: they are divided by
        sqrt(C), and a LayerNorm follows each pooled candidate; a token is one more candidate.
    tau : float, default=500.0
        Scale of the attention score; 0 is average pooling.
    heads : int or None, default=None
        Heads of the cross-attention; None applies the rule `mivhead.head.recipe.default_heads`.
    plain : bool, default=False
        Leave the block to the ridge experts, where the recipe has them. This is for wide maps,
        which take most of the head's time and add little to it.
    candidates : int or None, default=None
        D: the largest number of candidates. The token comes first, then the map, then pooled maps
        spread over `pool_sizes`, starting from the smallest. None keeps all candidates.
    pooled : bool, default=False
        Whether this is the vector that heads on one vector per image use (NCC, Baseline++, FiT),
        where that is not a function of the last block; the MIV-head leaves it out. It comes last.
    """

    pool_sizes: tuple[int, ...] = ()
    native: bool = True
    form: Literal["cnn", "vit"] = "cnn"
    tau: float = 500.0
    heads: int | None = None
    plain: bool = False
    candidates: int | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
        check_one_of("form", self.form, ("cnn", "vit"))
        optional = [count for count in (self.heads, self.candidates) if count is not None]
        for count in (*self.pool_sizes, *optional):
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
                raise InputError(f"Sizes, heads and candidates must be at least 1, got {count!r}.")
        if isinstance(self.tau, bool) or not isinstance(self.tau, Real) or not self.tau >= 0:
            raise InputError(f"tau must be a number of at least 0, got {self.tau!r}.")


TOKEN = BlockPreset(form="vit", tau=200.0)  # a block with a token
VECTOR = replace(TOKEN, pooled=True)  # of a whole image, for other heads
EMBEDDING = "embedding"  # a tap: the vector in the space that images share with texts
POOLED = "pooled"  # a tap: what the model's own classifier would see


def as_vit(blocks: Iterable[BlockPreset]) -> tuple[BlockPreset, ...]:
    """Make blocks follow the ViT form, also those without a token."""
    return tuple(replace(block, form=TOKEN.form, tau=TOKEN.tau) for block in blocks)


def replace_in_blocks(
    blocks: Sequence[BlockPreset], changes: Mapping[str, Any]
) -> tuple[BlockPreset, ...]:
    """Replace fields in the settings of every block; `pool_sizes` needs one list per block."""
    for name in changes:
        check_one_of("field of a preset", name, [field.name for field in fields(BlockPreset)])
    lists = changes.get("pool_sizes", [block.pool_sizes for block in blocks])
    if [isinstance(sizes, list | tuple) for sizes in lists] != [True] * len(blocks):
        raise InputError(f"pool_sizes needs a list for each of {len(blocks)} blocks, got {lists}.")
    pairs = zip(blocks, lists, strict=True)
    return tuple(replace(block, **{**changes, "pool_sizes": tuple(s)}) for block, s in pairs)


def spread_taps(names: Sequence[str]) -> tuple[str, ...]:
    """Choose four blocks of the deeper half of a ViT: at 1/2, 2/3 and 5/6 of it, and the last.

    Which layer suits a task is not known beforehand: stacking weighs them (docs/research-log.md).

    >>> spread_taps([f"blocks.{i}" for i in range(12)])
    ('blocks.5', 'blocks.7', 'blocks.9', 'blocks.11')
    """
    depth = len(names)
    if depth <= len(_DEPTHS):
        return tuple(names)
    return tuple(names[round(depth * share) - 1] for share in _DEPTHS)


def near_usual_size(trained: int, patch: int) -> int:
    """Return the input size of a ViT: as trained or, if that is large and slow, near 224 pixels."""
    return trained if trained <= LARGEST_USUAL_SIZE else patch * round(USUAL_SIZE / patch)


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the backbone's input: bicubic resize to a square, scale, normalise.

    Parameters
    ----------
    size : int, default=224
        Side of the square, in pixels.
    mean, std : tuple of three floats, optional
        Mean and standard deviation per colour channel; the defaults are those of ImageNet.
    """

    size: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise InputError(f"size must be from 1 to {MAX_SIZE}, got {self.size}.")
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            raise InputError("mean and std must have three values each, those of std positive.")


@dataclass(frozen=True)
class Preset:
    """The settings that belong to a backbone.

    Parameters
    ----------
    taps : tuple of str
        Names of the blocks to tap, shallow to deep; the backbone defines their meaning.
    blocks : tuple of BlockPreset
        How the head treats each of them, in the same order.
    preprocessing : Preprocessing, optional
        How an image becomes the backbone's input.
    threshold : int, default=15
        T: a class with at most T shots gets augmented views.
    """

    taps: tuple[str, ...]
    blocks: tuple[BlockPreset, ...]
    preprocessing: Preprocessing = Preprocessing()
    threshold: int = 15

    def __post_init__(self) -> None:
        if len(self.taps) != len(self.blocks):
            raise InputError(f"A preset needs one block per tap: {self.taps}, {self.blocks}.")
        if any(block.pooled for block in self.blocks[:-1]):
            raise InputError("A pooled block must be the last of a preset.")


def default_pool_sizes(side: int, deeper: int) -> tuple[int, ...]:
    """Spread up to four sizes below a CNN's map, above that of the next deeper block or half of it.

    This gives the paper's own lists for ResNets and RegNetY-1.6GF; its DenseNet-161 has fewer.
    """
    top = side - 1
    bottom = max(SMALLEST_POOL, deeper + 1 if deeper else math.ceil(side / 2))
    count = min(4, top - bottom + 1)
    steps = max(1, count - 1)
    return tuple(top - math.ceil(i * (top - bottom) / steps) for i in range(count))


def default_token_pool_sizes(side: int, position: int) -> tuple[int, ...]:
    """Spread three sizes over the blocks of a ViT, whose maps all have one size.

    Two for the shallowest block and one for the next (the deeper ones have their token), or all
    three for an only block, of position -1: the paper's list for ViT-small/16.
    """
    top, bottom = side - 1, side // 2
    sizes = (top, (top + bottom) // 2, bottom) if bottom >= SMALLEST_POOL else ()
    return {-1: sizes, 0: sizes[:2], 1: sizes[2:]}.get(position, ())


def derive_presets(features: Features) -> tuple[BlockPreset, ...]:
    """Derive the settings of a backbone that has no preset from the shapes of its features.

    A block with a token follows the ViT form with tau 200: its candidates are the token and the
    pooled maps. One without follows the CNN form with tau 500: the map is a candidate too.
    """
    sides = [0 if block.map is None else min(block.map.shape[2:]) for block in features.blocks]
    presets = []
    for i, (block, side) in enumerate(zip(features.blocks, sides, strict=True)):
        if block.token is None:
            deeper = next(filter(None, sides[i + 1 :]), 0)
            presets.append(BlockPreset(default_pool_sizes(side, deeper)))
        else:
            sizes = default_token_pool_sizes(side, i if len(sides) > 1 else -1)
            # A map that is too small to be pooled is a candidate as it is.
            native = side > 0 and side // 2 < SMALLEST_POOL
            presets.append(replace(TOKEN, pool_sizes=sizes, native=native))
    return tuple(presets)
