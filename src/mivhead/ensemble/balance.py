"""Balance: every class counts the same, regardless of its number of shots.

A member of the ensemble that has seen one shot of a class and twelve of another scores the first
class lower, and more evenly, on every image. This has nothing to do with how frequent the classes
are among new images, so it is taken out of the scores before they are combined. All formulas leave
tasks with equal shots exactly as they are.

**Ridge experts** and **stacking** weigh each shot by (mean number of shots) / (shots of its class),
so that intercepts and penalties do not favour large classes (`shot_weights`).

**Scores** of a member are compared between classes by how they behave on images of *other* classes,
which every class has, even one with a single shot. Their mean and the logarithm of their standard
deviation are straight lines in log n, where n is the number of shots behind a score (`ShotLines`).
With r the mean of log n over the classes, a score z becomes

    z' = mean(r) + (z - mean(log n)) exp(-slope of the spread (log n - r))

This is the Z-norm of speaker verification, with statistics that depend on the number of shots only.
Out-of-fold scores have their own numbers of shots behind them (`shots_behind`).

**Logits** are the weighted sum of z' and of one more member, the number of shots itself: its score
is minus log n (`shot_scores`). Its weight starts at the textbook correction for classes that were
more frequent in training, which divides probabilities by n, and is fitted by stacking like all
others: the out-of-fold predictions of a class of 60 shots among classes of one to three show that
the textbook goes too far. Classes with one shot have no such predictions and are harder, so the
logits shrink with the fraction of them (`UNTESTED`).

**If only one class has several shots**, nothing tells how much the scores favour it. The experts
are then averages over regressions on one shot of each class (`ridge.fit_one_of_each`), with the
weights of one-shot tasks, the head has no say, and none of the above applies.

**Class priors** come last, as plain Bayes (`mivhead.decision.class_frequencies`).

References
----------
Auckenthaler, Carey and Lloyd-Thomas, "Score normalization for text-independent speaker
verification systems", Digital Signal Processing 10, 2000.
Menon et al., "Long-tail learning via logit adjustment", ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.ensemble.constants import SHOTS_SCALE, SLOPE_PENALTY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def shot_weights(labels: ArrayLike) -> Floats:
    """Weigh shots so that all classes have the same total weight, and the mean weight is 1.

    >>> shot_weights([0, 0, 0, 1]).round(3).tolist()
    [0.667, 0.667, 0.667, 2.0]
    """
    labels = np.asarray(labels, np.int64)
    shots = np.bincount(labels)
    weights: Floats = shots.mean() / shots[labels]
    return weights


def only_one_has_several(shots: ArrayLike) -> bool:
    """Whether only one class has several shots, so that no other class can be tested."""
    return int((np.asarray(shots) > 1).sum()) == 1


def shots_behind(labels: ArrayLike, folds: ArrayLike | None = None) -> Ints:
    """Count the shots of every class that an out-of-fold score was learned from: (shot, class).

    Shots of the same fold are left out together, those of fold -1 never; without folds, each shot
    is left out on its own.

    >>> shots_behind([0, 0, 1]).tolist(), shots_behind([0, 0, 1], [0, 1, -1]).tolist()
    ([[1, 1], [1, 1], [2, 0]], [[1, 1], [1, 1], [2, 1]])
    """
    labels = np.asarray(labels, np.int64)
    members: Ints = np.eye(int(labels.max(initial=-1)) + 1, dtype=np.int64)[labels]  # (shot, class)
    counts: Ints = np.tile(members.sum(axis=0), (len(labels), 1))
    if folds is None:
        return counts - members
    folds = np.asarray(folds, np.int64)
    for number in np.unique(folds[folds >= 0]):
        out = folds == number
        counts[out] -= members[out].sum(axis=0)
    return counts


def left_out_predictions(
    hat: ArrayLike, targets: ArrayLike, predictions: ArrayLike, folds: ArrayLike | None = None
) -> Floats:
    """Predict every shot by a linear smoother that was fitted without the shots of its fold.

    With predictions H y, leaving out the shots S multiplies their residuals by (I - H_SS)^-1. This
    is exact for a ridge regression, with weights and an intercept too. A shot of fold -1 is left
    out on its own.
    """
    hat, y = np.asarray(hat, np.float64), np.asarray(targets, np.float64)
    residuals = y - np.asarray(predictions, np.float64)
    folds = np.full(len(y), -1) if folds is None else np.asarray(folds, np.int64)
    alone = np.flatnonzero(folds < 0)
    left_out = np.empty_like(y)
    rest = np.maximum(1 - np.diag(hat)[alone], 1e-9)
    left_out[alone] = y[alone] - residuals[alone] / rest[:, None]
    for number in np.unique(folds[folds >= 0]):
        out = np.flatnonzero(folds == number)
        rest = np.eye(len(out)) - hat[np.ix_(out, out)]
        left_out[out] = y[out] - np.linalg.solve(rest, residuals[out])
    return left_out


@dataclass(frozen=True, eq=False)
class ShotLines:
    """How scores of images of other classes depend on the number of shots, for each member."""

    reference: float  # the mean of log n over the classes
    level: Floats  # (member,): mean score at the reference
    # (member,): change of the mean, and of the log standard deviation, per unit of log n
    slope: Floats
    spread_slope: Floats

    @classmethod
    def fit(
        cls, scores: ArrayLike, labels: ArrayLike, behind: ArrayLike, shots: ArrayLike
    ) -> ShotLines:
        """Fit the lines to out-of-fold scores (member, image, class) with `behind` (image, class).

        Lines have no slope if all classes have the same number of shots, and for members whose
        scores do not vary or have no images to learn from.
        """
        z, y = np.asarray(scores, np.float64), np.asarray(labels, np.int64)
        shots = np.asarray(shots, np.int64)
        reference = float(np.log(shots).mean())
        members, images, classes = z.shape
        other = np.ones((images, classes))
        other[np.arange(images), y] = 0  # an image says nothing about its own class here
        count = other.sum(axis=0)  # images of other classes: (class,)
        seen = count > 1
        if (shots == shots[0]).all() or not seen.any():
            return cls(reference, *(np.zeros(members) for _ in range(3)))
        other, count, z = other[:, seen], count[seen], z[:, :, seen]
        log_n = (other * np.log(np.maximum(behind, 1))[:, seen]).sum(axis=0) / count  # (class,)
        mean = (other * z).sum(axis=1) / count  # (member, class)
        square = (other * (z - mean[:, None]) ** 2).sum(axis=1) / count
        varies = (square > 0).all(axis=1)
        log_sd = 0.5 * np.log(np.where(varies[:, None], square, 1.0))
        centred = log_n - log_n.mean()
        penalised = centred / ((centred**2).sum() + SLOPE_PENALTY)
        slope = mean @ penalised  # as `centred` sums to 0, means need not be subtracted
        level = mean.mean(axis=1) + slope * (reference - log_n.mean())
        return cls(reference, level, slope, log_sd @ penalised)

    @classmethod
    def joined(cls, *parts: ShotLines) -> ShotLines:
        """Join the lines of several groups of members of the same task."""
        arrays = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("level", "slope", "spread_slope")
        )
        return cls(parts[0].reference, *arrays)

    def affine(self, shots: ArrayLike) -> tuple[Floats, Floats]:
        """Return factors and shifts (member, ...) for scores with these numbers of shots (...).

        Balanced scores are factor * score + shift. With equal shots the factors are exactly 1 and
        the shifts 0.
        """
        behind = np.log(np.maximum(shots, 1)) - self.reference
        shape = (-1, *(1,) * behind.ndim)
        level, slope, spread = (
            x.reshape(shape) for x in (self.level, self.slope, self.spread_slope)
        )
        factors = np.exp(-spread * behind)
        return factors, level - factors * (level + slope * behind)

    def __call__(self, scores: ArrayLike, behind: ArrayLike) -> Floats:
        """Balance scores (member, image, class) that have `behind` shots behind them.

        `behind` is (class,) or (image, class).
        """
        factors, shifts = self.affine(np.atleast_2d(np.asarray(behind)))
        balanced: Floats = factors * np.asarray(scores, np.float64) + shifts
        return balanced


def shot_scores(behind: ArrayLike, shots: ArrayLike) -> Floats:
    """Score classes by how few shots they have: -log n, scaled so that stacking can fit a weight.

    The mean score of classes with `shots` is 0. With the weight `1 / SHOTS_SCALE`, the scores
    divide probabilities by n.

    >>> (shot_scores([1, 12], [1, 12]) / SHOTS_SCALE).round(2).tolist()
    [1.24, -1.24]
    """
    few = np.log(shots).mean() - np.log(np.maximum(behind, 1))
    scores: Floats = SHOTS_SCALE * few
    return scores


def fold_into_weights(
    weights: ArrayLike, lines: ShotLines, shots: ArrayLike
) -> tuple[Floats, Floats]:
    """Combine the weights of members, that of `shot_scores` last, and balance into one linear map.

    The logits of an image with raw scores z are the sum over members of weights[m, c] z[m, c], plus
    offsets[c]; returns both. With equal shots, all columns are the same and the offsets zeros.
    """
    *members, of_shots = np.asarray(weights, np.float64)
    factors, shifts = lines.affine(shots)
    column = np.array(members)[:, None]
    return column * factors, (column * shifts).sum(axis=0) + of_shots * shot_scores(shots, shots)
