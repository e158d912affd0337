"""k nearest neighbours by cosine, with weighted votes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mivhead.methods.base import (
    Array,
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    graph_unit,
    membership,
    unit,
)
from mivhead.methods.cost import Work
from mivhead.model.decision import softmax

LEAST_SHARE = 1e-6  # of the votes, for a class without a neighbour: logits stay finite


@dataclass(kw_only=True, eq=False, repr=False)
class NearestNeighbours(PooledClassifier):
    """The k support images of highest cosine vote, each with exp(cosine / temperature).

    Logits are logarithms of the shares of votes, so that probabilities are the shares. One shot
    per class needs no special treatment: with such weights the nearest image wins.

    Parameters
    ----------
    neighbours : int, default=5
        k; with fewer support images, all of them vote.
    temperature : float, default=0.07
        With a small temperature near neighbours count for more.

    References
    ----------
    Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", 2018,
    arXiv 1805.01978.
    """

    TENSORS: ClassVar = {"keys": "shot channel", "labels": "shot"}

    neighbours: int = 5
    temperature: float = 0.07

    def _check_params(self) -> None:
        check_count("neighbours", self.neighbours, least=1)
        check_positive("temperature", self.temperature)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        return {"keys": unit(shots.x.astype(np.float64)), "labels": shots.labels}

    def _score(self, x: Array) -> Array:
        keys, labels = self.learned_["keys"], self.learned_["labels"]
        cosines = unit(x.astype(np.float64)) @ keys.T  # (image, shot)
        order = np.argsort(-cosines, axis=1, kind="stable")
        rows = order[:, : self.neighbours]  # (image, neighbour)
        shares = softmax(np.take_along_axis(cosines, rows, axis=1) / self.temperature)
        voters = membership(labels[rows], len(self.classes_), shares.dtype)
        votes = np.einsum("qn,qnc->qc", shares, voters)  # (image, class)
        found: Array = np.log(np.maximum(votes, LEAST_SHARE))
        return found

    def _graph(self, x: Any) -> Any:
        cosines = graph_unit(x.cast(np.float64)) @ self.learned_["keys"].T  # (n, shot)
        k = min(self.neighbours, len(self.learned_["keys"]))
        nearest, rows = cosines.top(k)  # (n, neighbour)
        shares = (nearest / self.temperature).softmax(1)
        hot = x.graph.value(membership(self.learned_["labels"], len(self.classes_), np.float64))
        voters = hot.pick(rows)  # (n, neighbour, class)
        votes = (shares.reshape(0, 1, -1) @ voters).reshape(0, -1)  # (n, class)
        return votes.at_least(LEAST_SHARE).log()

    def _work(self, _size: Vectors) -> Work:
        return Work()  # features are stored as they are
