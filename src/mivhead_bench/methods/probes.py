"""Classical models of scikit-learn on pooled features: logistic and ridge regression, an SVM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from mivhead._util.arrays import unit
from mivhead_bench.methods.base import Array, Labels, PooledClassifier, one_hot

TOLERANCE = 1e-6  # of the gradient; the default of 1e-4 leaves log-odds off in the third digit


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticProbe(PooledClassifier):
    """Logistic regression on features of length 1."""

    paper: ClassVar = "Tian et al. 2020, A Good Embedding Is All You Need?, arXiv 2003.11539"

    # Features of length 1 need a weaker penalty than scikit-learn's default of 1: 10 was better on
    # six image sets, with 1 and 5 shots.
    C: float = 10.0
    normalise: bool = True  # scale vectors to length 1 first
    max_iter: int = 1000  # of L-BFGS

    def _learn(self, x: Array, labels: Labels) -> None:
        x = unit(x) if self.normalise else x
        # With a penalty on their squares, coefficients lie in the span of the images: with fewer
        # images than channels the same problem is much smaller there.
        self.basis_, inside = np.linalg.qr(x.T)  # x = inside' basis'
        model = LogisticRegression(C=self.C, max_iter=self.max_iter, tol=TOLERANCE)
        self.model_ = model.fit(inside.T, labels)

    def _logits(self, x: Array) -> Array:
        x = unit(x) if self.normalise else x
        return _two_columns(self.model_.decision_function(x @ self.basis_))


@dataclass(kw_only=True, eq=False, repr=False)
class RidgeRegression(PooledClassifier):
    """Ridge regression onto the one-hot labels, in closed form."""

    paper: ClassVar = "Bertinetto et al. 2019, Differentiable Closed-form Solvers, arXiv 1805.08136"

    alpha: float = 0.1  # as good as 1 on six image sets with 1 shot, better with 5
    # Raise values to this power first, keeping their signs. With rectified features, 0.5 is more
    # accurate (+1.0 ± 0.7 points on 96 tasks).
    power: float = 1.0
    normalise: bool = True  # scale vectors to length 1 first
    temperature: float = 0.1  # divides the regressed labels

    def _learn(self, x: Array, labels: Labels) -> None:
        self.model_ = Ridge(self.alpha).fit(self._prepare(x), one_hot(labels))

    def _logits(self, x: Array) -> Array:
        regressed: Array = self.model_.predict(self._prepare(x))
        return regressed / self.temperature

    def _prepare(self, x: Array) -> Array:
        x = np.copysign(np.abs(x) ** self.power, x)
        return unit(x) if self.normalise else x


@dataclass(kw_only=True, eq=False, repr=False)
class SupportVectors(PooledClassifier):
    """Standardised features and an RBF support vector machine."""

    paper: ClassVar = "AutoGluon's few-shot learner, arXiv 2404.16233"

    C: float = 1.0
    # Scale each channel by its own deviation, as AutoGluon does. Channels that are almost constant
    # in the few shots then dominate a query in which they are not (docs/research-log.md).
    standardise: bool = True

    def _learn(self, x: Array, labels: Labels) -> None:
        steps = [StandardScaler()] if self.standardise else []
        machine = SVC(C=self.C, gamma="auto" if self.standardise else "scale")
        self.model_ = make_pipeline(*steps, machine).fit(x, labels)

    def _logits(self, x: Array) -> Array:
        values = _two_columns(self.model_.decision_function(x))
        # SVC predicts the first of the classes that win most pairs, whatever their margins are.
        values[np.arange(len(x)), self.model_.predict(x)] = values.max(axis=1)
        return values


def _two_columns(values: Array) -> Array:
    """Split the margin of two classes between them; leave those of more classes as they are."""
    return values[:, None] * [-0.5, 0.5] if values.ndim == 1 else values
