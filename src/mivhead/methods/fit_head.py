"""The FiT head: Gaussian classes whose covariance is a trained mixture of two or three parts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.methods.adam import minimise
from mivhead.methods.base import PooledClassifier, Shots, check_count, check_positive
from mivhead.methods.gaussian import DIMENSIONS, Support, Weights, log_densities

LEAST_IDENTITY = 1e-4  # keeps Sigma invertible, whatever training does to the identity's weight


class _FitHead(PooledClassifier):
    """Both heads; they differ in the weights they start from and in the class covariances."""

    TENSORS: ClassVar = DIMENSIONS
    START: ClassVar[tuple[float, ...]]  # as many as are trained, the identity's last

    def __init__(
        self,
        *,
        learning_rate: float = 0.0035,
        steps: int = 400,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.steps = steps
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_count("steps", self.steps, least=0)

    def _learn(self, shots: Shots) -> dict[str, Tensor]:
        support = Support(shots.x.double(), shots.labels, shots.classes)
        quadratic = len(self.START) == 3
        score = support.quadratic if quadratic else support.linear
        w = torch.tensor(self.START, dtype=torch.float64, device=shots.x.device, requires_grad=True)
        self.losses_ = minimise(
            lambda: F.cross_entropy(score(_weights(w)), shots.labels),
            [w],
            rate=self.learning_rate,
            steps=self.steps,
        )
        with torch.no_grad():
            return support.finish(_weights(w), quadratic=quadratic)

    def _score(self, x: Tensor) -> Tensor:
        return log_densities(x.double(), self.learned_)


class FitLDA(_FitHead):
    """One covariance for all classes: Sigma = w1 cov + w2 I, with cov that of the whole support.

    Logits are the Gaussian log densities, without a prior. The weights start at 1 and are trained
    with the support as its own queries.

    Parameters
    ----------
    learning_rate, steps
        Adam on the full batch.
    use_views
        Let augmented views count as more images.
    random_state
        Not used: nothing is random.
    device
        Where to compute; None: where the features are.

    Attributes
    ----------
    losses_
        Training loss of every step.
    """

    START: ClassVar = (1.0, 1.0)


class FitQDA(_FitHead):
    """A covariance per class: Sigma_k = w1 cov_k + w2 cov + w3 I, starting at 0.5, 0.5 and 1.

    Logits are the Gaussian log densities, without a prior. The covariance of a class of one shot is
    zero. The time grows with the cube of the number of support images, not with the channels.

    Parameters
    ----------
    learning_rate, steps
        Adam on the full batch.
    use_views
        Let augmented views count as more images.
    random_state
        Not used: nothing is random.
    device
        Where to compute; None: where the features are.

    Attributes
    ----------
    losses_
        Training loss of every step.
    """

    START: ClassVar = (0.5, 0.5, 1.0)


def _weights(w: Tensor) -> Weights:
    """Weights as they are used: covariances count for at least nothing."""
    *covariances, identity = w.unbind()
    of_class, total = covariances if len(covariances) == 2 else (w.new_zeros(()), covariances[0])
    return Weights(of_class.relu(), total.relu(), identity.clamp_min(LEAST_IDENTITY))
