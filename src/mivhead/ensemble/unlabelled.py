"""Unlabelled images: soft labels for the ridge experts, in one closed-form step.

The fitted ensemble gives every unlabelled image u probabilities p(u, c). Each class then takes the
same total weight from the unlabelled images, shared in proportion to these probabilities:

    weight(u, c) = min(1, M p(u, c) / sum over v of p(v, c))

and every ridge expert is fitted once more: to the shots, every class with the same total weight,
and to image u with weight sum over c of weight(u, c) and the target weight(u, c) / weight(u).
All experts learn from what the whole ensemble says, so that each of them gets what the others know.

Equal totals matter: without them, a class whose shots happen to resemble many images grows at the
expense of the others, and accuracy falls. It does not matter how frequent the classes are among the
unlabelled images. Images of something else have small probabilities for all classes, or harm little
because their weight is spread over several.

**Evidence.** Where classes have several shots, the same step is tried without each fold of the
shots. If it makes the predictions of these shots worse, by more than a standard error of the mean
log-loss, the unlabelled images are not used. With one shot per class there is nothing to test on.

References
----------
Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural
Networks", ICML 2013 workshop.
Wang et al., "Instance Credibility Inference for Few-Shot Learning", CVPR 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import log_softmax
from mivhead.ensemble.balance import shot_weights
from mivhead.ensemble.constants import ALPHA, MASS, TAKEN, TOLERANCE
from mivhead.ensemble.ridge import Expert, Experts, Ridge, fit_ridge
from mivhead.ensemble.stacking import Array, Ensemble
from mivhead.features import Features


@dataclass(frozen=True)
class UnlabelledUse:
    """What a model made of unlabelled images."""

    images: int  # how many it was given, or its sample of them
    used: bool  # whether it learned from them; not if that made predictions of left-out shots worse


class SoftLabels(NamedTuple):
    """Targets (image, class) whose rows sum to 1, and weights (image,)."""

    targets: NDArray[np.float64]
    weights: NDArray[np.float64]


def soft_labels(logits: NDArray[Any]) -> SoftLabels:
    """Label images by their logits (image, class), with the same total weight per class.

    >>> targets, weights = soft_labels(np.array([[9.0, 0.0]] * 30 + [[0.0, 9.0]] * 10))
    >>> [round(float(weights[rows].sum()), 1) for rows in (slice(0, 30), slice(30, 40))]
    [4.0, 4.0]
    """
    images, classes = logits.shape
    mass = min(MASS, TAKEN * images / classes)
    log_p = log_softmax(logits)
    of_class = np.exp(log_p - log_p.max(axis=0))
    taken = np.minimum(mass * of_class / of_class.sum(axis=0), 1.0)  # (image, class)
    weights = taken.sum(axis=1)
    return SoftLabels(taken / weights[:, None], weights)


def refine(
    ensemble: Ensemble,
    features: Features,
    labels: NDArray[np.int64],
    unlabelled: Features,
    cosines: Array,
    folds: NDArray[np.int64],
    fold_cosines: Mapping[int, tuple[Array, Array]],
) -> tuple[Ensemble, UnlabelledUse]:
    """Fit the experts of an ensemble once more, with unlabelled images.

    Parameters
    ----------
    ensemble, features, labels
        What was fitted, and the shots that it was fitted to.
    unlabelled : Features
        The unlabelled images.
    cosines : array
        The head's cosines (block, image, class) of the unlabelled images.
    folds : array of shape (shot,)
        The fold of each shot, -1 for a shot that is never left out.
    fold_cosines : mapping
        By fold, the cosines of a head that was trained without it: of the shots of the fold, and
        of the unlabelled images. Without folds there is no evidence to heed.
    """
    step = _Step(ensemble, features, labels, unlabelled)
    if fold_cosines and not step.helps(folds, fold_cosines):
        return ensemble, UnlabelledUse(len(unlabelled), used=False)
    experts = Experts(ensemble.experts.pcas, step.refined(np.arange(len(labels)), cosines))
    return replace(ensemble, experts=experts), UnlabelledUse(len(unlabelled), used=True)


class _Step:
    """The descriptors of all images, computed once, and the step from some of the shots."""

    def __init__(
        self,
        ensemble: Ensemble,
        features: Features,
        labels: NDArray[np.int64],
        unlabelled: Features,
    ) -> None:
        self.combine, self.labels = ensemble.combine, labels
        self.descriptors = ensemble.experts.describe(Features.concat([features, unlabelled]))
        self.unlabelled = np.arange(len(labels), len(labels) + len(unlabelled))

    def fitted(self, rows: NDArray[np.int64], soft: SoftLabels | None) -> dict[Expert, Ridge]:
        """Fit all experts to some shots and, with soft labels, to the unlabelled images."""
        targets = np.eye(int(self.labels.max()) + 1)[self.labels[rows]]
        weights = shot_weights(self.labels[rows])
        if soft is not None:
            targets = np.concatenate([targets, soft.targets])
            weights = np.concatenate([weights, soft.weights])
            rows = np.concatenate([rows, self.unlabelled])
        return {
            expert: fit_ridge(x[rows], targets, ALPHA, weights)[0]
            for expert, x in self.descriptors.items()
        }

    def logits(
        self, ridges: Mapping[Expert, Ridge], cosines: Array, rows: NDArray[np.int64]
    ) -> Array:
        """Logits (image, class) of the ensemble with these experts."""
        members = [ridge(self.descriptors[expert][rows]) for expert, ridge in ridges.items()]
        return self.combine(np.concatenate([cosines, np.stack(members)]))

    def refined(self, rows: NDArray[np.int64], cosines: Array) -> dict[Expert, Ridge]:
        """Take the whole step from some of the shots."""
        soft = soft_labels(self.logits(self.fitted(rows, None), cosines, self.unlabelled))
        return self.fitted(rows, soft)

    def helps(
        self, folds: NDArray[np.int64], fold_cosines: Mapping[int, tuple[Array, Array]]
    ) -> bool:
        """Tell whether the step leaves the predictions of left-out shots as good as before."""
        growth = []  # of the log-loss, per left-out shot
        for number, (of_shots, of_unlabelled) in fold_cosines.items():
            kept, out = np.flatnonzero(folds != number), np.flatnonzero(folds == number)
            losses = []
            for ridges in (self.fitted(kept, None), self.refined(kept, of_unlabelled)):
                log_p = log_softmax(self.logits(ridges, of_shots, out))
                losses.append(-log_p[np.arange(len(out)), self.labels[out]])
            growth.append(losses[1] - losses[0])
        grown = np.concatenate(growth)
        error = grown.std(ddof=1) / len(grown) ** 0.5
        return bool(grown.mean() <= TOLERANCE * error)
