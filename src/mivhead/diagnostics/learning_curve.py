"""The accuracy to expect on new images, from out-of-fold predictions of a few, unequal shots.

Out-of-fold predictions cannot be counted as they are: classes with many shots would dominate,
classes with one shot have none, every prediction was made with fewer shots than the model has, and
a dozen of them, each right or wrong, say little. The answer to each:

- Every prediction is weighted by 1 / (shots of its class), so that all classes count the same.
- All classes of a task share a learning curve, theta is fitted to the predictions, and the accuracy
  is the mean over *all* classes of the curve at their numbers of shots:

      logit P(right) = theta + SLOPE log n    (n: shots of the image's class behind the prediction)

- A prediction counts as HITS [right] + (1 - HITS) (its largest probability), if probabilities are
  calibrated. A probability says more than one outcome, and the outcomes keep it honest.

The interval is Wilson's for an effective number of predictions. Shots of a class are alike (RHO is
their correlation), so m of them count as m / (1 + (m - 1) RHO); a class that was not tested counts
as if it had UNTESTED prediction. The mean over classes has the variance of the mean of these.

Predictions must come from rounds that leave out one shot of every class; leaving out a single shot
puts its class at a disadvantage.
The constants were chosen on the tuning sets (docs/research-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.diagnostics.evaluation import wilson_interval

SLOPE = 0.8  # of the log-odds of a right prediction in log n
HITS = 0.3  # how much the outcome of a prediction counts, compared with its probability
RHO = 0.4  # correlation of predictions of the same class
UNTESTED = 1.0  # predictions that a class without any counts as, in the interval
OWN = 2.0  # predictions that the shared curve counts as in the figure of one class

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ExpectedAccuracy:
    """The expected accuracy on new images of which every class is equally frequent."""

    accuracy: float  # mean over classes; NaN if fewer than two classes have several shots
    interval: tuple[float, float]  # 95 % interval; from 0 to 1 if nothing is known
    # (class,): the figure of each class: the curve, corrected by its own predictions
    per_class: Floats
    # (class,): predictions of its own shots, and how many of them were right. A class with one shot
    # has none: its figure is only what is usual in this task for one shot.
    tested: NDArray[np.int64]
    right: NDArray[np.int64]


def expected_accuracy(
    right: ArrayLike,
    labels: ArrayLike,
    behind: ArrayLike,
    shots: ArrayLike,
    confidence: ArrayLike | None = None,
) -> ExpectedAccuracy:
    """Estimate the accuracy on new images from out-of-fold predictions.

    For each image: whether its prediction was `right`, its class number, the number of shots of its
    own class (at least 1) that the prediction was learned from (`behind`) and, if probabilities are
    calibrated, the largest one (`confidence`). `shots` are those of each class that the model has.

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
    if (tested > 0).sum() < 2:  # a model that always names the same class would be right
        unknown = np.full(len(shots), np.nan)
        return ExpectedAccuracy(float("nan"), (0.0, 1.0), unknown, tested, rights)
    if confidence is not None:
        hits = HITS * hits + (1 - HITS) * np.asarray(confidence, np.float64)
    weights = 1 / shots[y]
    least = 0.25 / len(y)  # even if all are right, the next one may be wrong
    share = float(np.clip(weights @ hits / weights.sum(), least, 1 - least))
    theta = _fit_curve(share, SLOPE * np.log(np.asarray(behind, np.float64)), weights)
    curve = _sigmoid(theta + SLOPE * np.log(shots))
    accuracy = float(curve.mean())
    per_class = (rights + OWN * curve) / (tested + OWN)
    count = _effective_number(tested)
    interval = wilson_interval(accuracy * count, count)
    return ExpectedAccuracy(accuracy, interval, per_class, tested, rights)


def _effective_number(tested: NDArray[np.int64]) -> float:
    """Return how many independent predictions tell as much about the mean over classes.

    >>> [round(_effective_number(np.array(tested)), 2) for tested in ([5, 5], [300, 0])]
    [3.85, 2.85]
    """
    own = np.where(tested > 0, tested / (1 + (tested - 1) * RHO), UNTESTED)
    return float(len(tested) ** 2 / (1 / own).sum())


def _fit_curve(share: float, known: Floats, weights: Floats) -> float:
    """Find the theta at which the weighted mean of sigmoid(theta + known) is `share`."""
    low, high = -60.0 - float(known.max()), 60.0 - float(known.min())
    for _ in range(80):
        middle = (low + high) / 2
        if weights @ _sigmoid(middle + known) < share * weights.sum():
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sigmoid(x: ArrayLike) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    logistic: Floats = 0.5 * (1 + np.tanh(0.5 * np.asarray(x, np.float64)))
    return logistic
