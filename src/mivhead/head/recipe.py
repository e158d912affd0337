"""The settings of a head: how it is trained and combined, and what it sees of a backbone.

`Recipe` is the only place where the values of training are set; the constants of the ensemble are
in `mivhead.ensemble.constants`. What belongs to a backbone is a `Preset`
(`mivhead.backbones.preset`); with the shapes of the features it gives a `BlockConfig` per block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from mivhead._util.schema import check_types
from mivhead.backbones.preset import BlockPreset, Preset, derive_presets, replace_in_blocks
from mivhead.errors import InputError, check_one_of
from mivhead.features import Features
from mivhead.images.augmentation import ViewsRule

HEAD_WIDTH = 64  # channels per attention head that the paper aims at
MAX_CANDIDATES = 64  # far above any use; keeps a forged model file from asking for memory


@dataclass(frozen=True)
class Recipe:
    """How a head is trained and combined.

    The defaults are the recipe `"mivhead"`, which was chosen by measurement and includes the
    ensemble with ridge experts. `Recipe.paper()` is the recipe `"paper"`: what the published
    numbers came from.

    Parameters
    ----------
    eta : float, default=1.0
        Factor of the attention scores; small values suppress competition within a bag (paper: 0.1).
    temperature : float, default=0.2
        Divisor of the logits (paper: 0.1).
    temperature_order : {"after", "inside"}, default="after"
        Divide after the logsumexp over blocks (the authors' code) or inside it (the paper's text).
    steps : int, default=15
        Full-batch steps of gradient descent (paper: 40).
    learning_rate, pooling_learning_rate, momentum : float, default=0.3, 0.015 and 0.9
        Learning rates of Component 2 and of Component 1, and the momentum of both.
    views_rule : {"few", "ceil", "floor"}, default="few"
        Augmented views per image of a class with S <= T shots: `"ceil"` is ceil(T / S) (the
        authors' code), `"floor"` is max(1, floor(T / S)) (the paper's text). `"few"` is
        min(4, ceil(T / S)) up to four shots, and none for larger classes: more views take time
        and do not help (docs/research-log.md).
    use_views : bool, default=True
        Whether the head is trained on augmented views, if there are any.
    start : {"identity", "random"}, default="identity"
        `"identity"`: keys and values start as the image vectors themselves, so that training
        starts from a nearest centroid. `"random"`: PyTorch's initialisation (paper).
    self_mask : bool, default=True
        In training, hide the shot that a pseudo-query was made from where its class has others.
    objective : {"blocks", "joint"}, default="blocks"
        Cross-entropy of each block on its own, or of the combined logits (paper).
    vote : {"stacked", "logsumexp", "experts"}, default="stacked"
        `"logsumexp"`: the blocks of the head alone (paper). `"stacked"`: the blocks and the ridge
        experts (`mivhead.ensemble`), with weights fitted by stacking on out-of-fold predictions.
        `"experts"`: the ridge experts alone, so that nothing is trained by gradient descent.

    References
    ----------
    Xu, Frank and Holmes, "Few-shot Classification as Multi-instance Verification: Effective
    Backbone-agnostic Transfer across Domains".

    Examples
    --------
    >>> Recipe().vote, Recipe.paper(steps=10).vote
    ('stacked', 'logsumexp')
    """

    eta: float = 1.0
    temperature: float = 0.2
    temperature_order: Literal["after", "inside"] = "after"
    steps: int = 15
    learning_rate: float = 0.3
    pooling_learning_rate: float = 0.015
    momentum: float = 0.9
    views_rule: ViewsRule = "few"
    use_views: bool = True
    start: Literal["random", "identity"] = "identity"
    self_mask: bool = True
    objective: Literal["joint", "blocks"] = "blocks"
    vote: Literal["logsumexp", "stacked", "experts"] = "stacked"

    def __post_init__(self) -> None:
        check_types(self)
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
        """Return the recipe of the paper, with some fields replaced, such as `steps=10`."""
        published = {
            "eta": 0.1,
            "temperature": 0.1,
            "steps": 40,
            "views_rule": "ceil",
            "start": "random",
            "self_mask": False,
            "objective": "joint",
            "vote": "logsumexp",
        }
        return cls(**{**published, **changes})

    @property
    def has_experts(self) -> bool:
        """Whether ridge experts are members of the ensemble."""
        return self.vote != "logsumexp"

    @property
    def has_head(self) -> bool:
        """Whether the blocks of the head are members of the ensemble."""
        return self.vote != "experts"


DEFAULT_RECIPE = "mivhead"
RECIPES: dict[str, Recipe] = {
    DEFAULT_RECIPE: Recipe(),  # the measurements: docs/explanation/the-recipe.md
    "experts": Recipe(vote="experts", use_views=False),
    "paper": Recipe.paper(),
}


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """Look up a recipe by name; a `Recipe` is returned as it is."""
    if isinstance(recipe, Recipe):
        return recipe
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
        largest = 0 if self.grid is None else max(self.grid)
        if not all(1 <= size <= largest for size in self.pool_sizes):
            raise InputError(f"pool sizes {self.pool_sizes} do not fit a map of {self.grid}.")
        if not 1 <= self.candidates <= MAX_CANDIDATES:
            raise InputError(
                f"A block needs 1 to {MAX_CANDIDATES} candidates (map, pool sizes, token), got "
                f"{self.candidates}."
            )

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
    """Heads for C channels: the divisor whose width C / h is nearest to 64 (the wider on a tie)."""
    divisors = [h for h in range(1, channels + 1) if channels % h == 0]
    return min(divisors, key=lambda h: (abs(channels // h - HEAD_WIDTH), h))


def resolve_blocks(
    features: Features, preset: Preset | Sequence[BlockPreset] | Mapping[str, Any] | None = None
) -> tuple[BlockConfig, ...]:
    """Combine the shapes of features with the settings of their backbone.

    None derives them from the shapes; a mapping holds fields of `BlockPreset` to replace in the
    derived settings (see `mivhead.backbones.preset.replace_in_blocks`).
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
    blocks = []
    for block, settings in zip(features.blocks, presets, strict=True):
        token = block.token is not None
        native, pool_sizes = settings.native, settings.pool_sizes
        if settings.candidates is not None:
            native, pool_sizes = _limit(native, pool_sizes, settings.candidates - token)
        config = BlockConfig(
            channels=block.channels,
            heads=settings.heads or default_heads(block.channels),
            grid=None if block.map is None else (block.map.shape[2], block.map.shape[3]),
            token=token,
            pool_sizes=pool_sizes,
            native=native,
            form=settings.form,
            tau=settings.tau,
            plain=settings.plain,
            pooled=settings.pooled,
        )
        blocks.append(config)
    return tuple(blocks)


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


def taken_blocks(blocks: Sequence[BlockConfig], recipe: Recipe) -> list[int]:
    """List the blocks of the features that the head uses.

    A block that is marked `pooled` is left to other heads and, with ridge experts in the recipe,
    those that are marked `plain` to them, unless there are no others.
    """
    if not recipe.has_head:
        return []
    usable = [i for i, block in enumerate(blocks) if not block.pooled] or [*range(len(blocks))]
    if not recipe.has_experts:
        return usable
    return [i for i in usable if not blocks[i].plain] or usable
