"""Standardised features and an RBF support vector machine: AutoGluon's few-shot learner."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.methods.base import PooledClassifier, PooledShots, Vectors, check_positive
from mivhead.methods.cost import Work

NO_SPREAD = 10 * np.finfo(np.float64).eps  # spread of a constant channel, relative to its values


class SupportVectors(PooledClassifier):
    """Standardised features and scikit-learn's SVC (gamma = 1 / channels), stored as tensors.

    Every pair of classes has its own machine. As in SVC, the class that wins most pairs is
    predicted, the first one in case of a tie. Logits are scikit-learn's one-vs-rest decision
    values: the number of pairs that a class wins, plus its summed margins squeezed into a third of
    a vote to either side; the winner of a tie gets the highest of the tied values. With two
    classes, they are plus and minus half the margin.

    Parameters
    ----------
    C : float, default=1.0
        Inverse weight of the penalty.
    standardise : bool, default=True
        Scale every channel by its own standard deviation, as AutoGluon does. Channels that are
        almost constant in the few support images then dominate a query in which they are not
        (docs/results/rivals.md). With False, all channels share one scale, which is scikit-learn's
        default for SVC.
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to predict; None: where the features are. Training runs on the CPU.

    References
    ----------
    "AutoGluon-Multimodal (AutoMM): Supercharging Multimodal AutoML with Foundation Models", 2024,
    arXiv 2404.16233.
    """

    summary: ClassVar = "standardised features and an RBF support vector machine"
    paper: ClassVar = "AutoGluon's few-shot learner, arXiv 2404.16233"
    TENSORS: ClassVar = {
        "shift": "channel",
        "scale": "channel",
        "vectors": "vector channel",
        "labels": "vector",
        "coefficients": "vector class",
        "intercepts": "class class",
    }

    def __init__(
        self,
        *,
        C: float = 1.0,
        standardise: bool = True,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.C = C
        self.standardise = standardise
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_positive("C", self.C)

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        from sklearn.svm import SVC

        x, y = shots.x.double().numpy(force=True), shots.labels.numpy(force=True)
        shift, scale = x.mean(axis=0), x.std(axis=0)
        if not self.standardise:
            shift, scale = np.zeros_like(shift), np.full_like(scale, x.std())
        scale[scale <= NO_SPREAD * np.abs(x).max(axis=0)] = 1.0
        model = SVC(C=self.C, gamma="auto").fit((x - shift) / scale, y)
        # For two classes scikit-learn flips signs, so that positive means the second class.
        flip = -1.0 if shots.classes == 2 else 1.0
        owners = np.repeat(np.arange(shots.classes), model.n_support_)
        arrays = {
            "shift": shift,
            "scale": scale,
            "vectors": model.support_vectors_,
            "labels": owners,
            "coefficients": _by_opponent(flip * model.dual_coef_, owners),
            "intercepts": _antisymmetric(flip * model.intercept_, shots.classes),
        }
        device = shots.x.device
        return {name: torch.as_tensor(array, device=device) for name, array in arrays.items()}

    def _score(self, x: Tensor) -> Tensor:
        learned = self.learned_
        x = (x.double() - learned["shift"]) / learned["scale"]
        kernel = torch.exp(-torch.cdist(x, learned["vectors"]).square() / x.shape[1])
        classes = len(self.classes_)
        own = [learned["labels"] == i for i in range(classes)]
        # Evidence of the vectors of class i for i against j
        favour = torch.stack([kernel[:, v] @ learned["coefficients"][v] for v in own], dim=1)
        margins = favour - favour.transpose(1, 2) + learned["intercepts"]  # (image, i, j)
        totals = margins.sum(dim=2)  # (image, class)
        if classes == 2:
            return totals / 2
        votes = (margins > 0).sum(dim=2)  # (image, class)
        values = votes + totals / (3 * (totals.abs() + 1))
        first = votes.argmax(dim=1, keepdim=True)  # (image, 1)
        return values.scatter(1, first, values.amax(dim=1, keepdim=True))

    def _work(self, size: Vectors) -> Work:
        return Work.once(size.n**2 * size.c)  # one kernel matrix; the rest of libsvm is small


def _by_opponent(dual: NDArray[np.float64], owners: NDArray[np.int64]) -> NDArray[np.float64]:
    """Turn libsvm's (classes - 1, vector) into (vector, class): weight of a vector against a class.

    libsvm leaves a vector's own class out of the rows, and gives the vectors of a pair's second
    class negative signs.
    """
    full = np.zeros((len(owners), len(dual) + 1))
    for vector, owner in enumerate(owners):
        full[vector, :owner] = -dual[:owner, vector]
        full[vector, owner + 1 :] = dual[owner:, vector]
    return full


def _antisymmetric(values: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """Arrange the pairs (0, 1), (0, 2), ... (1, 2), ... in a matrix of i against j."""
    upper = np.zeros((classes, classes))
    upper[np.triu_indices(classes, 1)] = values
    return upper - upper.T
