"""The recipe: how a head is trained and combined, the only place where these values are set.

The constants of the ridge experts and of stacking are in `mivhead.ensemble`. What belongs to a
backbone is a `Preset` (`mivhead.backbones.preset`); what follows from it for a block of some
shape is in `mivhead.head.blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from mivhead._util.schema import check_types, from_json, to_json
from mivhead.backbones.preset import ViewsRule
from mivhead.errors import InputError, check_one_of


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
    views_rule : {"few", "ceil", "floor"}, default="few"
        Augmented views per image of a class with S <= T shots: `"ceil"` is ceil(T / S) (the
        authors' code), `"floor"` is max(1, floor(T / S)) (the paper's text). `"few"` is
        min(4, ceil(T / S)) up to four shots, and none for larger classes: more views take time
        and do not help (docs/research-log.md).
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
    vote : {"stacked", "prior", "logsumexp", "experts"}, default="stacked"
        How the members of the ensemble are combined. `"logsumexp"`: the blocks of the head alone,
        as in the paper. `"stacked"`: the blocks and the ridge experts (`mivhead.ensemble`), with
        weights fitted by stacking on out-of-fold predictions. `"prior"`: the same members with
        the weights from which stacking starts. `"experts"`: as `"stacked"`, without a head, so
        that nothing is trained by gradient descent.

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
    views_rule: ViewsRule = "few"
    use_views: bool = True
    last_blocks: int | None = None
    start: Literal["random", "identity"] = "identity"
    self_mask: bool = True
    objective: Literal["joint", "blocks"] = "blocks"
    vote: Literal["logsumexp", "prior", "stacked", "experts"] = "stacked"

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

        Parameters
        ----------
        **changes : dict
            Fields to replace, such as `steps=10`.

        Returns
        -------
        Recipe

        Examples
        --------
        >>> Recipe.paper(steps=10).eta
        0.1
        """
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

    @classmethod
    def from_file(cls, document: Any) -> Self:
        """Read the recipe of a model file, checking every key and type.

        Version 0.1.0 knew the paper's recipe only, so a missing field has the paper's value.

        Parameters
        ----------
        document : dict
            Parsed JSON.

        Returns
        -------
        Recipe
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

    @property
    def has_head(self) -> bool:
        """Whether the blocks of the head are members of the ensemble."""
        return self.vote != "experts"

    @property
    def stacks(self) -> bool:
        """Whether weights are fitted by stacking."""
        return self.vote in ("stacked", "experts")


DEFAULT_RECIPE = "mivhead"
RECIPES: dict[str, Recipe] = {
    DEFAULT_RECIPE: Recipe(),  # the measurements: docs/explanation/the-recipe.md
    "experts": Recipe(vote="experts", use_views=False),
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
