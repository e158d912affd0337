"""The nearest class mean: by cosine (NCC), or of centred vectors of length 1 (SimpleShot)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scipy.spatial.distance import cdist

from mivhead._util.arrays import unit
from mivhead_bench.methods.base import Array, Labels, PooledClassifier, class_means


@dataclass(kw_only=True, eq=False, repr=False)
class NearestCentroid(PooledClassifier):
    """Cosine to the class mean; nothing is trained.

    Vectors are not normalised before they are averaged.

    >>> import numpy as np
    >>> X, y = np.array([[1.0, 0.1], [3.0, 0.2], [0.1, 1.0]]), ["right", "right", "up"]
    >>> NearestCentroid().fit(X, y).predict(np.array([[9.0, 1.0]])).tolist()
    ['right']
    """

    paper: ClassVar = "Few-shot Classification as Multi-instance Verification (the MIV-head)"

    centred: bool = False  # subtract the mean of the class means first
    temperature: float = 0.1  # divides the cosines; changes probabilities, not predictions

    def _learn(self, x: Array, labels: Labels) -> None:
        self.means_ = class_means(x, labels)
        self.middle_ = self.means_.mean(axis=0) if self.centred else 0.0

    def _logits(self, x: Array) -> Array:
        return unit(x - self.middle_) @ unit(self.means_ - self.middle_).T / self.temperature


@dataclass(kw_only=True, eq=False, repr=False)
class SimpleShot(PooledClassifier):
    """Euclidean distance to the class mean of centred features of length 1.

    The paper centres by the mean over the classes that the backbone was trained on. A frozen
    backbone comes without them, so the mean of the class means takes its place.
    """

    paper: ClassVar = "Wang et al. 2019, SimpleShot, arXiv 1911.04623"

    temperature: float = 0.1  # divides squared distances

    def _learn(self, x: Array, labels: Labels) -> None:
        self.middle_ = class_means(x, labels).mean(axis=0)
        self.means_ = class_means(unit(x - self.middle_), labels)

    def _logits(self, x: Array) -> Array:
        distances: Array = cdist(unit(x - self.middle_), self.means_, "sqeuclidean")
        return -distances / self.temperature
