"""NCC: the nearest class centroid by cosine."""

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
    class_means,
    class_means_work,
    graph_unit,
    unit,
)
from mivhead.methods.cost import Work


@dataclass(kw_only=True, eq=False, repr=False)
class NearestCentroid(PooledClassifier):
    """Cosine to the mean of each class's pooled features, which are not normalised before.

    Parameters
    ----------
    centred : bool, default=False
        Subtract the mean of the class means from queries and class means first.
    temperature : float, default=0.1
        Cosines are divided by it to become logits; it changes probabilities, not predictions.

    References
    ----------
    The baseline of the MIV-head's paper.

    Examples
    --------
    >>> from mivhead.methods import make_method
    >>> X, y = [[1.0, 0.1], [3.0, 0.2], [0.1, 1.0]], ["right", "right", "up"]
    >>> make_method("ncc").fit(X, y).predict([[9.0, 1.0]]).tolist()
    ['right']
    """

    TENSORS: ClassVar = {"means": "class channel"}

    centred: bool = False
    temperature: float = 0.1

    def _check_params(self) -> None:
        check_positive("temperature", self.temperature)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        return {"means": class_means(shots.x.astype(np.float64), shots.labels, shots.classes)}

    def _score(self, x: Array) -> Array:
        means, x = self.learned_["means"], x.astype(np.float64)
        if self.centred:
            middle = means.mean(axis=0)
            means, x = means - middle, x - middle
        return unit(x) @ unit(means).T / self.temperature  # (image, class)

    def _graph(self, x: Any) -> Any:
        means, x = self.learned_["means"], x.cast(np.float64)
        if self.centred:
            middle = means.mean(axis=0)
            means, x = means - middle, x - middle
        return graph_unit(x) @ (unit(means).T / self.temperature)

    def _work(self, size: Vectors) -> Work:
        return class_means_work(size)
