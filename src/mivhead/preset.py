"""Presets: the settings that belong to a backbone.

Which blocks to tap, how the head pools each of them, how images are prepared, and below how many
shots a class gets augmented views. How the head is trained is a `Recipe` (`mivhead.head.recipe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mivhead.errors import InputError, check_one_of

MAX_SIZE = 4096  # pixels; keeps a forged file from asking for memory


@dataclass(frozen=True)
class BlockPreset:
    """How the head treats one block.

    Parameters
    ----------
    pool_sizes
        Sides of the adaptive-max-pooled candidates, beside the map itself.
    native
        Whether the map as it is, is a candidate too.
    form
        `"cnn"`: patches are L2-normalised in the attention score. `"vit"`: they are divided by
        sqrt(C), and a LayerNorm follows each pooled candidate; a token is one more candidate.
    tau
        Scale of the attention score; 0 is plain averaging.
    heads
        Heads of the cross-attention; None for the rule (`mivhead.head.recipe.default_heads`).
    plain
        Leave the block to the plain experts, where the recipe has them: for wide maps, which take
        most of the head's time and give it little.
    """

    pool_sizes: tuple[int, ...] = ()
    native: bool = True
    form: Literal["cnn", "vit"] = "cnn"
    tau: float = 500.0
    heads: int | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        check_one_of("form", self.form, ("cnn", "vit"))
        if any(size < 1 for size in self.pool_sizes):
            raise InputError(f"pool_sizes must be positive, got {self.pool_sizes}.")


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the backbone's input: bicubic resize to a square, scale, normalise."""

    size: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise InputError(f"size must be from 1 to {MAX_SIZE}, got {self.size}.")
        if not all(value > 0 for value in self.std):
            raise InputError(f"std must be positive, got {self.std}.")


@dataclass(frozen=True)
class Preset:
    """The settings that belong to a backbone.

    Parameters
    ----------
    taps
        Names of the blocks to tap, shallow to deep; their meaning is the backbone's.
    blocks
        How the head treats each of them, in the same order.
    preprocessing
        How an image becomes the backbone's input.
    threshold
        T: a class with at most T shots gets augmented views.
    """

    taps: tuple[str, ...]
    blocks: tuple[BlockPreset, ...]
    preprocessing: Preprocessing = Preprocessing()
    threshold: int = 15

    def __post_init__(self) -> None:
        if len(self.taps) != len(self.blocks):
            raise InputError(
                f"A preset needs one block setting per tap, got {len(self.taps)} taps "
                f"and {len(self.blocks)} settings."
            )
