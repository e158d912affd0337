"""Every hyperparameter of the head, in frozen dataclasses.

`Recipe` states how a head is trained and combined; it is the only place where these values are set.
The constants of the ridge experts and of stacking are in `mivhead.ensemble`. What belongs to a
backbone is a `Preset` (`mivhead.preset`). `BlockConfig` is both at once for one block: its shape in
the features, and how the head treats it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from mivhead._schema import check_types, from_json, to_json
from mivhead.errors import InputError, check_one_of
from mivhead.features import Block, Features
from mivhead.preset import BlockPreset, Preset, ViewsRule, replace_in_blocks

HEAD_WIDTH = 64  # channels per attention head that the paper aims at
SMALLEST_POOL = 3  # side of the smallest pooled map
MAX_CANDIDATES = 64  # far above any use; keeps a forged model file from asking for memory


@dataclass(frozen=True)
class Recipe:
    """How a head is trained and combined.

    The defaults are the recipe `"mivhead"`, which was chosen by measurement and includes the
    ensemble with ridge experts. `Recipe.paper()` is the recipe `"paper"`: what the published
    numbers came from.

    Parameters
    ----------
    prototype : {"cap", "mean"}, default="cap"
        `"cap"` is cross-attention pooling (Component 2). `"mean"` is its ablation: a prototype is
        the mean of the image vectors of its class.
    attention : {"l1", "dot"}, default="l1"
        `"l1"` is the paper's distance-based attention, `"dot"` the scaled dot product.
    eta : float, default=1.0
        Factor of the attention scores; small values suppress competition within a bag. The
        paper's value is 0.1.
    cross_attention, co_excitation, skip : bool, default=True
        The three mechanisms of CAP. Without cross-attention, all shots have the same weight, W^K
        is left out, and the skip connection adds the normalised vector itself.
    centred : bool or None, default=None
        Whether cosines are taken around the mean of the prototypes. None means True for
        `prototype="cap"` and False for `prototype="mean"`.
    temperature : float, default=0.2
        Divisor of the logits. The paper's value is 0.1.
    temperature_order : {"after", "inside"}, default="after"
        `"after"` divides after the logsumexp over blocks (the authors' code), `"inside"` before
        it (the paper's text).
    steps : int, default=15
        Full-batch steps of gradient descent. The paper's value is 40.
    learning_rate, pooling_learning_rate : float, default=0.3 and 0.015
        Learning rates of Component 2 and of Component 1.
    momentum : float, default=0.9
        Momentum of the gradient descent.
    views_rule : {"ceil", "floor"}, default="ceil"
        Augmented views per image of a class with S <= T shots: `"ceil"` is ceil(T / S) (the
        authors' code), `"floor"` is max(1, floor(T / S)) (the paper's text).
    use_views : bool, default=True
        Whether the head is trained on augmented views, if there are any.
    last_blocks : int or None, default=None
        N: use only this many of the deepest blocks of the features; None uses all of them.
    start : {"identity", "random"}, default="identity"
        `"identity"`: keys and values start as the image vectors themselves, so that training
        starts from a nearest-centroid classifier. `"random"`: PyTorch's initialisation, as in
        the paper.
    self_mask : bool, default=True
        During training, mask the shot that a pseudo-query was made from where its class has
        others. The paper does not.
    objective : {"blocks", "joint"}, default="blocks"
        `"joint"` is the cross-entropy of the combined logits (the paper), `"blocks"` that of each
        block on its own.
    vote : {"stacked", "prior", "logsumexp"}, default="stacked"
        How the members of the ensemble are combined. `"logsumexp"`: the blocks of the head alone,
        as in the paper. `"stacked"`: the blocks and the ridge experts (`mivhead.ensemble`), with
        weights fitted by stacking on out-of-fold predictions. `"prior"`: the same members with
        the weights from which stacking starts.

    References
    ----------
    Xu, Frank and Holmes, "Few-shot Classification as Multi-instance Verification: Effective
    Backbone-agnostic Transfer across Domains".

    Examples
    --------
    >>> Recipe().vote, Recipe.paper().vote
    ('stacked', 'logsumexp')
    >>> Recipe(eta=-1)
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: eta must not be negative, got -1.
    """

    prototype: Literal["cap", "mean"] = "cap"
    attention: Literal["l1", "dot"] = "l1"
    eta: float = 1.0
    cross_attention: bool = True
    co_excitation: bool = True
    skip: bool = True
    centred: bool | None = None
    temperature: float = 0.2
    temperature_order: Literal["after", "inside"] = "after"
    steps: int = 15
    learning_rate: float = 0.3
    pooling_learning_rate: float = 0.015
    momentum: float = 0.9
    views_rule: ViewsRule = "ceil"
    use_views: bool = True
    last_blocks: int | None = None
    start: Literal["random", "identity"] = "identity"
    self_mask: bool = True
    objective: Literal["joint", "blocks"] = "blocks"
    vote: Literal["logsumexp", "prior", "stacked"] = "stacked"

    def __post_init__(self) -> None:
        check_types(self)
        if self.self_mask and self.prototype == "mean":
            raise InputError(
                "self_mask=True needs prototype='cap', because the mean of a class is the same for "
                "all queries; set self_mask=False."
            )
        if self.last_blocks is not None and self.last_blocks < 1:
            raise InputError(f"last_blocks must be at least 1 or None, got {self.last_blocks}.")
        for name in ("temperature", "learning_rate"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, got {getattr(self, name)}.")
        for name in ("eta", "pooling_learning_rate", "steps"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be in [0, 1), got {self.momentum}.")

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """Return the recipe of the paper, with some fields replaced.

        >>> Recipe.paper(steps=10).eta
        0.1
        """
        published = {
            "eta": 0.1,
            "temperature": 0.1,
            "steps": 40,
            "start": "random",
            "self_mask": False,
            "objective": "joint",
            "vote": "logsumexp",
        }
        return cls(**{**published, **changes})

    @classmethod
    def from_file(cls, document: Any) -> Self:
        """Read the recipe of a model file, checking every key and type.

        Version 0.1.0 knew the paper's recipe only, so a missing field has the paper's value.
        """
        if isinstance(document, Mapping):
            document = {**to_json(cls.paper()), **document}
        return from_json(cls, document, "recipe")

    @property
    def centres(self) -> bool:
        """Whether cosines are centred, after resolving None."""
        return self.prototype == "cap" if self.centred is None else self.centred

    @property
    def has_experts(self) -> bool:
        """Whether ridge experts are members of the ensemble."""
        return self.vote != "logsumexp"


DEFAULT_RECIPE = "mivhead"
RECIPES: dict[str, Recipe] = {
    DEFAULT_RECIPE: Recipe(),  # the measurements: docs/explanation/the-recipe.md
    "paper": Recipe.paper(),
}


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """Look up a recipe by name; a `Recipe` is returned as it is.

    >>> resolve_recipe("paper") == Recipe.paper()
    True
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise InputError(f"recipe must be a name or a Recipe, got {type(recipe).__name__}.")
    check_one_of("recipe", recipe, RECIPES)
    return RECIPES[recipe]


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
    pooled: bool = False

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
    features: Features, preset: Preset | Sequence[BlockPreset] | Mapping[str, Any] | None = None
) -> tuple[BlockConfig, ...]:
    """Combine the shapes of features with the settings of their backbone.

    Parameters
    ----------
    features : Features
        Only their shapes matter.
    preset : Preset, sequence of BlockPreset, mapping or None, default=None
        The settings. None derives them from the shapes; a mapping holds fields of `BlockPreset` to
        replace in the derived settings (see `mivhead.preset.replace_in_blocks`).

    Returns
    -------
    tuple of BlockConfig
        One per block of the features, shallow to deep.
    """
    if isinstance(preset, Preset):
        presets: Sequence[BlockPreset] = preset.blocks
    elif preset is None or isinstance(preset, Mapping):
        presets = replace_in_blocks(derive_presets(features), preset or {})
    else:
        presets = preset
    if len(presets) != len(features.blocks):
        raise InputError(
            f"The preset describes {len(presets)} blocks, the features have "
            f"{len(features.blocks)}: {features}."
        )
    return tuple(map(_resolve_block, features.blocks, presets))


def _resolve_block(block: Block, preset: BlockPreset) -> BlockConfig:
    token = block.token is not None
    native, pool_sizes = preset.native, preset.pool_sizes
    if preset.candidates is not None:
        native, pool_sizes = _limit(native, pool_sizes, preset.candidates - token)
    return BlockConfig(
        channels=block.channels,
        heads=preset.heads or default_heads(block.channels),
        grid=None if block.map is None else (block.map.shape[2], block.map.shape[3]),
        token=token,
        pool_sizes=pool_sizes,
        native=native,
        form=preset.form,
        tau=preset.tau,
        plain=preset.plain,
        pooled=preset.pooled,
    )


def _limit(native: bool, sizes: tuple[int, ...], count: int) -> tuple[bool, tuple[int, ...]]:
    """Keep at most `count` map candidates: the map itself, then pooled maps."""
    native = native and count > 0
    room = max(0, count - native)
    if room < len(sizes):
        last = len(sizes) - 1
        # Spread evenly over the sizes, starting from the smallest, which is the last.
        kept = {last - round(i * last / max(1, room - 1)) for i in range(room)}
        sizes = tuple(sizes[i] for i in sorted(kept))
    return native, sizes
