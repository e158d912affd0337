"""The recipe of the laboratory: the product's, and what the paper's ablations change."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Self

from mivhead.errors import InputError
from mivhead.head.recipe import Recipe


@dataclass(frozen=True)
class Ablation(Recipe):
    """A recipe whose formulas may differ from the paper's.

    Parameters
    ----------
    prototype : {"cap", "mean"}, default="cap"
        `"cap"` is cross-attention pooling (Component 2). `"mean"`: a prototype is the mean of the
        image vectors of its class.
    attention : {"l1", "dot"}, default="l1"
        `"l1"` is the paper's distance-based attention, `"dot"` the scaled dot product.
    cross_attention, co_excitation, skip : bool, default=True
        The three mechanisms of CAP. Without cross-attention, all shots have the same weight, W^K
        is left out, and the skip connection adds the normalised vector itself.
    centred : bool or None, default=None
        Whether cosines are taken around the mean of the prototypes. None means True for
        `prototype="cap"` and False for `prototype="mean"`.
    last_blocks : int or None, default=None
        N: use only this many of the deepest blocks of the features; None uses all of them.

    Examples
    --------
    >>> Ablation.paper().is_ablated, Ablation.paper(skip=False).is_ablated
    (False, True)
    """

    prototype: Literal["cap", "mean"] = "cap"
    attention: Literal["l1", "dot"] = "l1"
    cross_attention: bool = True
    co_excitation: bool = True
    skip: bool = True
    centred: bool | None = None
    last_blocks: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.self_mask and self.prototype == "mean":
            raise InputError(
                "self_mask=True needs prototype='cap', because the mean of a class is the same for "
                "all queries; set self_mask=False."
            )
        if self.last_blocks is not None and self.last_blocks < 1:
            raise InputError(f"last_blocks must be at least 1 or None, got {self.last_blocks}.")

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Turn a recipe of the product into one of the laboratory."""
        return recipe if isinstance(recipe, cls) else cls(**vars(recipe))

    @property
    def is_ablated(self) -> bool:
        """Whether the product's head cannot compute it."""
        return self != Ablation.of(self.product)

    @property
    def product(self) -> Recipe:
        """The recipe of the product that has the same fields."""
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})

    @property
    def centres(self) -> bool:
        """Whether cosines are centred, after resolving None."""
        return self.prototype == "cap" if self.centred is None else self.centred
