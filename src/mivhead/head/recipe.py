"""Every hyperparameter of the head, in frozen dataclasses.

`BlockConfig` is what a block looks like to the head; `Recipe` is how the head is built, trained and
combined. The defaults are what the paper's published numbers came from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from mivhead.errors import InputError, check_one_of
from mivhead.features import Features
from mivhead.preset import BlockPreset

HEAD_WIDTH = 64  # channels per attention head that the paper aims at
SMALLEST_POOL = 3  # side of the smallest pooled map
MAX_CANDIDATES = 64  # far above any use; keeps a forged model file from asking for memory


@dataclass(frozen=True)
class Recipe:
    """How the head is built, trained and combined; the defaults are the paper's.

    Parameters
    ----------
    prototype
        `"cap"`: cross-attention pooling (Component 2). `"mean"`: its ablation, a prototype is the
        mean of the image vectors of its class.
    attention
        `"l1"`: the paper's distance-based attention. `"dot"`: scaled dot product.
    eta
        Down-scaling of the attention scores; small values suppress competition within a bag.
    cross_attention, co_excitation, skip
        The three mechanisms of CAP. Without cross-attention all shots weigh the same, W^K is left
        out, and the skip connection adds the normalised vector itself.
    centred
        Whether cosines are taken around the mean of the prototypes; None means yes for `"cap"` and
        no for `"mean"`.
    temperature, temperature_order
        `"after"`: logsumexp over blocks, then division (the authors' code). `"inside"`: division,
        then logsumexp (the paper's text).
    steps, learning_rate, pooling_learning_rate, momentum
        Full-batch SGD; Component 1 has its own rate.
    views_rule
        Augmented views per image of a class with S <= T shots: `"ceil"`: ceil(T / S) (the authors'
        code); `"floor"`: max(1, floor(T / S)) (the paper's text).
    start
        `"random"`: PyTorch's initial weights. `"identity"`: keys and values start as the image
        vectors themselves, so that training starts from a nearest centroid.
    self_mask
        In training, hide the image that a pseudo-query was made from where its class has others.
    objective
        `"joint"`: cross-entropy of the combined logits. `"blocks"`: of each block by itself.
    vote
        `"logsumexp"`: the blocks alone, as in the paper. `"stacked"`: blocks and plain experts
        (`mivhead.ensemble`), with weights that explain held-out images. `"prior"`: the same with
        the weights that stacking starts from.
    """

    prototype: Literal["cap", "mean"] = "cap"
    attention: Literal["l1", "dot"] = "l1"
    eta: float = 0.1
    cross_attention: bool = True
    co_excitation: bool = True
    skip: bool = True
    centred: bool | None = None
    temperature: float = 0.1
    temperature_order: Literal["after", "inside"] = "after"
    steps: int = 40
    learning_rate: float = 0.3
    pooling_learning_rate: float = 0.015
    momentum: float = 0.9
    views_rule: Literal["ceil", "floor"] = "ceil"
    start: Literal["random", "identity"] = "random"
    self_mask: bool = False
    objective: Literal["joint", "blocks"] = "joint"
    vote: Literal["logsumexp", "prior", "stacked"] = "logsumexp"

    def __post_init__(self) -> None:
        check_one_of("prototype", self.prototype, ("cap", "mean"))
        check_one_of("attention", self.attention, ("l1", "dot"))
        check_one_of("temperature_order", self.temperature_order, ("after", "inside"))
        check_one_of("views_rule", self.views_rule, ("ceil", "floor"))
        check_one_of("start", self.start, ("random", "identity"))
        check_one_of("objective", self.objective, ("joint", "blocks"))
        check_one_of("vote", self.vote, ("logsumexp", "prior", "stacked"))
        if self.self_mask and self.prototype == "mean":
            raise InputError("self_mask needs prototype='cap': plain means are the same for all.")
        if self.steps < 0:
            raise InputError(f"steps must not be negative, got {self.steps}.")
        for name in ("temperature", "learning_rate"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, got {getattr(self, name)}.")
        for name in ("eta", "pooling_learning_rate"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be in [0, 1), got {self.momentum}.")

    @property
    def centres(self) -> bool:
        """Whether cosines are centred, after the rule for None."""
        return self.prototype == "cap" if self.centred is None else self.centred


RECIPES: dict[str, Recipe] = {
    "paper": Recipe(),
    # Chosen by measurement: docs/explanation/the-recipe.md
    "mivhead": Recipe(
        eta=1.0,
        temperature=0.2,
        steps=15,
        start="identity",
        self_mask=True,
        objective="blocks",
        vote="stacked",
    ),
}
DEFAULT_RECIPE = "mivhead"


def resolve_recipe(recipe: str | Recipe, **changes: Any) -> Recipe:
    """Look a recipe up by name and apply the changes that are not None.

    >>> resolve_recipe("paper", eta=None, steps=10).steps
    10
    """
    if isinstance(recipe, str):
        check_one_of("recipe", recipe, tuple(RECIPES))
        recipe = RECIPES[recipe]
    elif not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a name or a Recipe, got {type(recipe).__name__}.")
    return replace(recipe, **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True)
class BlockConfig:
    """One block as the head sees it: its shape, and how it is pooled and compared."""

    channels: int
    heads: int
    grid: tuple[int, int] | None  # (H, W) of the map; None: there is only a token
    token: bool
    pool_sizes: tuple[int, ...] = ()
    native: bool = True
    form: Literal["cnn", "vit"] = "cnn"
    tau: float = 500.0
    plain: bool = False

    def __post_init__(self) -> None:
        if self.channels < 1 or self.heads < 1 or self.channels % self.heads:
            raise InputError(
                f"heads must divide the channels, got {self.heads} heads for {self.channels}."
            )
        if self.grid is None:
            if not self.token:
                raise InputError("A block needs a map, a token or both.")
            if self.pool_sizes:
                raise InputError("A block without a map has no pool sizes.")
        elif any(size > max(self.grid) for size in self.pool_sizes):
            raise InputError(f"pool sizes {self.pool_sizes} do not fit a map of {self.grid}.")
        if self.candidates > MAX_CANDIDATES:
            raise InputError(f"A block has at most {MAX_CANDIDATES} candidates.")
        if not self.candidates:
            raise InputError("A block needs at least one candidate: a map, a pool size or a token.")

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Per-image shapes of the block's parts."""
        map_ = {} if self.grid is None else {"map": (self.channels, *self.grid)}
        return map_ | ({"token": (self.channels,)} if self.token else {})

    @property
    def candidate_sizes(self) -> tuple[tuple[int, int], ...]:
        """(H, W) of the patch-level candidates: the native map, then the pooled ones."""
        if self.grid is None:
            return ()
        return (self.grid,) * self.native + tuple((s, s) for s in self.pool_sizes)

    @property
    def candidates(self) -> int:
        """D: patch-level candidates plus the token."""
        return len(self.candidate_sizes) + self.token


def default_heads(channels: int) -> int:
    """Heads for C channels: the divisor whose width C / h is nearest to 64 (the wider on a tie).

    >>> default_heads(2048), default_heads(112), default_heads(384)
    (32, 2, 6)
    """
    divisors = [h for h in range(1, channels + 1) if channels % h == 0]
    return min(divisors, key=lambda h: (abs(channels // h - HEAD_WIDTH), h))


def default_pool_sizes(grid: tuple[int, int], deeper: tuple[int, int] | None) -> tuple[int, ...]:
    """Spread up to four sizes over the permissible range of a CNN's block, below its own size.

    The range ends above the size of the next deeper block, so that blocks do not overlap, or at
    half the map for the last one; nothing is pooled to below 3. These are the paper's own lists
    for ResNet-50, ResNet-34, RegNetY-1.6GF, ResNet-18 and SDL-ResNet-18. Its DenseNet-161, with
    maps of the same size, has fewer: 11, 9 and 5.

    >>> default_pool_sizes((14, 14), (7, 7)), default_pool_sizes((7, 7), None)
    ((13, 11, 9, 8), (6, 5, 4))
    """
    top = min(grid) - 1
    bottom = max(SMALLEST_POOL, math.ceil(min(grid) / 2) if deeper is None else min(deeper) + 1)
    count = min(4, top - bottom + 1)
    steps = max(1, count - 1)
    return tuple(top - math.ceil(i * (top - bottom) / steps) for i in range(count))


def default_token_pool_sizes(grid: tuple[int, int], position: int) -> tuple[int, ...]:
    """Spread three sizes over the blocks of a ViT, whose maps all have one size.

    From just below the map to half of it: two for the shallowest block and one for the next (the
    deeper ones have their token), or all three if there is only one block. `position` counts
    from the shallowest; -1 is the only block. This is the paper's list for ViT-small/16. For the
    others it follows no rule: ViT-small/8 24, 20, 16 | 12, 8; ViT-B/16 14, 10, 7 | none; CLIP
    ViT-L/14 15, 11 | 7; Swin-B 7 | 4.

    >>> [default_token_pool_sizes((14, 14), i) for i in (0, 1, 2)]
    [(13, 10), (7,), ()]
    """
    top, bottom = min(grid) - 1, min(grid) // 2
    sizes = (top, (top + bottom) // 2, bottom) if bottom >= SMALLEST_POOL else ()
    return {-1: sizes, 0: sizes[:2], 1: sizes[2:]}.get(position, ())


def derive_presets(features: Features) -> tuple[BlockPreset, ...]:
    """Derive the settings of a backbone that has no preset from the shapes of its features.

    A block with a token follows the ViT form with tau 200: its candidates are the token and the
    pooled maps. One without follows the CNN form with tau 500: the map is a candidate too.
    """
    grids = [None if b.map is None else (b.map.shape[2], b.map.shape[3]) for b in features.blocks]
    presets = []
    for i, block in enumerate(features.blocks):
        grid = grids[i]
        if block.token is None:
            deeper = next((g for g in grids[i + 1 :] if g is not None), None)
            sizes = () if grid is None else default_pool_sizes(grid, deeper)
            presets.append(BlockPreset(pool_sizes=sizes))
        else:
            position = i if len(grids) > 1 else -1
            sizes = () if grid is None else default_token_pool_sizes(grid, position)
            # A map that is too small to be pooled is a candidate as it is.
            native = grid is not None and min(grid) // 2 < SMALLEST_POOL
            presets.append(BlockPreset(pool_sizes=sizes, native=native, form="vit", tau=200.0))
    return tuple(presets)


def resolve_blocks(
    features: Features, presets: Sequence[BlockPreset] | None = None
) -> tuple[BlockConfig, ...]:
    """Combine the shapes of features with the settings of their backbone (or derived ones)."""
    presets = derive_presets(features) if presets is None else presets
    if len(presets) != len(features.blocks):
        raise InputError(
            f"The preset describes {len(presets)} blocks, the features have "
            f"{len(features.blocks)}: {features}."
        )
    configs = []
    for block, preset in zip(features.blocks, presets, strict=True):
        settings = {f.name: getattr(preset, f.name) for f in fields(preset)}
        settings["heads"] = preset.heads or default_heads(block.channels)
        grid = None if block.map is None else (block.map.shape[2], block.map.shape[3])
        token = block.token is not None
        configs.append(BlockConfig(channels=block.channels, grid=grid, token=token, **settings))
    return tuple(configs)
