"""ProtoNets: negative squared Euclidean distance to the class means."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mivhead.methods.base import PooledClassifier, Shots
from mivhead.methods.pooled import class_means


class ProtoNets(PooledClassifier):
    """The FiT head without covariances: closed form, nothing to train.

    Parameters
    ----------
    use_views
        Let augmented views count as more images.
    random_state
        Not used: nothing is random.
    device
        Where to compute; None: where the features are.
    """

    TENSORS: ClassVar = {"means": "class channel"}

    def __init__(
        self,
        *,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        """Accept everything: there is no hyperparameter."""

    def _learn(self, shots: Shots) -> dict[str, Tensor]:
        return {"means": class_means(shots.x.double(), shots.labels, shots.classes)}

    def _score(self, x: Tensor) -> Tensor:
        return -torch.cdist(x.double(), self.learned_["means"]).square()  # (image, class)
