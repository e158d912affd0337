"""Nearest class centroid by cosine: no training, no parameters."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from mivhead.methods.base import PooledClassifier, Shots, check_positive, class_means, unit


class NearestCentroid(PooledClassifier):
    """Cosine to the mean of each class's un-normalised pooled features.

    Parameters
    ----------
    centred
        Subtract the mean of the class means from queries and class means first.
    temperature
        Cosines are divided by it to become logits; it changes probabilities, not predictions.
    use_views
        Let augmented views count as more images.
    random_state
        Not used: nothing is random.
    device
        Where to compute; None: where the features are.

    Examples
    --------
    >>> from mivhead.methods import make_method
    >>> X, y = [[1.0, 0.1], [3.0, 0.2], [0.1, 1.0]], ["right", "right", "up"]
    >>> make_method("ncc").fit(X, y).predict([[9.0, 1.0]]).tolist()
    ['right']
    """

    TENSORS: ClassVar = {"means": "class channel"}

    def __init__(
        self,
        *,
        centred: bool = False,
        temperature: float = 0.1,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.centred = centred
        self.temperature = temperature
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_positive("temperature", self.temperature)

    def _learn(self, shots: Shots) -> dict[str, Tensor]:
        return {"means": class_means(shots.x.double(), shots.labels, shots.classes)}

    def _score(self, x: Tensor) -> Tensor:
        means, x = self.learned_["means"], x.double()
        if self.centred:
            middle = means.mean(dim=0)
            means, x = means - middle, x - middle
        return unit(x) @ unit(means).T / self.temperature  # (image, class)
