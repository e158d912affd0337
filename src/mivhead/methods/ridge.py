"""Ridge regression onto one-hot labels, in closed form."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from mivhead.ensemble.ridge import fit_ridge
from mivhead.methods.base import (
    PooledClassifier,
    PooledShots,
    Vectors,
    check_positive,
    membership,
    unit,
)
from mivhead.methods.cost import Work


class RidgeRegression(PooledClassifier):
    """Least squares with a penalty alpha |W|^2 and a free intercept.

    Logits are the regressed one-hot labels (near 1 for the right class, near 0 for others) divided
    by the temperature.

    Parameters
    ----------
    alpha : float, default=0.1
        Weight of the penalty; 0.1 was as good as 1 on six image sets with 1 shot, better with 5.
    normalise : bool, default=True
        Scale every pooled feature to length 1 first.
    temperature : float, default=0.1
        The regressed labels are divided by it; it changes probabilities, not predictions.
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the features are.

    References
    ----------
    Bertinetto et al., "Meta-learning with Differentiable Closed-form Solvers", 2019,
    arXiv 1805.08136.
    """

    summary: ClassVar = "ridge regression onto the labels, in closed form"
    paper: ClassVar = "Bertinetto et al. 2019, Differentiable Closed-form Solvers, arXiv 1805.08136"
    TENSORS: ClassVar = {"coefficients": "class channel", "intercepts": "class"}

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        normalise: bool = True,
        temperature: float = 0.1,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.alpha = alpha
        self.normalise = normalise
        self.temperature = temperature
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("temperature", self.temperature)

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        x = self._prepare(shots.x)
        targets = membership(shots.labels, shots.classes, x.dtype)  # (image, class)
        ridge, _ = fit_ridge(x, targets, self.alpha)
        return {"coefficients": ridge.coefficients.T.contiguous(), "intercepts": ridge.intercepts}

    def _score(self, x: Tensor) -> Tensor:
        scores = self._prepare(x) @ self.learned_["coefficients"].T + self.learned_["intercepts"]
        return scores / self.temperature

    def _prepare(self, x: Tensor) -> Tensor:
        return unit(x.double()) if self.normalise else x.double()

    def _work(self, size: Vectors) -> Work:
        """Count a system, its inverse, the map, and the leave-one-out predictions."""
        n, c, ways = size.n, size.c, size.ways
        small = min(n, c)
        fitted = small**2 * (max(n, c) + ways) + (n + 1) * c * ways
        left_out = n * c * ways + (n * c**2 if n > c else 0)
        return Work.once(fitted + left_out, 2 * small**3)
