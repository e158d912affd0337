"""Baseline and Baseline++: a linear or a cosine classifier, trained by Adam on the full batch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mivhead.engine.head import torch_uniform
from mivhead.methods.base import (
    Array,
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    cross_entropy,
    minimise,
    unit,
)
from mivhead.methods.cost import BACKWARD, Work

LENGTH_EPS = 1e-5  # added to the length of a feature
MANY_CLASSES = 200  # above which Baseline++ needs a larger scale


@dataclass(kw_only=True, eq=False, repr=False)
class _Trained(PooledClassifier):
    """Both classifiers: the same optimiser, and tensors that are trained as they are stored."""

    learning_rate: float = 0.03
    steps: int = 400

    def _check_params(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_count("steps", self.steps, least=0)

    @abstractmethod
    def _gradients(self, x: Array, grad: Array) -> list[Array]:
        """Gradients of what is trained, given that of the logits (image, class) of images."""

    def _train(self, shots: PooledShots, start: dict[str, Array]) -> dict[str, Array]:
        self.learned_ = start

        def loss() -> tuple[float, list[Array]]:
            value, grad = cross_entropy(self._score(shots.x), shots.labels)
            return value, self._gradients(shots.x, grad)

        parameters = list(start.values())
        self.losses_ = minimise(loss, parameters, rate=self.learning_rate, steps=self.steps)
        return start

    def _start(self, shots: PooledShots) -> Array:
        """Initialise weights (class, channel) as PyTorch does for a linear layer."""
        shape = shots.classes, shots.x.shape[1]
        return torch_uniform(np.random.RandomState(shots.seed), shape, shape[1] ** -0.5)

    def _work(self, size: Vectors) -> Work:
        """Count the scores and one gradient per step: the features are frozen."""
        forward = self.steps * size.n * size.c * size.ways
        return Work(2 * forward, paper=BACKWARD * forward)


@dataclass(kw_only=True, eq=False, repr=False)
class Baseline(_Trained):
    """A linear layer with bias on the pooled features.

    The paper trains it by SGD in small batches; here it has the optimiser of Baseline++, so that
    the two differ only in the classifier.

    Parameters
    ----------
    learning_rate : float, default=0.03
        Learning rate of Adam.
    steps : int, default=400
        Number of steps, each on the full batch.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Chen et al., "A Closer Look at Few-shot Classification", 2019, arXiv 1904.04232.
    """

    TENSORS: ClassVar = {"weights": "class channel", "biases": "class"}

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        weights = self._start(shots)
        return self._train(shots, {"weights": weights, "biases": np.zeros_like(weights[:, 0])})

    def _score(self, x: Array) -> Array:
        return x @ self.learned_["weights"].T + self.learned_["biases"]

    def _graph(self, x: Any) -> Any:
        return x @ self.learned_["weights"].T + self.learned_["biases"]

    def _gradients(self, x: Array, grad: Array) -> list[Array]:
        return [grad.T @ x, grad.sum(axis=0)]


@dataclass(kw_only=True, eq=False, repr=False)
class BaselinePlusPlus(_Trained):
    """A cosine classifier with a learned length per class.

    Features and class vectors have length 1; logits are scale * length * cosine.

    Parameters
    ----------
    learning_rate : float, default=0.03
        Learning rate of Adam.
    steps : int, default=400
        Number of steps, each on the full batch.
    scale : float or None, default=None
        Scale of the logits; None: 2, or 10 above 200 classes.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Chen et al., "A Closer Look at Few-shot Classification", 2019, arXiv 1904.04232.
    """

    TENSORS: ClassVar = {"directions": "class channel", "lengths": "class"}

    scale: float | None = None

    def _check_params(self) -> None:
        super()._check_params()
        if self.scale is not None:
            check_positive("scale", self.scale)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        weights = self._start(shots)
        lengths = np.linalg.norm(weights, axis=1)
        return self._train(shots, {"directions": weights, "lengths": lengths})

    def _score(self, x: Array) -> Array:
        cosines = _shortened(x) @ unit(self.learned_["directions"]).T  # (image, class)
        logits: Array = self.logit_scale * self.learned_["lengths"] * cosines
        return logits

    def _graph(self, x: Any) -> Any:
        x = x / ((x * x).sum(1, keepdims=True).sqrt() + LENGTH_EPS)
        directions = unit(self.learned_["directions"]).T
        return x @ (directions * self.logit_scale * self.learned_["lengths"])

    @property
    def logit_scale(self) -> float:
        """The scale of the logits, after `fit`."""
        return self.scale or (2.0 if len(self.classes_) <= MANY_CLASSES else 10.0)

    def _gradients(self, x: Array, grad: Array) -> list[Array]:
        directions, lengths = self.learned_["directions"], self.learned_["lengths"]
        flow = self.logit_scale * grad.T @ _shortened(x)  # of length * unit: (class, channel)
        units = unit(directions)
        d_lengths = (flow * units).sum(axis=1)
        turned = lengths[:, None] * (flow - d_lengths[:, None] * units)  # across the direction
        return [turned / np.linalg.norm(directions, axis=1, keepdims=True), d_lengths]


def _shortened(x: Array) -> Array:
    """Scale vectors (image, channel) to about length 1."""
    scaled: Array = x / (np.linalg.norm(x, axis=1, keepdims=True) + LENGTH_EPS)
    return scaled
