"""`UserMethod`: a class with `fit` and `predict_proba`, adapted to the interface of methods."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json, split_tensors
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.methods.registry import Method
from mivhead.support import SupportSet


class UserMethod(FeatureClassifier):
    """Wraps an estimator that was not written for mivhead.

    Its class is created with the given hyperparameters, and with `random_state` and `device` if it
    takes them. `fit(X, y)` gets `Features` and labels; a class with `uses_views = True` gets
    `views` and `view_of`, too. `predict_proba(X)` returns one column per class, in sorted order.

    A model file stores the support features, and loading fits again: nothing is pickled.

    Parameters
    ----------
    home : str
        `module:Class` of the estimator.
    params : Mapping or None, default=None
        Hyperparameters of the estimator, by name.
    random_state : int, RandomState instance or None, default=None
        Seed of the estimator.
    device : str or None, default=None
        Device of the estimator, if it takes one.

    Attributes
    ----------
    estimator_ : object
        The fitted estimator.
    """

    def __init__(
        self,
        home: str,
        params: Mapping[str, Any] | None = None,
        *,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.home = home
        self.params = params
        self.random_state = random_state
        self.device = device

    def work(self, *sizes: Any) -> Any:
        """Count the work of fitting, if the estimator's class does."""
        count = getattr(self._make(seed=0), "work", None)
        return None if count is None else count(*sizes)

    def _make(self, seed: int) -> Any:
        kind = Method.from_class(self.home, self.home).load()
        given = {"random_state": seed, "device": self.device}
        accepted = inspect.signature(kind).parameters
        own = {name: value for name, value in given.items() if name in accepted}
        return kind(**own | dict(self.params or {}))

    def _fit(self, support: SupportSet, seed: int) -> None:
        if not Method.from_class(self.home, self.home).uses_views:
            support = replace(support, views=None, view_rows=support.view_rows[:0])
        views: dict[str, Any] = {}
        if support.views is not None:
            views = {"views": support.views, "view_of": support.view_rows}
        self.support_ = support
        self.estimator_ = self._make(seed)
        self.estimator_.fit(support.features, self.classes_[support.labels], **views)

    @property
    def _stored_support(self) -> Features:
        features: Features = self.support_.features
        return features

    def _logits(self, features: Features) -> NDArray[np.float64]:
        found = np.asarray(self.estimator_.predict_proba(features))
        expected = (len(features), len(self.classes_))
        if found.shape != expected:
            raise InputError(
                f"predict_proba of {self.home} returned shape {found.shape}, "
                f"expected (images, classes) = {expected}."
            )
        with np.errstate(divide="ignore"):  # a class may have probability 0
            logits: NDArray[np.float64] = np.log(found.astype(np.float64))
        return logits

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        support = self.support_
        config = {
            "params": dict(self.params or {}),
            "shots": np.bincount(support.labels).tolist(),
            "view_rows": support.view_rows.tolist(),
        }
        try:
            json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The hyperparameters of {self.home} cannot be saved ({error}): a model file holds "
                "only numbers, strings, booleans and lists of them."
            ) from error
        tensors = {f"support.{name}": t for name, t in support.features.tensors.items()}
        if support.views is not None:
            tensors |= {f"views.{name}": t for name, t in support.views.tensors.items()}
        return config, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        known = {name: value for name, value in config.items() if name != "recipe"}
        saved = from_json(_Saved, known, "config")
        stored, extra = split_tensors(tensors, ("support", "views"))
        features = Features.from_tensors(stored)
        views = Features.from_tensors(extra) if extra else None
        rows = np.asarray(saved.view_rows, np.int64)
        shots = np.asarray(saved.shots, np.int64)
        if len(shots) != len(self.classes_) or shots.min() < 1 or shots.sum() != len(features):
            raise InputError(f"shots {saved.shots} do not fit {features}.")
        count = 0 if views is None else len(views)
        if len(rows) != count or not np.isin(rows, np.arange(len(features))).all():
            raise InputError(f"view_rows do not fit {count} views of {len(features)} images.")
        self.params = saved.params
        self.layout_, self.n_features_in_ = features.layout, features.shape[1]
        labels = np.repeat(np.arange(len(shots)), shots)
        self._fit(SupportSet(features, labels, views, rows), self.seed_)


@dataclass(frozen=True)
class _Saved:
    """The JSON document of a model file."""

    params: dict[str, Any]
    shots: tuple[int, ...]
    view_rows: tuple[int, ...]
