"""Baseline and Baseline++: a linear or a cosine classifier, trained by Adam on the full batch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.methods.base import (
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    minimise,
)
from mivhead.methods.cost import BACKWARD, Work

LENGTH_EPS = 1e-5  # added to the length of a feature
MANY_CLASSES = 200  # above which Baseline++ needs a larger scale


class _Trained(PooledClassifier):
    """Both classifiers: the same optimiser, and tensors that are trained as they are stored."""

    def __init__(
        self,
        *,
        learning_rate: float = 0.03,
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

    def _train(self, shots: PooledShots, start: dict[str, Tensor]) -> dict[str, Tensor]:
        self.learned_ = {name: tensor.requires_grad_() for name, tensor in start.items()}
        self.losses_ = minimise(
            lambda: F.cross_entropy(self._score(shots.x), shots.labels),
            list(self.learned_.values()),
            rate=self.learning_rate,
            steps=self.steps,
        )
        return {name: tensor.detach() for name, tensor in self.learned_.items()}

    def _start(self, shots: PooledShots) -> Tensor:
        """Initialise weights (class, channel) as PyTorch does for a linear layer."""
        generator = torch.Generator().manual_seed(shots.seed)
        channels = shots.x.shape[1]
        bound = channels**-0.5
        weights = torch.empty(shots.classes, channels).uniform_(-bound, bound, generator=generator)
        return weights.to(shots.x.device)

    def _work(self, size: Vectors) -> Work:
        """Count the scores and one gradient per step: the features are frozen."""
        forward = self.steps * size.n * size.c * size.ways
        return Work(2 * forward, paper=BACKWARD * forward)


class Baseline(_Trained):
    """A linear layer with bias on the pooled features.

    The paper trains it by SGD in small batches; here it has the optimiser of Baseline++, so that
    the two differ only in the classifier.

    Parameters
    ----------
    learning_rate : float, default=0.03
        Learning rate of Adam.
    steps : int, default=400
        Number of steps, each on the full batch.
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Seed of the initial weights.
    device : str or None, default=None
        Where to compute; None: where the features are.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Chen et al., "A Closer Look at Few-shot Classification", 2019, arXiv 1904.04232.
    """

    summary: ClassVar = "a linear layer, trained by Adam"
    paper: ClassVar = "Chen et al. 2019, A Closer Look at Few-shot Classification, arXiv 1904.04232"
    TENSORS: ClassVar = {"weights": "class channel", "biases": "class"}

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        weights = self._start(shots)
        return self._train(shots, {"weights": weights, "biases": torch.zeros_like(weights[:, 0])})

    def _score(self, x: Tensor) -> Tensor:
        return F.linear(x, self.learned_["weights"], self.learned_["biases"])


class BaselinePlusPlus(_Trained):
    """A cosine classifier with a learned length per class.

    Features and class vectors have length 1; logits are scale * length * cosine.

    Parameters
    ----------
    learning_rate : float, default=0.03
        Learning rate of Adam.
    steps : int, default=400
        Number of steps, each on the full batch.
    scale : float or None, default=None
        Scale of the logits; None: 2, or 10 above 200 classes.
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Seed of the initial weights.
    device : str or None, default=None
        Where to compute; None: where the features are.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Chen et al., "A Closer Look at Few-shot Classification", 2019, arXiv 1904.04232.
    """

    summary: ClassVar = "a cosine layer, trained by Adam"
    paper: ClassVar = "Chen et al. 2019, A Closer Look at Few-shot Classification, arXiv 1904.04232"
    TENSORS: ClassVar = {"directions": "class channel", "lengths": "class"}

    def __init__(
        self,
        *,
        learning_rate: float = 0.03,
        steps: int = 400,
        scale: float | None = None,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            steps=steps,
            use_views=use_views,
            random_state=random_state,
            device=device,
        )
        self.scale = scale

    def _check_params(self) -> None:
        super()._check_params()
        if self.scale is not None:
            check_positive("scale", self.scale)

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        weights = self._start(shots)
        lengths: Tensor = torch.linalg.vector_norm(weights, dim=1)
        return self._train(shots, {"directions": weights, "lengths": lengths})

    def _score(self, x: Tensor) -> Tensor:
        x = x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + LENGTH_EPS)
        cosines = x @ F.normalize(self.learned_["directions"], dim=1).T  # (image, class)
        rule = 2.0 if len(self.classes_) <= MANY_CLASSES else 10.0
        return (self.scale or rule) * self.learned_["lengths"] * cosines
