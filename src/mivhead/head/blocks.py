"""The blocks as the head sees them: shapes of the features, combined with a backbone's preset.

Where there is no preset, the rules below derive one from the shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from mivhead.backbones.preset import CLASSIFIERS, BlockPreset, Preset, replace_in_blocks
from mivhead.errors import InputError, check_one_of
from mivhead.features import Block, Features

HEAD_WIDTH = 64  # channels per attention head that the paper aims at
SMALLEST_POOL = 3  # side of the smallest pooled map
MAX_CANDIDATES = 64  # far above any use; keeps a forged model file from asking for memory


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
    deepest: bool = False
    classifier: str | None = None

    def __post_init__(self) -> None:
        if self.classifier is not None:
            check_one_of("classifier", self.classifier, CLASSIFIERS)
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
        deepest=preset.deepest,
        classifier=preset.classifier,
    )


def spans_of(blocks: Sequence[BlockConfig]) -> list[range]:
    """Return which blocks belong to which backbone: usually all of them to one.

    >>> block = {"channels": 8, "heads": 1, "grid": (2, 2), "token": False}
    >>> spans_of([BlockConfig(**block, deepest=deepest) for deepest in (False, True, False)])
    [range(0, 2), range(2, 3)]
    """
    ends = [i + 1 for i, block in enumerate(blocks[:-1]) if block.deepest] + [len(blocks)]
    return [range(first, end) for first, end in pairwise([0, *ends])]


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
