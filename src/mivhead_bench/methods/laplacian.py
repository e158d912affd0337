"""LaplacianShot: nearest prototypes, and neighbouring images that agree with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist
from scipy.special import softmax

from mivhead._util.arrays import unit
from mivhead.features import Features
from mivhead_bench.methods.base import Array, Labels, PooledClassifier, class_means, one_hot

SHARPNESS = 10.0  # of the cosines that weigh images in rectified prototypes, as in the paper
ITERATIONS = 20  # the paper's most; assignments hardly move after ten


@dataclass(kw_only=True, eq=False, repr=False)
class LaplacianShot(PooledClassifier):
    """Nearest prototypes on images that are named together, with a graph of neighbours.

    It is transductive: a prediction depends on the images that it is asked for together with, or,
    if unlabelled images are given to `fit`, on those alone. Minimises, over the assignments y_q of
    these images, their squared distances to prototypes and -strength times the agreement of
    nearest neighbours, by the paper's bound: y_q = softmax(-distance + strength * sum of y_p over
    the neighbours p). The paper centres by the classes that the backbone was trained on; here, as
    in `simpleshot`, by the mean of the class means.
    """

    paper: ClassVar = "Ziko et al. 2020, Laplacian Regularized Few-Shot Learning, arXiv 2006.15486"

    # lambda, which the paper chooses on validation classes. On the tuning sets of
    # docs/research-log.md, 0.3 is best over 1 and 5 shots, and so is rectifying.
    strength: float = 0.3
    neighbours: int = 3  # k
    rectify: bool = True  # move the images to the shots, and let them take part in the prototypes

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        *,
        views: Any = None,
        view_of: ArrayLike | None = None,
        unlabelled: Any = None,
    ) -> Self:
        """Fit as all pooled classifiers do; `unlabelled` are `Features` of further images."""
        self.pool_ = None if unlabelled is None else self._vectors(Features(unlabelled))
        return super().fit(X, y, views=views, view_of=view_of)

    def _learn(self, x: Array, labels: Labels) -> None:
        self.middle_ = class_means(x, labels).mean(axis=0)
        self.shots_, self.labels_ = unit(x - self.middle_), labels

    def _logits(self, x: Array) -> Array:
        images = unit(x - self.middle_)
        pool = images if self.pool_ is None else unit(self.pool_ - self.middle_)
        prototypes, shift = self._prototypes(pool)
        near: Array = -cdist(pool + shift, prototypes, "sqeuclidean")  # (image of the pool, class)
        graph = self._graph(pool, pool, itself=True)
        logits: Array = near
        for _ in range(ITERATIONS):
            logits = near + self.strength * graph @ softmax(logits, axis=1)
        if self.pool_ is None:
            return logits
        near = -cdist(images + shift, prototypes, "sqeuclidean")  # (image, class)
        voted: Array = near + self.strength * self._graph(images, pool) @ softmax(logits, axis=1)
        return voted

    def _prototypes(self, pool: Array) -> tuple[Array, Array]:
        """Return the prototypes, and what moves the mean of the pool to that of the shots."""
        prototypes = class_means(self.shots_, self.labels_)
        if not self.rectify:
            return prototypes, np.zeros_like(self.middle_)
        shift = self.shots_.mean(axis=0) - pool.mean(axis=0)
        moved = pool + shift
        cosines = unit(moved) @ unit(prototypes).T  # (image of the pool, class)
        everything = np.concatenate([self.shots_, moved])
        members = one_hot(np.concatenate([self.labels_, cosines.argmax(axis=1)]))
        weights = members * np.exp(SHARPNESS * unit(everything) @ unit(prototypes).T)
        return (weights / weights.sum(axis=0)).T @ everything, shift

    def _graph(self, images: Array, pool: Array, *, itself: bool = False) -> Array:
        """Return 1 where an image of the pool is among the nearest ones of an image, or else 0."""
        distances: Array = cdist(images, pool)
        if itself:
            np.fill_diagonal(distances, np.inf)
        count = min(self.neighbours, len(pool) - itself)
        graph: Array = np.zeros_like(distances)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :count]
        np.put_along_axis(graph, nearest, 1.0, axis=1)
        return graph
