"""k nearest neighbours by cosine, with weighted votes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mivhead.methods.base import (
    PooledClassifier,
    Shots,
    check_count,
    check_positive,
    membership,
    unit,
)

LEAST_SHARE = 1e-6  # of the votes, for a class without a neighbour: logits stay finite


class NearestNeighbours(PooledClassifier):
    """The k support images of highest cosine vote, each with exp(cosine / temperature).

    Logits are logarithms of the shares of votes, so that probabilities are the shares. One shot
    per class is no special case: weights that strong let the nearest image win.

    Parameters
    ----------
    neighbours
        k; with fewer support images, all of them vote.
    temperature
        Small values let near neighbours count for more.
    use_views
        Let augmented views count as more images.
    random_state
        Not used: nothing is random.
    device
        Where to compute; None: where the features are.
    """

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

    def _learn(self, shots: Shots) -> dict[str, Tensor]:
        return {"keys": unit(shots.x.double()), "labels": shots.labels}

    def _score(self, x: Tensor) -> Tensor:
        keys, labels = self.learned_["keys"], self.learned_["labels"]
        cosines = unit(x.double()) @ keys.T  # (image, shot)
        nearest, rows = cosines.topk(min(self.neighbours, len(keys)), dim=1)  # (image, neighbour)
        shares = torch.softmax(nearest / self.temperature, dim=1)
        voters = membership(labels[rows], len(self.classes_), shares.dtype)
        votes = torch.einsum("qn,qnc->qc", shares, voters)  # (image, class)
        return votes.clamp_min(LEAST_SHARE).log()
