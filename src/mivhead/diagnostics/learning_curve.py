"""The accuracy to expect on new images, from out-of-fold predictions of a few, unequal shots.

Out-of-fold predictions cannot be counted as they are: classes with many shots would dominate,
classes with one shot have none, and every prediction was made with one shot less than the model
has. All three are solved by a learning curve that the classes of a task share:

    logit P(right) = theta + SLOPE log n    (n: shots of the image's class behind the prediction)

theta is fitted to the out-of-fold predictions, each weighted by 1 / (shots of its class), so that
every class counts the same. The expected accuracy is the mean over *all* classes of the curve at
their numbers of shots, those with one shot among them. Its interval is Wilson's, for the effective
number of predictions divided by DESIGN, because the shots of a class are alike and accuracies of
classes differ.

Predictions must come from rounds that leave out one shot of every class
(`mivhead.ensemble.balance.rounds`); leaving out a single shot puts its class at a disadvantage.
Both constants were chosen on the tuning sets (docs/research-log.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.diagnostics.evaluation import wilson_interval
from mivhead.ensemble.balance import effective_number

SLOPE = 0.8  # of the log-odds of a right prediction in log n
DESIGN = 2.0  # by how much predictions of shots say less than those of independent images
OWN = 2.0  # predictions that the shared curve counts as in the figure of one class

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ExpectedAccuracy:
    """The expected accuracy on new images of which every class is equally frequent.

    Parameters
    ----------
    accuracy : float
        Mean over classes; NaN if no class has several shots.
    interval : tuple of float
        95 % interval; from 0 to 1 if nothing is known.
    per_class : array of shape (class,)
        The figure of each class: the curve, corrected by its own predictions.
    tested, right : array of shape (class,)
        Predictions of its own shots, and how many of them were right. A class with one shot has
        none: its figure is only what is usual in this task for one shot.
    """

    accuracy: float
    interval: tuple[float, float]
    per_class: Floats
    tested: NDArray[np.int64]
    right: NDArray[np.int64]


def expected_accuracy(
    right: ArrayLike, labels: ArrayLike, behind: ArrayLike, shots: ArrayLike
) -> ExpectedAccuracy:
    """Estimate the accuracy on new images from out-of-fold predictions.

    Parameters
    ----------
    right : array-like of bool, of shape (image,)
        Whether each out-of-fold prediction was right.
    labels : array-like of int, of shape (image,)
        Class numbers of these images.
    behind : array-like of int, of shape (image,)
        Shots of its own class that each prediction was learned from; at least 1.
    shots : array-like of int, of shape (class,)
        Shots of each class that the model has.

    Returns
    -------
    ExpectedAccuracy

    Examples
    --------
    Of two classes with three shots each, five of six shots were predicted right. A third class has
    one shot, which lowers the mean:

    >>> right, labels = [1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]
    >>> expected = expected_accuracy(right, labels, [2] * 6, [3, 3, 1])
    >>> round(expected.accuracy, 2), [round(x, 2) for x in expected.per_class.tolist()]
    (0.83, [0.95, 0.75, 0.74])
    """
    hits, y = np.asarray(right, np.float64), np.asarray(labels, np.int64)
    shots = np.asarray(shots, np.int64)
    tested = np.bincount(y, minlength=len(shots))
    rights = np.bincount(y, hits, minlength=len(shots)).astype(np.int64)
    if not len(y):
        unknown = np.full(len(shots), np.nan)
        return ExpectedAccuracy(float("nan"), (0.0, 1.0), unknown, tested, rights)
    weights = shots.mean() / shots[y]
    theta = _fit_curve(hits, SLOPE * np.log(np.asarray(behind, np.float64)), weights)
    curve = _sigmoid(theta + SLOPE * np.log(shots))
    accuracy = float(curve.mean())
    per_class = (rights + OWN * curve) / (tested + OWN)
    count = effective_number(weights) / DESIGN
    low, high = wilson_interval(accuracy * count, count)
    interval = max(0.0, low), min(1.0, high)
    return ExpectedAccuracy(accuracy, interval, per_class, tested, rights)


def _fit_curve(hits: Floats, known: Floats, weights: Floats) -> float:
    """Solve sum w (hits - sigmoid(theta + known)) = 0, which falls with theta, by bisection."""
    wanted = float(weights @ hits)
    if wanted <= 0 or wanted >= weights.sum() * (1 - 1e-12):
        return -math.inf if wanted <= 0 else math.inf
    low, high = -60.0 - float(known.max()), 60.0 - float(known.min())
    for _ in range(80):
        middle = (low + high) / 2
        if weights @ _sigmoid(middle + known) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sigmoid(x: ArrayLike) -> Floats:
    """1 / (1 + exp(-x)) without overflow, also at infinity."""
    logistic: Floats = 0.5 * (1 + np.tanh(0.5 * np.asarray(x, np.float64)))
    return logistic
