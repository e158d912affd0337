"""Balance: every class counts the same, regardless of its number of shots.

A member of the ensemble that has seen one shot of a class and twelve of another scores the first
class lower, and more evenly, on every image. This has nothing to do with how frequent the classes
are among new images, so it is taken out of the scores before they are combined. All formulas leave
tasks with equal shots exactly as they are.

**Ridge experts** weigh each shot by (mean number of shots) / (shots of its class), so that the
intercept and the penalty do not favour large classes (`shot_weights`).

**Scores** of a member are compared between classes by how they behave on images of *other* classes,
which every class has, even one with a single shot. Their mean and the logarithm of their standard
deviation are straight lines in log n, where n is the number of shots behind a score (`ShotLines`).
With r the mean of log n over the classes, a score z becomes

    z' = mean(r) + (z - mean(log n)) exp(-slope of the spread (log n - r))

This is the Z-norm of speaker verification, with statistics that depend on the number of shots only.
It has no constant that depends on the scale of a member or on how hard a task is. Out-of-fold
scores have their own numbers of shots behind them (`shots_behind`).

**Stacking** weighs the shots in the same way, and its prior weights count as much as before for the
effective number of shots (`effective_number`).

**Logits** are the weighted sum of z' and of one more member, the number of shots itself: its score
is minus log n (`shot_scores`). Its weight starts at the textbook correction for classes that were
more frequent in training, which divides probabilities by n, and is fitted by stacking like all
others. Fixed at that value, a class of 60 shots among classes of one to three would hardly ever be
named, and the out-of-fold predictions of those 60 show it. Classes with one shot have no such
predictions and are harder, so the logits shrink with their share (`untested_scale`).

**If only one class has several shots**, nothing tells how much the scores favour it. The experts
are then averages over regressions on one shot of each class (`mivhead.ensemble.ridge`), with the
weights of one-shot tasks, the head has no say, and none of the above applies.

**Class priors** come last, as plain Bayes: the logarithm of the expected frequency (`log_prior`).

The form and the constants were chosen on the tuning sets (docs/research-log.md).

References
----------
Auckenthaler, Carey and Lloyd-Thomas, "Score normalization for text-independent speaker
verification systems", Digital Signal Processing 10, 2000.
Menon et al., "Long-tail learning via logit adjustment", ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.errors import InputError

PENALTY = 1.0  # on the slope of a line in log n, in units of (log n)^2 summed over classes
UNTESTED = 0.5  # by how much the log scale of logits falls with the share of one-shot classes
SHOTS_SCALE = 0.25  # of the scores of `shot_scores`; the smaller, the closer to the textbook
LARGEST = 1e100  # frequency: the sum of all must be finite
UNIFORM, SHOTS = "uniform", "shots"  # class priors that have a name

Floats = NDArray[np.float64]
Prior = str | Mapping[Any, float] | Sequence[float]  # how frequent classes are
Ints = NDArray[np.int64]


def shot_weights(labels: ArrayLike) -> Floats:
    """Weigh shots so that all classes have the same total weight, and the mean weight is 1.

    Parameters
    ----------
    labels : array-like of int
        Class numbers of the shots, 0 to classes - 1.

    Returns
    -------
    ndarray of shape (shot,)
        The mean number of shots per class, divided by the number of shots of the own class.

    Examples
    --------
    >>> shot_weights([0, 0, 0, 1]).round(3).tolist()
    [0.667, 0.667, 0.667, 2.0]
    """
    labels = np.asarray(labels, np.int64)
    shots = np.bincount(labels)
    weights: Floats = shots.mean() / shots[labels]
    return weights


def effective_number(weights: ArrayLike) -> float:
    """Return the number of equally weighted observations that say as much: Kish's formula.

    >>> effective_number([1, 1, 1, 1]), effective_number([4, 0, 0, 0])
    (4.0, 1.0)
    """
    weights = np.asarray(weights, np.float64)
    return float(weights.sum() ** 2 / (weights**2).sum())


def one_has_several(shots: ArrayLike) -> bool:
    """Whether only one class has several shots, so that no other class can be tested.

    >>> one_has_several([1, 9, 1]), one_has_several([2, 9, 1]), one_has_several([1, 1, 1])
    (True, False, False)
    """
    return int((np.asarray(shots) > 1).sum()) == 1


def untested_scale(shots: ArrayLike) -> float:
    """Return the factor of logits that makes up for classes without out-of-fold predictions.

    Stacking calibrates the logits on images of classes with several shots. Images of classes with
    one shot are harder: the more such classes there are, the less sure a model should be.

    Parameters
    ----------
    shots : array-like of shape (class,)
        Number of shots of each class.

    Examples
    --------
    >>> untested_scale([3, 5, 8]), round(untested_scale([1, 1, 5, 8]), 3)
    (1.0, 0.779)
    """
    return float(np.exp(-UNTESTED * np.mean(np.asarray(shots) == 1)))


def shots_behind(labels: ArrayLike, folds: ArrayLike | None = None) -> Ints:
    """Count the shots of every class that an out-of-fold score was learned from.

    Parameters
    ----------
    labels : array-like of shape (shot,)
        Class numbers.
    folds : array-like of shape (shot,) or None, default=None
        Shots of the same fold are left out together; those of fold -1 are never left out. None:
        each shot is left out on its own.

    Returns
    -------
    ndarray of shape (shot, class)
        Numbers of shots. For a shot of fold -1 they are those of the whole support set.

    Examples
    --------
    >>> shots_behind([0, 0, 1]).tolist()
    [[1, 1], [1, 1], [2, 0]]
    >>> shots_behind([0, 0, 1], [0, 1, -1]).tolist()
    [[1, 1], [1, 1], [2, 1]]
    """
    labels = np.asarray(labels, np.int64)
    members: Ints = np.eye(int(labels.max(initial=-1)) + 1, dtype=np.int64)[labels]  # (shot, class)
    counts: Ints = np.tile(members.sum(axis=0), (len(labels), 1))
    if folds is None:
        counts -= members
        return counts
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
    is exact for a ridge regression, with weights and an intercept too.

    Parameters
    ----------
    hat : array-like of shape (shot, shot)
        The matrix H, the intercept included.
    targets, predictions : array-like of shape (shot, class)
        Targets, and what the smoother that was fitted to all of them predicts.
    folds : array-like of shape (shot,) or None, default=None
        As for `shots_behind`; a shot of fold -1 is left out on its own.

    Returns
    -------
    ndarray of shape (shot, class)
        Out-of-fold predictions.

    Examples
    --------
    The mean of all targets is a smoother. Without the last two, the mean is 2:

    >>> y = np.array([[1.0], [3.0], [5.0], [7.0]])
    >>> hat = np.full((4, 4), 0.25)
    >>> left_out_predictions(hat, y, hat @ y, [0, 0, 1, 1]).round(9).ravel().tolist()
    [6.0, 6.0, 2.0, 2.0]
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
        """Fit the lines of several members to out-of-fold scores.

        Parameters
        ----------
        scores : array-like of shape (member, image, class)
            Out-of-fold scores.
        labels : array-like of shape (image,)
            Class numbers of these images. An image says nothing about its own class here.
        behind : array-like of shape (image, class)
            Number of shots behind each score, as `shots_behind` counts them.
        shots : array-like of shape (class,)
            Number of shots of each class in the whole support set.

        Returns
        -------
        ShotLines
            Lines without slope if all classes have the same number of shots, and for members
            whose scores do not vary or have no images to learn from.
        """
        z, y = np.asarray(scores, np.float64), np.asarray(labels, np.int64)
        shots = np.asarray(shots, np.int64)
        reference = float(np.log(shots).mean())
        members, images, classes = z.shape
        level, slope, spread = (np.zeros(members) for _ in range(3))
        other = np.ones((images, classes))
        other[np.arange(images), y] = 0
        count = other.sum(axis=0)  # images of other classes, per class
        seen = count > 1
        if (shots == shots[0]).all() or not seen.any():
            return cls(reference, level, slope, spread)
        other, count, z = other[:, seen], count[seen], z[:, :, seen]
        log_n = (other * np.log(np.maximum(behind, 1))[:, seen]).sum(axis=0) / count  # (class,)
        mean = (other * z).sum(axis=1) / count  # (member, class)
        square = (other * (z - mean[:, None]) ** 2).sum(axis=1) / count
        varies = (square > 0).all(axis=1)
        log_sd = 0.5 * np.log(np.where(varies[:, None], square, 1.0))
        centred = log_n - log_n.mean()
        penalised = centred / ((centred**2).sum() + PENALTY)
        slope = mean @ penalised  # as `centred` sums to 0, means need not be subtracted
        spread = log_sd @ penalised
        level = mean.mean(axis=1) + slope * (reference - log_n.mean())
        return cls(reference, level, slope, spread)

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

        Parameters
        ----------
        scores : array-like of shape (member, image, class)
            Scores.
        behind : array-like of shape (class,) or (image, class)
            Numbers of shots.

        Returns
        -------
        ndarray of shape (member, image, class)
            Balanced scores.
        """
        behind = np.atleast_2d(np.asarray(behind))
        factors, shifts = self.affine(behind)
        balanced: Floats = factors * np.asarray(scores, np.float64) + shifts
        return balanced


