"""Logistic regression, the usual linear probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mivhead._util.optional import need
from mivhead.methods.base import (
    Array,
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    graph_unit,
    unit,
)
from mivhead.methods.cost import BACKWARD, Work

TOLERANCE = 1e-6  # of the gradient; the default of 1e-4 leaves log-odds off in the third digit
TYPICAL_STEPS = 100  # of L-BFGS, for the cost of a model that is not fitted yet


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticProbe(PooledClassifier):
    """Multinomial logistic regression by scikit-learn; its coefficients are stored as tensors.

    Parameters
    ----------
    C : float, default=10.0
        Inverse weight of the penalty. Features of length 1 need a weaker one than scikit-learn's
        default of 1: 10 was better on six image sets, with 1 and 5 shots.
    normalise : bool, default=True
        Scale every pooled feature to length 1 first.
    max_iter : int, default=1000
        Maximum number of L-BFGS steps.

    Attributes
    ----------
    n_iter_ : int
        Number of steps that training took.

    References
    ----------
    Tian et al., "Rethinking Few-Shot Image Classification: a Good Embedding Is All You Need?",
    2020, arXiv 2003.11539.
    """

    TENSORS: ClassVar = {"coefficients": "class channel", "intercepts": "class"}

    C: float = 10.0
    normalise: bool = True
    max_iter: int = 1000

    def _check_params(self) -> None:
        check_positive("C", self.C)
        check_count("max_iter", self.max_iter, least=1)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        linear_model = need("sklearn.linear_model", "bench")
        # With a penalty on their squares, coefficients lie in the span of the images: with fewer
        # images than channels the same problem is much smaller there.
        basis, inside = np.linalg.qr(self._prepare(shots.x).T)  # x = inside' basis'
        model = linear_model.LogisticRegression(C=self.C, max_iter=self.max_iter, tol=TOLERANCE)
        model.fit(inside.T, shots.labels)
        self.n_iter_ = int(model.n_iter_.max())
        coefficients, intercepts = model.coef_ @ basis.T, model.intercept_
        if shots.classes == 2:  # there is one row, of log-odds: split it between the classes
            signs = np.array([-0.5, 0.5])
            coefficients, intercepts = signs[:, None] * coefficients, signs * intercepts
        return {"coefficients": coefficients, "intercepts": intercepts}

    def _score(self, x: Array) -> Array:
        return self._prepare(x) @ self.learned_["coefficients"].T + self.learned_["intercepts"]

    def _graph(self, x: Any) -> Any:
        x = x.cast(np.float64)
        x = graph_unit(x) if self.normalise else x
        coefficients = self.learned_["coefficients"].T.astype(np.float64)
        return x @ coefficients + self.learned_["intercepts"]

    def _prepare(self, x: Array) -> Array:
        return unit(x.astype(np.float64)) if self.normalise else x.astype(np.float64)

    def _work(self, size: Vectors) -> Work:
        n, c, ways = size.n, size.c, size.ways
        small, long = min(n, c), max(n, c)
        qr = 4 * long * small**2 - 4 * small**3 / 3
        forward = getattr(self, "n_iter_", TYPICAL_STEPS) * n * small * ways
        end = ways * small * c
        return Work(2 * forward + end, qr, BACKWARD * forward + end)
