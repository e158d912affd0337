"""SimpleShot: the nearest centroid of centred features of length 1."""

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
    graph_distances,
    graph_unit,
    squared_distances,
    unit,
)
from mivhead.methods.cost import Work


@dataclass(kw_only=True, eq=False, repr=False)
class SimpleShot(PooledClassifier):
    """Euclidean distance to the mean of each class's features, after CL2N: centred, of length 1.

    The paper centres features by their mean over the classes that the backbone was trained on. A
    frozen backbone comes without them, so the mean of the class means takes its place, in which
    every class counts the same.

    Parameters
    ----------
    temperature : float, default=0.1
        Squared distances are divided by it; it changes probabilities, not predictions.

    References
    ----------
    Wang et al., "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot Learning",
    2019, arXiv 1911.04623.
    """

    TENSORS: ClassVar = {"middle": "channel", "means": "class channel"}

    temperature: float = 0.1

    def _check_params(self) -> None:
        check_positive("temperature", self.temperature)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        x = shots.x.astype(np.float64)
        middle = class_means(x, shots.labels, shots.classes).mean(axis=0)
        return {
            "middle": middle,
            "means": class_means(unit(x - middle), shots.labels, shots.classes),
        }

    def _score(self, x: Array) -> Array:
        x = unit(x.astype(np.float64) - self.learned_["middle"])
        return -squared_distances(x, self.learned_["means"]) / self.temperature  # (image, class)

    def _graph(self, x: Any) -> Any:
        x = graph_unit(x.cast(np.float64) - self.learned_["middle"])
        return graph_distances(x, self.learned_["means"]) / -self.temperature

    def _work(self, size: Vectors) -> Work:
        return class_means_work(size) + class_means_work(size)