def shot_scores(behind: ArrayLike, shots: ArrayLike) -> Floats:
    """Score classes by how few shots they have: -log n, scaled so that stacking can fit a weight.

    Parameters
    ----------
    behind : array-like of int
        Numbers of shots behind scores.
    shots : array-like of shape (class,)
        Number of shots of each class, whose mean score is 0.

    Returns
    -------
    ndarray of the shape of `behind`
        Scores; with the weight `1 / SHOTS_SCALE`, they divide probabilities by n.

    Examples
    --------
    >>> (shot_scores([1, 12], [1, 12]) / SHOTS_SCALE).round(2).tolist()
    [1.24, -1.24]
    >>> shot_scores([5, 5], [5, 5]).tolist()
    [0.0, 0.0]
    """
    few = np.log(shots).mean() - np.log(np.maximum(behind, 1))
    scores: Floats = SHOTS_SCALE * few
    return scores


def fold_into_weights(
    weights: ArrayLike, lines: ShotLines, shots: ArrayLike
) -> tuple[Floats, Floats]:
    """Combine member weights and balance into one linear map of raw scores.

    The logits of an image with raw scores z are sum over members of weights[m, c] z[m, c], plus
    offsets[c].

    Parameters
    ----------
    weights : array-like of shape (member + 1,)
        Fitted by stacking on balanced scores; the last one is that of `shot_scores`.
    lines : ShotLines
        Of the same members.
    shots : array-like of shape (class,)
        Number of shots of each class.

    Returns
    -------
    weights : ndarray of shape (member, class)
        With equal shots, every column is the given weights.
    offsets : ndarray of shape (class,)
        With equal shots, zeros.
    """
    *given, of_shots = np.asarray(weights, np.float64)
    factors, shifts = lines.affine(shots)
    member = np.array(given)[:, None]
    return member * factors, (member * shifts).sum(axis=0) + of_shots * shot_scores(shots, shots)


