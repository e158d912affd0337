"""Presets: the settings that belong to a backbone.

Which blocks to tap, how the head pools each of them, how images are preprocessed, and below how
many shots a class gets augmented views. How the head is trained is a `Recipe`
(`mivhead.head.recipe`). This module imports neither NumPy nor PyTorch, so that listing
backbones is quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from mivhead.errors import InputError, check_one_of

ViewsRule: TypeAlias = Literal["few", "ceil", "floor"]  # how many views per image T / S gives

USUAL_SIZE, LARGEST_USUAL_SIZE = 224, 256  # pixels
_DEPTHS = (1 / 2, 2 / 3, 5 / 6, 1)  # of the taps
CLASSIFIERS = ("efficientnet_lite0",)  # that `mivhead.backbones.classes` can read
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
        Heads of the cross-attention; None applies the rule
        `mivhead.head.blocks.default_heads`.
    plain : bool, default=False
        Leave the block to the ridge experts, where the recipe has them. This is for wide maps,
        which take most of the head's time and add little to it.
    candidates : int or None, default=None
        D: the largest number of candidates. The token comes first, then the map, then pooled maps
        spread over `pool_sizes`, starting from the smallest. None keeps all candidates.
    pooled : bool, default=False
        Whether this is the vector that heads on one vector per image use (NCC, Baseline++, FiT),
        where that is not a function of the last block; the MIV-head leaves it out. It comes last.
    deepest : bool, default=False
        Whether this is the deepest block of a backbone, and blocks of another backbone follow.
    classifier : {"efficientnet_lite0"} or None, default=None
        The network whose own classifier is a linear map of the mean of this block, the last one.
        What it says about the shots helps where every class has one shot.
    """

    pool_sizes: tuple[int, ...] = ()
    native: bool = True
    form: Literal["cnn", "vit"] = "cnn"
    tau: float = 500.0
    heads: int | None = None
    plain: bool = False
    candidates: int | None = None
    pooled: bool = False
    deepest: bool = False
    classifier: str | None = None

    def __post_init__(self) -> None:
        check_one_of("form", self.form, ("cnn", "vit"))
        if self.classifier is not None:
            check_one_of("classifier", self.classifier, CLASSIFIERS)
        for size in self.pool_sizes:
            _check_count("each of pool_sizes", size)
        for name in ("heads", "candidates"):
            if (value := getattr(self, name)) is not None:
                _check_count(name, value)
        if isinstance(self.tau, bool) or not isinstance(self.tau, Real) or not self.tau >= 0:
            raise InputError(f"tau must be a number of at least 0, got {self.tau!r}.")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{name} must be an integer of at least 1, got {value!r}.")


def replace_in_blocks(
    blocks: Sequence[BlockPreset], changes: Mapping[str, Any]
) -> tuple[BlockPreset, ...]:
    """Replace fields in the settings of every block; `pool_sizes` needs one list per block.

    >>> [block.tau for block in replace_in_blocks([BlockPreset(), BlockPreset()], {"tau": 0.0})]
    [0.0, 0.0]
    """
    known = [field.name for field in fields(BlockPreset)]
    for name in changes:
        check_one_of("field of a preset", name, known)
    changes = dict(changes)
    sizes = changes.pop("pool_sizes", None)
    changed = [replace(block, **changes) for block in blocks]
    if sizes is None:
        return tuple(changed)
    lists = sizes if isinstance(sizes, list | tuple) else [None]
    if not all(isinstance(each, list | tuple) for each in lists):
        raise InputError(f"pool_sizes needs a list of sizes for each block, got {sizes!r}.")
    if len(lists) != len(changed):
        raise InputError(
            f"pool_sizes has lists for {len(lists)} blocks, the features have {len(changed)}."
        )
    pairs = zip(changed, lists, strict=True)
    return tuple(replace(block, pool_sizes=tuple(each)) for block, each in pairs)


def spread_taps(names: Sequence[str]) -> tuple[str, ...]:
    """Choose four blocks of the deeper half of a ViT: at 1/2, 2/3 and 5/6 of it, and the last.

    Which layer suits a task is not known beforehand, so the head is given several, and stacking
    weighs them. Measured: docs/research-log.md.

    >>> spread_taps([f"blocks.{i}" for i in range(12)])
    ('blocks.5', 'blocks.7', 'blocks.9', 'blocks.11')
    """
    depth = len(names)
    if depth <= len(_DEPTHS):
        return tuple(names)
    return tuple(names[round(depth * share) - 1] for share in _DEPTHS)


def near_usual_size(own: int, patch: int) -> int:
    """Return the input size of a ViT: its own, or if that is large, one near 224 pixels.

    The time grows with the number of patches: 518 pixels take more than five times as long as 224.

    >>> near_usual_size(518, 14), near_usual_size(256, 16), near_usual_size(384, 16)
    (224, 256, 224)
    """
    return own if own <= LARGEST_USUAL_SIZE else patch * round(USUAL_SIZE / patch)


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
        if not all(value > 0 for value in self.std):
            raise InputError(f"std must be positive, got {self.std}.")


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
            raise InputError(
                f"A preset needs one block setting per tap, got {len(self.taps)} taps "
                f"and {len(self.blocks)} settings."
            )
        if any(block.pooled for block in self.blocks[:-1]):
            raise InputError("A pooled block must be the last of a preset.")
