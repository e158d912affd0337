"""`PooledClassifier`: what all rivals on one vector per image share.

A rival is a subclass that learns from vectors in `_learn` and scores vectors in `_logits`. Its
fields are its hyperparameters, the first line of its docstring is its summary, and `paper` says
where it comes from.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin

from mivhead._util.arrays import unit
from mivhead.errors import InputError, check_one_of
from mivhead.features import Features, SupportSet, image_vectors

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


class LogitClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # they have no types
    """A classifier whose `logits` give its probabilities and predictions."""

    classes_: NDArray[Any]

    @abstractmethod
    def logits(self, X: Any) -> NDArray[np.floating[Any]]:
        """Logits (image, class)."""

    def predict_proba(self, X: Any) -> Array:
        """Probabilities (image, class), in the order of `classes_`."""
        probabilities: Array = softmax(self.logits(X).astype(np.float64), axis=1)
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels of the most probable classes."""
        chosen: NDArray[Any] = self.classes_[self.logits(X).argmax(axis=1)]
        return chosen


@dataclass(kw_only=True, eq=False, repr=False)
class PooledClassifier(LogitClassifier):
    """A classifier that learns from pooled features."""

    paper: ClassVar[str]

    blocks: Literal["last", "all"] = "last"  # what to pool: see `pooled` and `joined`
    use_views: bool = False  # count augmented views as further images
    random_state: int | None = None  # where weights are drawn at random

    @abstractmethod
    def _learn(self, x: Array, labels: Labels) -> None:
        """Learn from vectors (image, channel), ordered by class, and their class numbers."""

    @abstractmethod
    def _logits(self, x: Array) -> Array:
        """Logits (image, class) of vectors (image, channel)."""

    def fit(
        self, X: Any, y: ArrayLike, *, views: Any = None, view_of: ArrayLike | None = None
    ) -> Self:
        """Fit to `Features` of labelled images, and perhaps of views of the images `view_of`."""
        check_hyperparameters(self)
        check_one_of("blocks", self.blocks, ("last", "all"))
        support = SupportSet.read(Features(X), y, views, view_of)
        features, labels = support.features, support.labels
        if self.use_views:
            features, labels = support.everything, support.labels[support.sources]
        self.classes_ = support.classes
        order = np.argsort(labels, kind="stable")
        self._learn(self._vectors(features)[order], labels[order])
        return self

    def logits(self, X: Any) -> Array:
        """Logits (image, class)."""
        return self._logits(self._vectors(Features(X)))

    def _vectors(self, features: Features) -> Array:
        return joined(features) if self.blocks == "all" else pooled(features).astype(np.float64)


def check_hyperparameters(estimator: Any) -> None:
    """Check that numbers are positive and whole where their defaults are; `steps` may be 0."""
    for name, kind in ((f.name, type(f.default)) for f in fields(estimator)):
        if kind not in (int, float):
            continue
        value: Any = getattr(estimator, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and (kind is float or isinstance(value, int))
        if not fits or not (0 < value < np.inf or (name == "steps" and value == 0)):
            raise InputError(f"{name} must be a positive {kind.__name__}, got {value!r}.")


def pooled(features: Features) -> NDArray[np.float32]:
    """Pool to (image, channel): the deepest block's token, or else the mean of its map.

    >>> pooled(Features(np.arange(8.0).reshape(1, 2, 2, 2)))
    array([[1.5, 5.5]], dtype=float32)
    """
    return image_vectors(features.blocks[-1])


def joined(features: Features) -> Array:
    """Pool to (image, channel): token or mean patch of every block, each of length 1, joined.

    >>> joined(Features([np.full((1, 2, 3, 3), 7.0), np.array([[3.0, 4.0]])])).round(2)
    array([[0.71, 0.71, 0.6 , 0.8 ]])
    """
    vectors = (image_vectors(block).astype(np.float64) for block in features.blocks)
    return np.concatenate([unit(block_vectors) for block_vectors in vectors], axis=1)


def one_hot(labels: Labels) -> Array:
    """Rows (image, class) of class numbers."""
    return np.eye(labels.max() + 1)[labels]


def class_means(x: Array, labels: Labels) -> Array:
    """Mean vector of every class: (image, channel) to (class, channel).

    >>> class_means(np.array([[2.0], [4.0], [5.0]]), np.array([0, 0, 1])).T
    array([[3., 5.]])
    """
    members = one_hot(labels)
    means: Array = members.T @ x / members.sum(axis=0)[:, None]
    return means