def is_uniform(prior: Prior | None) -> bool:
    """Return whether a class prior has that name; None stands for it."""
    return prior is None or (isinstance(prior, str) and prior == UNIFORM)


def read_prior(text: str) -> Prior:
    """Read a class prior from text: a name, or frequencies.

    >>> read_prior("robin=3, wren=0.5"), read_prior("shots")
    ({'robin': 3.0, 'wren': 0.5}, 'shots')
    """
    if "=" not in text:
        return text.strip()
    try:
        pairs = [each.rpartition("=") for each in text.split(",")]
        found = {name.strip(): float(share) for name, _, share in pairs}
    except ValueError:
        raise InputError(
            f"{text!r:.80} is not a list of frequencies, such as robin=3,wren=1."
        ) from None
    if len(found) < len(pairs):
        raise InputError(f"{text!r:.80} names a class twice.")
    return found


def log_prior(
    prior: Prior,
    classes: Sequence[Any],
    shots: Sequence[int] | None = None,
) -> Floats:
    """Return what a class prior adds to balanced logits.

    Parameters
    ----------
    prior : {"uniform", "shots"}, mapping of class to frequency, or sequence of float
        How frequent the classes are among new images: all alike, in proportion to their numbers of
        shots, or as given. Frequencies need not sum to 1.
    classes : sequence
        The classes.
    shots : sequence of int or None, default=None
        Number of shots of each class, for "shots".

    Returns
    -------
    ndarray of shape (class,)
        log(frequency / mean frequency): zeros for the uniform prior, -infinity for a class that
        does not occur.

    Raises
    ------
    InputError
        For a name, a class or a frequency that cannot be used.

    Examples
    --------
    >>> log_prior("uniform", ["cat", "dog"]).tolist()
    [0.0, 0.0]
    >>> np.exp(log_prior({"cat": 3, "dog": 1}, ["cat", "dog"])).round(3).tolist()
    [1.5, 0.5]
    """
    if isinstance(prior, str):
        if prior == UNIFORM:
            return np.zeros(len(classes))
        if prior != SHOTS:
            raise InputError(
                f"class_prior must be {UNIFORM!r}, {SHOTS!r} or a frequency for each class, got "
                f"{prior!r}."
            )
        if shots is None:
            raise InputError(f"class_prior={SHOTS!r} needs a model that knows its shots.")
        if not all(shots):
            raise InputError(
                f"class_prior={SHOTS!r} needs shots of every class, and some are known by name "
                "only: give frequencies."
            )
        prior = list(shots)
    if isinstance(prior, Mapping):
        given, names = {str(name): share for name, share in prior.items()}, list(map(str, classes))
        unknown = [name for name in given if name not in names]
        missing = [name for name in names if name not in given]
        if unknown or missing:
            problem = f"no class {unknown[0]!r}" if unknown else f"no frequency for {missing[0]!r}"
            raise InputError(
                f"class_prior needs a frequency for each of {', '.join(map(str, classes))}; there "
                f"is {problem}."
            )
        prior = [given[name] for name in names]
    if len(prior) != len(classes):
        raise InputError(
            f"class_prior has {len(prior)} frequencies for {len(classes)} classes; give one each."
        )
    for name, value in zip(classes, prior, strict=True):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= LARGEST:
            raise InputError(
                f"A frequency in class_prior must be a number from 0 to {LARGEST:g}, got "
                f"{value!r:.80} for {name}."
            )
    frequencies = np.asarray(prior, np.float64)
    if not frequencies.any():
        raise InputError("class_prior has only zeros; at least one class must occur.")
    with np.errstate(divide="ignore"):  # a class that does not occur
        logs: Floats = np.log(frequencies / frequencies.mean())
    return logs
