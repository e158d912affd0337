"""k nearest neighbours by cosine, with weighted votes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mivhead.methods.base import (
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    membership,
    unit,
)
from mivhead.methods.cost import Work

LEAST_SHARE = 1e-6  # of the votes, for a class without a neighbour: logits stay finite


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
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the features are.

    References
    ----------
    Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", 2018,
    arXiv 1805.01978.
    """

    summary: ClassVar = "weighted votes of the nearest support images"
    paper: ClassVar = "Wu et al. 2018, Non-Parametric Instance Discrimination, arXiv 1805.01978"
    TENSORS: ClassVar = {"keys": "shot channel", "labels": "shot"}

    def __init__(
        self,
        *,
        neighbours: int = 5,
        temperature: float = 0.07,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.neighbours = neighbours
        self.temperature = temperature
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_count("neighbours", self.neighbours, least=1)
        check_positive("temperature", self.temperature)

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        return {"keys": unit(shots.x.double()), "labels": shots.labels}

    def _score(self, x: Tensor) -> Tensor:
        keys, labels = self.learned_["keys"], self.learned_["labels"]
        cosines = unit(x.double()) @ keys.T  # (image, shot)
        nearest, rows = cosines.topk(min(self.neighbours, len(keys)), dim=1)  # (image, neighbour)
        shares = torch.softmax(nearest / self.temperature, dim=1)
        voters = membership(labels[rows], len(self.classes_), shares.dtype)
        votes = torch.einsum("qn,qnc->qc", shares, voters)  # (image, class)
        return votes.clamp_min(LEAST_SHARE).log()

    def _work(self, _size: Vectors) -> Work:
        return Work()  # features are stored as they are
