"""Every method by name: its estimator, and what a benchmark must know of it.

To add one, write a page like `centroids.py` and add a row here. A class of your own with `fit` and
`predict_proba` is named `module:Class` wherever the name of a method is expected; it may state its
facts (`FACTS`) as attributes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any, Literal

from mivhead.classifier import MIVClassifier
from mivhead.errors import InputError, check_one_of
from mivhead.head.recipe import DEFAULT_RECIPE, Recipe, resolve_recipe
from mivhead.images.augmentation import ViewsRule
from mivhead_bench.head.recipe import Ablation
from mivhead_bench.methods.baseline import Baseline, BaselinePlusPlus
from mivhead_bench.methods.centroids import NearestCentroid, SimpleShot
from mivhead_bench.methods.gaussian import FitLDA, FitQDA, ProtoNets
from mivhead_bench.methods.laplacian import LaplacianShot
from mivhead_bench.methods.miv import ABLATIONS, change_recipe, head_parameters, make_head
from mivhead_bench.methods.neighbours import NearestNeighbours, TipAdapter
from mivhead_bench.methods.probes import LogisticProbe, RidgeRegression, SupportVectors
from mivhead_bench.methods.tuning.ett import ETT
from mivhead_bench.methods.tuning.finetune import Finetune, LNTune
from mivhead_bench.methods.tuning.tsa import TSA

FACTS = ("paper", "needs", "uses_views", "optimiser")  # attributes of a class
OF_THE_RUN = ("random_state", "device")  # parameters that are not hyperparameters
MIV_PAPER = "Few-shot Classification as Multi-instance Verification (the MIV-head)"


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    name: str
    estimator: type[Any]
    summary: str = ""
    paper: str = ""
    # "images": it tunes the backbone, so it needs the images and a torch module.
    needs: Literal["features", "images"] = "features"
    optimiser: str = ""  # what trains it, where anything is trained by steps
    uses_views: bool = False  # whether it trains on augmented views by default
    uses_unlabelled: bool = False  # whether a benchmark gives it unlabelled images
    settings: Mapping[str, Any] = field(default_factory=dict)  # that make this variant

    @classmethod
    def from_class(cls, name: str, estimator: type[Any], **facts: Any) -> Method:
        """Read the facts that a class states; its summary is the first line of its docstring."""
        summary = (inspect.getdoc(estimator) or "").partition("\n")[0].rstrip(".")
        stated = {fact: getattr(estimator, fact) for fact in FACTS if hasattr(estimator, fact)}
        views = {"uses_views": True} if getattr(estimator, "use_views", False) is True else {}
        return cls(name, estimator, **{"summary": summary} | stated | views | facts)

    @property
    def has_recipe(self) -> bool:
        """Whether it is the MIV-head, which takes a recipe and a preset."""
        return self.estimator is MIVClassifier

    def hyperparameters(self) -> dict[str, Any]:
        """Return all hyperparameters and their values in this method.

        >>> METHODS["knn"].hyperparameters()["neighbours"]
        5
        """
        if self.has_recipe:
            return head_parameters(self.settings)
        parameters = inspect.signature(self.estimator).parameters.values()
        named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        defaults = {p.name: None if p.default is p.empty else p.default for p in named}
        return {k: v for k, v in defaults.items() if k not in OF_THE_RUN} | dict(self.settings)

    def make(
        self,
        *,
        preset: Any = None,
        recipe: str | Recipe | None = None,
        random_state: int | None = None,
        device: str | None = None,
        **params: Any,
    ) -> Any:
        """Make an estimator, not fitted yet; see `make_method`.

        >>> METHODS["miv-eta0"].make().recipe.eta
        0.0
        """
        for name in params:
            check_one_of(f"parameter of {self.name}", name, self.hyperparameters())
        settings = {**self.settings, **params}
        if self.has_recipe:
            usual = settings.pop("recipe", None)
            return make_head(
                usual if recipe is None else recipe,
                preset,
                settings,
                random_state=random_state,
                device=device,
            )
        if recipe is not None:
            raise InputError(f"{self.name} has no recipe; only the MIV-head has one.")
        accepted = inspect.signature(self.estimator).parameters
        of_the_run = {"random_state": random_state, "device": device}
        return self.estimator(**{k: v for k, v in of_the_run.items() if k in accepted} | settings)

    def recipe(self, recipe: str | Recipe | None, params: Mapping[str, Any]) -> Ablation | None:
        """Return the recipe of the MIV-head or one of its ablations; None for other methods.

        >>> METHODS["miv-blocks1"].recipe(None, {"eta": 0.2}).last_blocks
        1
        """
        if not self.has_recipe:
            return None
        settings = {**self.settings, **params}
        usual = settings.pop("recipe", None)
        return change_recipe(usual if recipe is None else recipe, settings)

    def views_rule(
        self, recipe: str | Recipe | None, params: Mapping[str, Any]
    ) -> ViewsRule | None:
        """Return the rule for the number of views that it trains on, or None if it uses none.

        >>> METHODS["miv"].views_rule(None, {}), METHODS["ncc"].views_rule(None, {})
        ('few', None)
        """
        changed = self.recipe(recipe, params)
        if changed is not None:
            return changed.views_rule if changed.use_views else None
        return Recipe.paper().views_rule if params.get("use_views", self.uses_views) else None


def _miv(name: str, summary: str, settings: Mapping[str, Any], **facts: Any) -> Method:
    usual = resolve_recipe(settings.get("recipe", DEFAULT_RECIPE))
    views = settings.get("use_views", usual.use_views)
    return Method(
        name, MIVClassifier, summary, MIV_PAPER, uses_views=views, settings=settings, **facts
    )


_ALL = (
    _miv("miv", "the MIV-head: pooling by attention, cross-attention pooling, several blocks", {}),
    Method.from_class("ncc", NearestCentroid),
    Method.from_class("baseline", Baseline),
    Method.from_class("baseline++", BaselinePlusPlus),
    Method.from_class("fit-lda", FitLDA),
    Method.from_class("fit-qda", FitQDA),
    Method.from_class("fit-protonets", ProtoNets),
    Method.from_class("logistic", LogisticProbe),
    Method.from_class("svm", SupportVectors),
    Method.from_class("knn", NearestNeighbours),
    Method.from_class("ridge", RidgeRegression),
    Method.from_class(
        "ridge-sqrt",
        RidgeRegression,
        summary="Ridge regression on the square roots of the features",
        settings={"power": 0.5},
    ),
    *(
        Method.from_class(
            f"{name}-all",
            kind,
            summary=f"{title} regression on the pooled vectors of all blocks, joined",
            paper="Oquab et al. 2023, DINOv2 (its linear probe), arXiv 2304.07193",
            settings={"blocks": "all", **settings},
        )
        for name, title, kind, settings in (  # penalties: the best of five on the tuning sets
            ("ridge", "Ridge", RidgeRegression, {"alpha": 0.1}),
            ("logistic", "Logistic", LogisticProbe, {"C": 100.0}),
        )
    ),
    Method.from_class("laplacianshot", LaplacianShot),
    Method.from_class(
        "laplacianshot+unlabelled",
        LaplacianShot,
        summary="LaplacianShot on unlabelled images instead of the queries",
        uses_unlabelled=True,
    ),
    Method.from_class("simpleshot", SimpleShot),
    Method.from_class("tip-adapter", TipAdapter),
    Method.from_class("tsa", TSA),
    Method.from_class("ett", ETT),
    Method.from_class("ln-tune", LNTune),
    Method.from_class("finetune", Finetune),
    _miv(
        "miv+unlabelled",
        "miv, which also learns from unlabelled images, if there are any",
        {},
        uses_unlabelled=True,
    ),
    _miv("experts", "the default recipe's ridge experts alone", {"recipe": "experts"}),
    *(
        _miv(name, summary, {"recipe": "paper", **changes})
        for name, (summary, changes) in ABLATIONS.items()
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}


def list_methods() -> list[Method]:
    """Return all methods, the MIV-head first."""
    return list(METHODS.values())


def get_method(name: str) -> Method:
    """Look up a method by name, or a class of your own as `module:Class`.

    >>> get_method("nnc")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: ...Did you mean 'ncc'?
    """
    if ":" in name:
        return Method.from_class(name, _load(name))
    check_one_of("method", name, METHODS)
    return METHODS[name]


def make_method(name: str, **params: Any) -> Any:
    """Make the estimator of a method, not fitted yet.

    Parameters
    ----------
    name : str
        One of `METHODS`, or `module:Class`.
    **params : dict
        Hyperparameters (`METHODS[name].hyperparameters()`), `random_state`, `device`, and for the
        MIV-head and its ablations `recipe` and `preset`. Other methods ignore the preset, and those
        that do not tune the backbone compute on the CPU.

    Returns
    -------
    estimator
        With `fit(X, y, views=None, view_of=None)` and `predict_proba(X)`. X are `Features`, except
        for a method that tunes the backbone: it takes pixels, after `attach(network)`.

    Examples
    --------
    >>> import numpy as np
    >>> make_method("knn", neighbours=3).fit(np.eye(2), ["a", "b"]).classes_
    array(['a', 'b'], dtype='<U1')
    """
    return get_method(name).make(**params)


def _load(name: str) -> type[Any]:
    """Import `module:Class`; where it is not installed, from the current folder."""
    module, _, kind = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # a console script does not look there by itself
        invalidate_caches()
    try:
        estimator: type[Any] = getattr(import_module(module), kind)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(
            f"The method {name!r:.200} cannot be imported ({error}): give an importable module and "
            "its class, such as my_module:MyHead."
        ) from error
    for member in ("fit", "predict_proba"):
        if not callable(getattr(estimator, member, None)):
            raise InputError(f"{name} cannot be used as a method: it has no {member}().")
    return estimator
