"""Tip-Adapter's training-free cache of keys (features) and values (labels)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mivhead.methods.base import (
    PooledClassifier,
    PooledShots,
    Vectors,
    check_positive,
    counts,
    membership,
    unit,
)
from mivhead.methods.cost import Work


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
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the features are.

    References
    ----------
    Zhang et al., "Tip-Adapter: Training-free CLIP-Adapter for Better Vision-Language Modeling",
    2021, arXiv 2111.03930.
    """

    summary: ClassVar = (
        "a cache of features and labels; without CLIP's text term; nothing is trained"
    )
    paper: ClassVar = "Zhang et al. 2021, Tip-Adapter, arXiv 2111.03930"
    TENSORS: ClassVar = {"keys": "shot channel", "labels": "shot"}

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        beta: float = 5.5,
        average: bool = False,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.alpha = alpha
        self.beta = beta
        self.average = average
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("beta", self.beta)

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        return {"keys": unit(shots.x.double()), "labels": shots.labels}

    def _score(self, x: Tensor) -> Tensor:
        keys, labels = self.learned_["keys"], self.learned_["labels"]
        classes = len(self.classes_)
        cosines = unit(x.double()) @ keys.T  # (image, shot)
        affinities = torch.exp(self.beta * (cosines - 1))
        sums = affinities @ membership(labels, classes, keys.dtype)  # (image, class)
        return self.alpha * (sums / counts(labels, classes) if self.average else sums)

    def _work(self, _size: Vectors) -> Work:
        return Work()  # features are stored as they are
