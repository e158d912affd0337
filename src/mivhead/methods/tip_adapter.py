"""Tip-Adapter's training-free cache of keys (features) and values (labels)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mivhead.methods.base import (
    Array,
    PooledClassifier,
    PooledShots,
    Vectors,
    check_positive,
    counts,
    graph_unit,
    membership,
    unit,
)
from mivhead.methods.cost import Work


@dataclass(kw_only=True, eq=False, repr=False)
class TipAdapter(PooledClassifier):
    """Logits alpha A L, with affinities A = exp(-beta (1 - cosine)) and one-hot labels L.

    The paper adds these logits to those of CLIP's text encoder. A frozen image backbone has none,
    so this is the cache alone; without the other term alpha changes only the probabilities.

    Parameters
    ----------
    alpha : float, default=1.0
        Scale of the logits.
    beta : float, default=5.5
        Sharpness: with a large beta the nearest images decide.
    average : bool, default=False
        Divide a class's sum by its shots. The paper's tasks have equal shots, where this is only a
        scale; with unequal ones the sum favours large classes.

    References
    ----------
    Zhang et al., "Tip-Adapter: Training-free CLIP-Adapter for Better Vision-Language Modeling",
    2021, arXiv 2111.03930.
    """

    TENSORS: ClassVar = {"keys": "shot channel", "labels": "shot"}

    alpha: float = 1.0
    beta: float = 5.5
    average: bool = False

    def _check_params(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("beta", self.beta)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        return {"keys": unit(shots.x.astype(np.float64)), "labels": shots.labels}

    def _score(self, x: Array) -> Array:
        keys, labels = self.learned_["keys"], self.learned_["labels"]
        classes = len(self.classes_)
        cosines = unit(x.astype(np.float64)) @ keys.T  # (image, shot)
        affinities = np.exp(self.beta * (cosines - 1))
        sums = affinities @ membership(labels, classes, keys.dtype)  # (image, class)
        return self.alpha * (sums / counts(labels, classes) if self.average else sums)

    def _graph(self, x: Any) -> Any:
        cosines = graph_unit(x.cast(np.float64)) @ self.learned_["keys"].T  # (n, shot)
        hot = membership(self.learned_["labels"], len(self.classes_), np.float64)
        shares = hot / hot.sum(axis=0) if self.average else hot
        return ((cosines - 1.0) * self.beta).exp() @ (self.alpha * shares)

    def _work(self, _size: Vectors) -> Work:
        return Work()  # features are stored as they are
