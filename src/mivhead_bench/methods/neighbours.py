"""Methods that keep the shots: k nearest neighbours, and Tip-Adapter's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from mivhead._util.arrays import unit
from mivhead_bench.methods.base import Array, Labels, PooledClassifier, one_hot

LEAST_VOTES = 1e-6  # of a class without a neighbour: logits stay finite


@dataclass(kw_only=True, eq=False, repr=False)
class NearestNeighbours(PooledClassifier):
    """Weighted votes of the nearest support images.

    The k images of highest cosine vote, each with exp(cosine / temperature); probabilities are the
    fractions of votes. With one shot per class, the nearest image wins.
    """

    paper: ClassVar = "Wu et al. 2018, Non-Parametric Instance Discrimination, arXiv 1805.01978"

    neighbours: int = 5  # k; with fewer images, all of them vote
    temperature: float = 0.07  # the smaller, the more the nearest ones count

    def _learn(self, x: Array, labels: Labels) -> None:
        model = KNeighborsClassifier(
            min(self.neighbours, len(x)),
            weights=lambda distances: np.exp(-distances / self.temperature),
            metric="cosine",
        )
        self.model_ = model.fit(x, labels)

    def _logits(self, x: Array) -> Array:
        votes: Array = self.model_.predict_proba(x)
        return np.log(np.maximum(votes, LEAST_VOTES))


@dataclass(kw_only=True, eq=False, repr=False)
class TipAdapter(PooledClassifier):
    """A cache of features and labels; without CLIP's text term; nothing is trained.

    Logits are alpha A L, with affinities A = exp(-beta (1 - cosine)) and one-hot labels L. The
    paper adds those of CLIP's text encoder, which a frozen image backbone does not have; without
    them, alpha changes only the probabilities.
    """

    paper: ClassVar = "Zhang et al. 2021, Tip-Adapter, arXiv 2111.03930"

    alpha: float = 1.0
    beta: float = 5.5  # with a large beta, the nearest images decide
    average: bool = False  # divide by the shots of a class, which favours no large classes

    def _learn(self, x: Array, labels: Labels) -> None:
        self.keys_, self.values_ = unit(x), one_hot(labels)
        if self.average:
            self.values_ /= self.values_.sum(axis=0)

    def _logits(self, x: Array) -> Array:
        affinities = np.exp(self.beta * (unit(x) @ self.keys_.T - 1))  # (image, shot)
        logits: Array = self.alpha * affinities @ self.values_
        return logits
