"""What every classifier on features shares: scikit-learn's conventions, and nothing of a method."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from mivhead.blocks import Block
from mivhead.errors import InputError
from mivhead.features import Features


@dataclass(frozen=True, eq=False)
class SupportSet:
    """A checked support set, its images ordered by class."""

    features: Features
    labels: NDArray[np.int64]  # class numbers 0 .. classes - 1, ascending
    views: Features | None  # of augmented images
    view_rows: NDArray[np.int64]  # the image that each view was made from

    @property
    def view_labels(self) -> NDArray[np.int64]:
        """Class numbers of the views."""
        return self.labels[self.view_rows]

    @property
    def sources(self) -> NDArray[np.int64]:
        """The image that each of `everything` was made from."""
        return np.concatenate([np.arange(len(self.labels)), self.view_rows])

    def take(self, kept: NDArray[np.bool_]) -> SupportSet:
        """Keep some images, and the views of these."""
        place = np.cumsum(kept) - 1  # of each kept image among them
        used = kept[self.view_rows]
        views = self.views[np.flatnonzero(used)] if self.views is not None and used.any() else None
        rows = np.flatnonzero(kept)
        return SupportSet(
            self.features[rows], self.labels[rows], views, place[self.view_rows[used]]
        )

    @property
    def shots(self) -> list[int]:
        """Images per class."""
        counts: list[int] = np.bincount(self.labels).tolist()
        return counts

    @property
    def everything(self) -> Features:
        """Images and views, the images first."""
        parts = [self.features] if self.views is None else [self.features, self.views]
        return Features.concat(parts)

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """Class numbers of `everything`."""
        return np.concatenate([self.labels, self.view_labels])


class FeatureClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # sklearn: untyped
    """Base of the classifiers on features; a method adds `_fit`, `_logits` and its state.

    Subclasses store their parameters in `__init__`, among them `random_state` and `device`.
    """

    random_state: int | np.random.RandomState | None
    device: str | None
    classes_: NDArray[Any]
    layout_: dict[str, tuple[int, ...]]

    def _check_params(self) -> None:
        """Raise an error for hyperparameters that make no sense, as far as a method checks them."""
        return

    @abstractmethod
    def _fit(self, support: SupportSet, seed: int) -> None:
        """Learn from a checked support set."""

    @abstractmethod
    def _logits(self, features: Features) -> Tensor:
        """Logits (image, class) of features of the right layout."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a model file holds of the method: a JSON document and tensors."""

    @abstractmethod
    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the fitted state from `_state`'s answer, checking everything."""

    def fit(
        self, X: Any, y: ArrayLike, *, views: Any = None, view_of: ArrayLike | None = None
    ) -> Self:
        """Train on a support set.

        Parameters
        ----------
        X
            Support features: `Features`, a 2-D array, or a list of blocks.
        y
            Labels of any kind, one per image; every class needs at least one.
        views
            Features of augmented images.
        view_of
            For each view the row of X that it was made from.
        """
        features = self._as_features(X, reset=True)
        labels = self._encode(y, len(features))
        extra, rows = self._check_views(views, view_of, features)
        order = np.argsort(labels, kind="stable")
        place = np.argsort(order)  # of each image in that order
        support = SupportSet(features[order], labels[order], extra, place[rows])
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._fit(support, self.seed_)
        return self

    def logits(self, X: Any) -> Tensor:
        """Logits (image, class), before any convention for two classes."""
        check_is_fitted(self, "classes_")
        with torch.inference_mode():
            return self._logits(self._as_features(X, reset=False))

    def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
        """Logits (image, class); for two classes their difference (image,)."""
        # In double precision, as probabilities: rounding must not make equal what these tell apart.
        logits = self.logits(X).double().numpy(force=True)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        return torch.softmax(self.logits(X).double(), dim=1).numpy(force=True)

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels of the most probable classes."""
        best = self.logits(X).argmax(dim=1).numpy(force=True)
        chosen: NDArray[Any] = self.classes_[best]
        return chosen

    def _as_features(self, X: Any, *, reset: bool) -> Features:
        if isinstance(X, Features) or _is_blocks(X):
            features = Features(X)
        else:
            features = Features(validate_data(self, X, dtype=[np.float32, np.float64], reset=reset))
        if reset:
            self.n_features_in_ = features.shape[1]
            self.layout_ = features.layout
        elif features.layout != self.layout_:
            raise InputError(
                "X has other blocks or channels than the features the classifier was fitted on: "
                f"got {features.layout}, expected {self.layout_}."
            )
        return features if self.device is None else features.to(torch.device(self.device))

    def _encode(self, y: ArrayLike, n: int) -> NDArray[np.int64]:
        if y is None:
            raise InputError("This classifier requires y to be passed, but the target y is None.")
        values = column_or_1d(y, warn=True)
        if values.dtype.kind == "f":
            assert_all_finite(values, input_name="y")
        with warnings.catch_warnings():  # one shot per class is what we are for
            warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
            check_classification_targets(values)
        if len(values) != n:
            raise InputError(f"X holds {n} images, but y has {len(values)} labels.")
        self.classes_, labels = np.unique(values, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                f"y holds {len(self.classes_)} class; a classifier needs at least 2 classes."
            )
        return labels.astype(np.int64)

    def _check_views(
        self, views: Any, view_of: ArrayLike | None, features: Features
    ) -> tuple[Features | None, NDArray[np.int64]]:
        if views is None:
            if view_of is not None:
                raise InputError("view_of is given without views.")
            return None, np.empty(0, np.int64)
        extra = Features(views).to(features.device)
        rows = np.asarray([] if view_of is None else view_of)
        if extra.layout != features.layout:
            raise InputError(f"views have other blocks than X: {extra} and {features}.")
        if rows.shape != (len(extra),) or (len(rows) and rows.dtype.kind not in "iu"):
            raise InputError(
                f"view_of must hold one row number of X for each of the {len(extra)} views, "
                f"got shape {rows.shape} of type {rows.dtype}."
            )
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(features)):
            raise InputError(f"view_of must hold rows of X, 0 to {len(features) - 1}.")
        return extra if len(rows) else None, rows.astype(np.int64)


def _is_blocks(X: Any) -> bool:
    """Whether X is a list of blocks, a block or an array of patches, not a 2-D table."""
    if isinstance(X, Block) or (isinstance(X, Mapping) and not hasattr(X, "shape")):
        return True
    if isinstance(X, np.ndarray | Tensor):
        return X.ndim in (3, 4)
    if not isinstance(X, list | tuple) or not X:
        return False
    return isinstance(X[0], Mapping | Block) or getattr(X[0], "ndim", 0) >= 2
