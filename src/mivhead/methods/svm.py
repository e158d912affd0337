"""Standardised features and an RBF support vector machine: AutoGluon's few-shot learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mivhead._util.optional import need
from mivhead.methods.base import (
    Array,
    PooledClassifier,
    PooledShots,
    Vectors,
    check_positive,
    graph_distances,
    membership,
    squared_distances,
)
from mivhead.methods.cost import Work

NO_SPREAD = 10 * np.finfo(np.float64).eps  # spread of a constant channel, relative to its values


@dataclass(kw_only=True, eq=False, repr=False)
class SupportVectors(PooledClassifier):
    """Standardised features and scikit-learn's SVC (gamma = 1 / channels), stored as tensors.

    Every pair of classes has its own machine. As in SVC, the class that wins most pairs is
    predicted, the first one in case of a tie. Logits are scikit-learn's one-vs-rest decision
    values: the number of pairs that a class wins, plus its summed margins squeezed into a third of
    a vote to either side; the winner of a tie gets the highest of the tied values. With two
    classes, they are plus and minus half the margin.

    Parameters
    ----------
    C : float, default=1.0
        Inverse weight of the penalty.
    standardise : bool, default=True
        Scale every channel by its own standard deviation, as AutoGluon does. Channels that are
        almost constant in the few support images then dominate a query in which they are not
        (docs/research-log.md). With False, all channels share one scale, which is scikit-learn's
        default for SVC.

    References
    ----------
    "AutoGluon-Multimodal (AutoMM): Supercharging Multimodal AutoML with Foundation Models", 2024,
    arXiv 2404.16233.
    """

    TENSORS: ClassVar = {
        "shift": "channel",
        "scale": "channel",
        "vectors": "vector channel",
        "labels": "vector",
        "coefficients": "vector class",
        "intercepts": "class class",
    }

    C: float = 1.0
    standardise: bool = True

    def _check_params(self) -> None:
        check_positive("C", self.C)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        x, y = shots.x.astype(np.float64), shots.labels
        shift, scale = x.mean(axis=0), x.std(axis=0)
        if not self.standardise:
            shift, scale = np.zeros_like(shift), np.full_like(scale, x.std())
        scale[scale <= NO_SPREAD * np.abs(x).max(axis=0)] = 1.0
        model = need("sklearn.svm", "bench").SVC(C=self.C, gamma="auto").fit((x - shift) / scale, y)
        # For two classes scikit-learn flips signs, so that positive means the second class.
        flip = -1.0 if shots.classes == 2 else 1.0
        owners = np.repeat(np.arange(shots.classes), model.n_support_)
        return {
            "shift": shift,
            "scale": scale,
            "vectors": model.support_vectors_,
            "labels": owners,
            "coefficients": _by_opponent(flip * model.dual_coef_, owners),
            "intercepts": _antisymmetric(flip * model.intercept_, shots.classes),
        }

    def _score(self, x: Array) -> Array:
        learned = self.learned_
        x = (x.astype(np.float64) - learned["shift"]) / learned["scale"]
        kernel = np.exp(-squared_distances(x, learned["vectors"]) / x.shape[1])
        classes = len(self.classes_)
        own = [learned["labels"] == i for i in range(classes)]
        # Evidence of the vectors of class i for i against j
        favour = np.stack([kernel[:, v] @ learned["coefficients"][v] for v in own], axis=1)
        margins = favour - favour.swapaxes(1, 2) + learned["intercepts"]  # (image, i, j)
        totals = margins.sum(axis=2)  # (image, class)
        if classes == 2:
            halves: Array = totals / 2
            return halves
        votes = (margins > 0).sum(axis=2)  # (image, class)
        values: Array = votes + totals / (3 * (np.abs(totals) + 1))
        images, first = np.arange(len(values)), votes.argmax(axis=1)
        values[images, first] = values.max(axis=1)
        return values

    def _graph(self, x: Any) -> Any:
        learned = self.learned_
        channels, classes = len(learned["shift"]), len(self.classes_)
        x = (x.cast(np.float64) - learned["shift"]) / learned["scale"]
        kernel = (graph_distances(x, learned["vectors"]) * (-1 / channels)).exp()  # (n, vector)
        # Evidence of the vectors of class i for i against j: one matrix for all pairs
        own = (
            membership(learned["labels"], classes, np.float64)[:, :, None]
            * learned["coefficients"][:, None, :]
        )
        pairs = (own - own.swapaxes(1, 2)).reshape(len(own), -1)  # (vector, i and j)
        margins = (kernel @ pairs).reshape(0, classes, classes) + learned["intercepts"]  # (n, i, j)
        totals = margins.sum(2)  # (n, class)
        if classes == 2:
            return totals / 2.0
        votes = (margins > 0.0).cast(np.float64).sum(2)  # (n, class)
        values = votes + totals / ((totals.abs() + 1.0) * 3.0)
        # The first of the classes with most votes gets the highest of all values.
        earlier = votes - np.arange(classes) / (2 * classes)  # votes are integers
        best = (earlier - earlier.largest(1) + 1e-9 > 0.0).cast(np.float64)  # (n, class): 1 for it
        return values * (best * -1.0 + 1.0) + best * values.largest(1)

    def _work(self, size: Vectors) -> Work:
        return Work.once(size.n**2 * size.c)  # one kernel matrix; the rest of libsvm is small


def _by_opponent(dual: NDArray[np.float64], owners: NDArray[np.int64]) -> NDArray[np.float64]:
    """Turn libsvm's (classes - 1, vector) into (vector, class): weight of a vector against a class.

    libsvm leaves a vector's own class out of the rows, and gives the vectors of a pair's second
    class negative signs.
    """
    full = np.zeros((len(owners), len(dual) + 1))
    for vector, owner in enumerate(owners):
        full[vector, :owner] = -dual[:owner, vector]
        full[vector, owner + 1 :] = dual[owner:, vector]
    return full


def _antisymmetric(values: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """Arrange the pairs (0, 1), (0, 2), ... (1, 2), ... in a matrix of i against j."""
    upper = np.zeros((classes, classes))
    upper[np.triu_indices(classes, 1)] = values
    return upper - upper.T
