"""Accuracy estimated by cross-validation on a handful of shots, and shots that look mislabelled.

Every shot is predicted by a head that was trained on neither the shot nor its augmented views. The
shots of each class are split into folds, and one head per fold is trained on the other folds. A
class with a single shot cannot be tested, because nothing would remain to learn it from.

The default recipe of `miv` has an ensemble whose parts can be cross-validated more cheaply than by
fitting everything once per fold: one head per fold is trained, what the ridge experts predict
without a fold has a closed form, and the weights of all members are fitted without the shots that
they are tested on (`MIVClassifier.cross_validated_logits`).

**What to expect of new images**, of which every class is equally frequent, is more than a count:
classes with many shots would dominate, every prediction was made with fewer shots than the model
has, and a dozen of them, each right or wrong, say little. Therefore:

- Every prediction is weighted by 1 / (shots of its class), so that all classes count the same.
- Its largest probability p is raised to the number of shots n that the model has of the class, from
  the m shots behind the prediction: logit p + SLOPE log(n / m). A class with one shot, which cannot
  be tested, is expected to do what the others would do with n = 1.
- A prediction is right with HITS [it was right] + (1 - HITS) p. A probability says more than one
  outcome, and the outcomes keep it honest.
- It gets a name if p reaches the threshold of the decision (`mivhead.decision`).

The interval is Agresti and Coull's, for an effective number of predictions. Shots of a class are
alike (RHO is their correlation), so m of them count as m / (1 + (m - 1) RHO), and a class that was
not tested counts as PER_UNTESTED predictions. Constants: chosen on the tuning sets
(docs/research-log.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import Floats, softmax
from mivhead._util.text import progress_bar
from mivhead.classifier import MIVClassifier
from mivhead.decision import MAX_ERRORS, Calibration
from mivhead.diagnostics.evaluation import Mistake, Score
from mivhead.ensemble.balance import shots_behind
from mivhead.ensemble.stacking import fold_numbers
from mivhead.errors import InputError
from mivhead.features import SupportSet
from mivhead.head.recipe import resolve_recipe
from mivhead.model.base import Estimate

FOLDS = 5
RATIO = 60  # of the probabilities of the predicted class and the label of a mislabelled shot
MOST = 0.05  # of the shots that can be called mislabelled, or 2: beyond that, the task is hard
TINY = 1e-6  # a probability below this says no more
SLOPE = 0.8  # of the log-odds of a right prediction in log n
HITS = 0.4  # how much the outcome of a prediction counts, compared with its probability
RHO = 0.07  # correlation of predictions of the same class
PER_UNTESTED = 1.2  # predictions that a class without any counts as, in the interval
WIDTH = 2.1  # standard errors on either side: 1.96 and a little, as the estimate is biased, too


@dataclass(frozen=True, eq=False, repr=False)
class CrossValidation:
    """Out-of-fold predictions of the shots of a support set."""

    ids: tuple[str, ...]  # one per shot
    labels: tuple[str, ...]
    classes: NDArray[Any]  # (class,), sorted
    probabilities: Floats  # (shot, class); NaN for shots that were not tested
    folds: int  # that were used: at most as many as the largest class has shots
    # Whether probabilities can be taken at face value, as those of the default recipe
    calibrated: bool = False
    other: str | None = None  # the class that stands for everything else, if there is one
    max_errors: float = MAX_ERRORS  # fraction of wrong names that is allowed among the names

    def __repr__(self) -> str:
        """Summarise the accuracy in one line."""
        low, high = (f"{100 * bound:.1f}%" for bound in self.interval)
        return (
            f"<CrossValidation: {self.folds}-fold, {self.score.right} of {self.score.images} shots "
            f"right, expected accuracy {100 * self.accuracy:.1f}% (95% interval {low} to {high})>"
        )

    def __str__(self) -> str:
        """Say what to expect of new images."""
        return str(self.estimate)

    @property
    def tested(self) -> NDArray[np.bool_]:
        """Mask of the shots that could be tested; those of `other` do not count."""
        named: NDArray[np.bool_] = np.asarray(self.labels) != self.other
        return named & ~np.isnan(self.probabilities[:, 0])

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The class number of each shot."""
        return np.searchsorted(self.classes, np.asarray(self.labels))

    @property
    def score(self) -> Score:
        """Number of tested shots, and how many were predicted correctly."""
        rows = self.tested
        right = self.probabilities[rows].argmax(axis=1) == self.numbers[rows]
        return Score(len(right), int(right.sum()))

    @cached_property
    def expected(self) -> Expected:
        """What to expect of new images."""
        numbers, rows = self.numbers, self.tested
        fold = _assign_folds(np.asarray(self.labels), max(self.folds, 1))
        behind = shots_behind(numbers, fold)[np.arange(len(numbers)), numbers]
        shots = np.bincount(numbers, minlength=len(self.classes))
        named = self.classes != self.other
        predictions = self.probabilities[rows], numbers[rows], behind[rows]
        return expect(*predictions, shots, named, self.calibrated, self.max_errors)

    @property
    def accuracy(self) -> float:
        """Expected accuracy on new images, every class counting the same; NaN if unknown."""
        return self.expected.accuracy

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the expected accuracy."""
        return self.expected.interval

    @property
    def estimate(self) -> Estimate:
        """What a model keeps of this."""
        expected, score = self.expected, self.score
        if math.isnan(expected.accuracy):
            return Estimate(None, None, None, None, None, score.images, score.right)
        values = expected.accuracy, *expected.interval, expected.right_names, expected.wrong_names
        return Estimate(*values, score.images, score.right)

    @property
    def suspects(self) -> list[Mistake]:
        """Shots that were predicted as another class, the most surprising label first.

        The surprise is how much more probable the predicted class is than the label. Most of these
        shots are just hard. One is `mislabelled` if the predicted class is RATIO times as probable,
        unless that is true of many shots (predictions of such a task are overconfident) or no shot
        of the predicted class was tested. Images of the class `other` are never suspect.
        """
        numbers, p = self.numbers, np.maximum(np.nan_to_num(self.probabilities), TINY)
        shots, best = np.arange(len(p)), p.argmax(axis=1)
        surprise = p[shots, best] / p[shots, numbers]
        surprise[~self.tested] = 0
        known = np.bincount(numbers[self.tested], minlength=len(self.classes)) > 0
        known |= self.classes == self.other
        called = (surprise >= RATIO) & known[best] & self.calibrated
        if called.sum() > max(2, MOST * len(p)):
            called[:] = False
        return [
            Mistake(
                self.ids[shot],
                self.labels[shot],
                str(self.classes[best[shot]]),
                float(p[shot, best[shot]]),
                bool(called[shot]),
            )
            for shot in np.argsort(-surprise, kind="stable")
            if surprise[shot] > 0 and best[shot] != numbers[shot]
        ]


@dataclass(frozen=True)
class Expected:
    """What to expect of new images, of which every class is equally frequent."""

    accuracy: float  # NaN if fewer than two classes have several shots
    interval: tuple[float, float]  # 95% interval of it; from 0 to 1 if nothing is known
    right_names: float  # fraction of the images that get the right name
    wrong_names: float  # fraction that gets a wrong one; the rest is left to people


def expect(
    probabilities: Floats,
    labels: NDArray[np.int64],
    behind: NDArray[np.int64],
    shots: NDArray[np.int64],
    named: NDArray[np.bool_] | None = None,
    calibrated: bool = True,
    max_errors: float = MAX_ERRORS,
) -> Expected:
    """Say what to expect of new images, from out-of-fold predictions.

    For each image: its probabilities (image, class), its class number and the number of shots of
    its own class that the prediction was learned from (`behind`). `shots` are those of each class
    that the model has; classes that are not `named` are left out. Probabilities that are not
    calibrated only say which class is predicted.

    Of two classes with three shots each, five of six shots were predicted right. A third class has
    one shot, which lowers the accuracy:

    >>> p = np.array([[0.8, 0.1, 0.1]] * 3 + [[0.1, 0.8, 0.1]] * 2 + [[0.8, 0.1, 0.1]])
    >>> labels, behind = np.array([0, 0, 0, 1, 1, 1]), np.full(6, 2)
    >>> expected = expect(p, labels, behind, np.array([3, 3, 1]))
    >>> round(expected.accuracy, 2), round(expected.right_names, 2)
    (0.81, 0.56)
    """
    named = np.ones(len(shots), bool) if named is None else named
    tested = np.bincount(labels, minlength=len(shots))[named]
    if (tested > 0).sum() < 2:  # a model that always names the same class would be right
        return Expected(math.nan, (0.0, 1.0), math.nan, math.nan)
    best = probabilities.argmax(axis=1)
    largest = np.clip(probabilities.max(axis=1), TINY, 1 - TINY)
    weights = 1 / shots[labels] / (1 / shots[labels]).sum()

    calibration = Calibration((), tuple(shots.tolist()), calibrated)
    thresholds = calibration.thresholds(None, max_errors)
    needed = np.asarray(thresholds.probability or [0.0] * len(shots))

    def with_shots(count: NDArray[np.int64] | int) -> Floats:
        """Return the fractions that are right, named rightly and named, if classes had `count`."""
        odds = largest / (1 - largest) * (count / np.maximum(behind, 1)) ** SLOPE
        p = odds / (1 + odds) if calibrated else np.ones(len(odds))
        hits = HITS if calibrated else 1.0
        right = hits * (best == labels) + (1 - hits) * p
        sure = named[best] & (p >= needed[best])
        return np.array([weights @ right, weights @ (sure * right), weights @ sure])

    single = float(np.mean(shots[named] == 1))
    fractions = (1 - single) * with_shots(shots[labels]) + single * with_shots(1)
    accuracy, right_names, names = np.clip(fractions, 0.0, 1.0).tolist()
    independent = np.where(tested > 0, tested / (1 + (tested - 1) * RHO), PER_UNTESTED)
    count = len(tested) ** 2 / (1 / independent).sum() + 2
    centre = (accuracy * (count - 2) + 1) / count
    half = WIDTH * math.sqrt(centre * (1 - centre) / count)
    interval = max(0.0, float(centre - half)), min(1.0, float(centre + half))
    return Expected(accuracy, interval, right_names, max(0.0, names - right_names))


def cross_validate(
    model: MIVClassifier,
    support: SupportSet,
    ids: Sequence[str],
    *,
    folds: int = FOLDS,
    verbose: bool = True,
) -> CrossValidation:
    """Cross-validate shots by their names, with a classifier that must not be used afterwards."""
    if folds < 2:
        raise InputError(f"folds must be at least 2, got {folds}.")
    fold_of = _assign_folds(support.labels, folds)
    used = fold_numbers(fold_of)
    names = np.array([str(label) for label in support.classes.tolist()])
    probabilities = np.full((len(fold_of), len(names)), np.nan)
    model.random_state, model.verbose = 0, False  # this function shows its own progress
    has_experts = resolve_recipe(model.recipe).has_experts
    with progress_bar("cross-validating", len(used), show=verbose, unit="fold") as advance:
        if has_experts and used:
            logits = model.cross_validated_logits(support, fold_of)
            advance(len(used))
            probabilities[fold_of >= 0] = softmax(logits.astype(np.float64))
        else:
            for fold in used:
                out = fold_of == fold
                model.fit_support(support.take(~out))
                probabilities[out] = model.predict_proba(support.features[np.flatnonzero(out)])
                advance(1)
    order = np.argsort(names)  # of strings: 10 before 9
    labels = tuple(names[support.labels].tolist())
    return CrossValidation(
        tuple(ids), labels, names[order], probabilities[:, order], len(used), has_experts
    )


def _assign_folds(labels: NDArray[Any], folds: int) -> NDArray[np.int64]:
    """Assign the shots of each class to folds in turn; -1 for the only shot of a class."""
    # scikit-learn's StratifiedKFold would test a single shot too, with nothing to learn it from.
    fold_of = np.full(len(labels), -1)
    for name in np.unique(labels):
        rows = np.flatnonzero(labels == name)
        if len(rows) > 1:
            fold_of[rows] = np.arange(len(rows)) % folds
    return fold_of
