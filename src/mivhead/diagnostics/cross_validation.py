"""Accuracy estimated by cross-validation on a handful of shots, and shots that look mislabelled.

Every shot is predicted by a head that was trained on neither the shot nor its augmented views. The
shots of each class are split into folds, and one head per fold is trained on the other folds. A
class with a single shot cannot be tested, because nothing would remain to learn it from.

The default recipe of `miv` has an ensemble whose parts can be cross-validated more cheaply than by
fitting everything once per fold: one head per fold is trained, what the ridge experts predict
without a fold has a closed form, and the weights of all members are fitted without the shots that
they are tested on (`MIVClassifier.cross_validated_logits`).

Several wrong shots of one thing confirm each other, as each is predicted with the help of the
others. The experts therefore also predict groups of shots that are unlike the rest of their class,
each without the whole group (`find_groups`).

The accuracy is what to expect on new images of which every class is equally frequent
(`mivhead.diagnostics.learning_curve`): every class counts the same, and a class with one shot is
expected to do what is usual for one shot in this task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead._util.progress import progress_bar
from mivhead.classifier import FeatureClassifier, MIVClassifier
from mivhead.diagnostics.evaluation import Mistake, Score, mistakes_table
from mivhead.diagnostics.learning_curve import ExpectedAccuracy, expected_accuracy
from mivhead.ensemble.balance import shots_behind
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.ensemble.stacking import fold_numbers
from mivhead.errors import InputError
from mivhead.features import FeatureTable
from mivhead.model.decision import softmax
from mivhead.model.info import Estimate
from mivhead.support import SupportSet

FOLDS = 5
SHARE = 0.5  # of the shots that are called mislabelled which may be hard instead
MARGIN = 0.4  # added to the expected number of hard shots
LEAST = math.log(8)  # surprise of a shot that is called mislabelled
MOST = 0.12  # of the shots that can be called mislabelled: beyond that, the task is hard
TOGETHER = math.log(20)  # least surprise of every shot of a group that is called mislabelled
STEPS, STARTS = 10, 300  # of k-means: at most
LEAST_SHOTS = 5  # of a class in which a group is looked for
NOISE = 0.05  # share of wrong labels that calibration reckons with
SPREAD = 0.5  # by how much the scale of calibrated log probabilities may err, in logarithms
TINY = 1e-6  # a probability below this says no more


@dataclass(frozen=True, eq=False, repr=False)
class CrossValidation:
    """Out-of-fold predictions of the shots of a support set.

    Parameters
    ----------
    ids, labels : sequence of str
        One per shot.
    classes : array of shape (class,)
        The classes, sorted.
    probabilities : array of shape (shot, class)
        Out-of-fold predictions; NaN for shots that could not be tested.
    folds : int
        Number of folds that were used: at most as many as the largest class has shots.
    calibrated : bool, default=False
        Whether probabilities can be taken at face value, as those of `miv` with its default recipe.
    without_group : array of shape (shot, class) or None, default=None
        Predictions of shots that are alike and unlike the rest of their class, each without all
        others of its group (`find_groups`); NaN for other shots.
    """

    ids: tuple[str, ...]
    labels: tuple[str, ...]
    classes: NDArray[Any]
    probabilities: NDArray[np.floating[Any]]
    folds: int
    calibrated: bool = False
    without_group: NDArray[np.floating[Any]] | None = None

    def __repr__(self) -> str:
        """Summarise the accuracy in one line."""
        name = "leave-one-out" if self.leave_one_out else f"{self.folds}-fold"
        low, high = (f"{100 * bound:.1f} %" for bound in self.interval)
        return (
            f"<CrossValidation: {name}, {self.score.right} of {self.score.images} shots right, "
            f"expected accuracy {100 * self.accuracy:.1f} % (95 % interval {low} to {high})>"
        )

    def _repr_html_(self) -> str:
        """Make a table for a notebook: the accuracy, and the shots predicted as another class."""
        text = f"<p>{escape(repr(self)[1:-1])}</p>"
        likely = [each for each in self.suspects if each.mislabelled]
        hard = [each for each in self.suspects if not each.mislabelled]
        text += mistakes_table("Shots that are likely to be mislabelled", likely)
        return text + mistakes_table("Hard shots, predicted as another class", hard)

    @property
    def tested(self) -> NDArray[np.bool_]:
        """Mask of the shots that could be tested."""
        tested: NDArray[np.bool_] = ~np.isnan(self.probabilities[:, 0])
        return tested

    @property
    def leave_one_out(self) -> bool:
        """Whether every fold leaves out exactly one shot."""
        return 0 < self.score.images == self.folds

    @property
    def score(self) -> Score:
        """Number of tested shots, and how many were predicted correctly."""
        best = self.classes[self.probabilities[self.tested].argmax(axis=1)]
        right = best == np.asarray(self.labels)[self.tested]
        return Score(len(right), int(right.sum()))

    @cached_property
    def expected(self) -> ExpectedAccuracy:
        """The accuracy to expect on new images, all classes together and each on its own."""
        numbers = np.searchsorted(self.classes, np.asarray(self.labels))
        fold = _assign_folds(np.asarray(self.labels), max(self.folds, 1))
        rows = np.flatnonzero(self.tested)
        own = numbers[rows]
        right = self.probabilities[rows].argmax(axis=1) == own
        behind = shots_behind(numbers, fold)[rows, own]
        shots = np.bincount(numbers, minlength=len(self.classes))
        confidence = None
        if self.calibrated:  # on average; a task as hard as chest X-rays may need another scale
            calibrated = _calibrate(self.probabilities[rows], own, spread=SPREAD)
            confidence = calibrated.max(axis=1)
        return expected_accuracy(right, own, np.maximum(behind, 1), shots, confidence)

    @property
    def accuracy(self) -> float:
        """Expected accuracy on new images, every class counting the same; NaN if unknown."""
        return self.expected.accuracy

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the expected accuracy."""
        return self.expected.interval

    @property
    def per_class(self) -> dict[str, float]:
        """Expected accuracy of each class; NaN for all of them if none could be tested."""
        names = map(str, self.classes)
        return dict(zip(names, self.expected.per_class.tolist(), strict=True))

    @property
    def estimate(self) -> Estimate:
        """What a model keeps of this."""
        expected, score = self.expected, self.score
        per_class = tuple(
            float(share) if tested else None
            for share, tested in zip(expected.per_class, expected.tested, strict=True)
        )
        if math.isnan(expected.accuracy):
            unknown = (None,) * len(per_class)
            return Estimate(None, None, None, score.images, score.right, unknown)
        low, high = expected.interval
        return Estimate(expected.accuracy, low, high, score.images, score.right, per_class)

    @property
    def suspects(self) -> list[Mistake]:
        """Shots that were predicted as another class, the most surprising label first.

        Few of them are mislabelled, and most are just hard: see `likely_mislabelled`.
        """
        rows = np.flatnonzero(self.tested)
        numbers = np.searchsorted(self.classes, np.asarray(self.labels))[rows]
        probabilities = self.probabilities[rows]
        if not self.calibrated:
            probabilities = _calibrate(probabilities, numbers, noise=NOISE)
        surprise, called = likely_mislabelled(probabilities, numbers)
        predicted = self.probabilities[rows]
        if self.without_group is not None:
            apart = self.without_group[rows]
            group = mislabelled_group(apart, numbers)
            predicted[group], called[group] = apart[group], True
            surprise[group] = _surprise(apart[group], numbers[group])
        found = []
        for i in np.argsort(-surprise, kind="stable"):
            row, best = rows[i], int(predicted[i].argmax())
            if best != numbers[i]:
                p = float(predicted[i, best])
                name = str(self.classes[best])
                found.append(Mistake(self.ids[row], self.labels[row], name, p, bool(called[i])))
        return found


def likely_mislabelled(
    probabilities: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> tuple[NDArray[np.floating[Any]], NDArray[np.bool_]]:
    """Find shots whose labels are more surprising than calibrated predictions allow.

    The surprise of a label y is log(max p / p_y): how much likelier the shot would become with the
    label that was predicted. Hard shots are surprising too. How many of them to expect follows from
    the probabilities: if all labels are right, the number of surprises above t is about

        E(t) = sum over shots and classes of p [surprise > t]

    If N(t) shots are observed there, about N(t) - E(t) of them are mislabelled. Shots above the
    smallest t with E(t) + MARGIN <= SHARE N(t) are called mislabelled: at least half of them should
    be, and a single surprise must be a great one. If that is more than one in eight, none is:
    predictions of such a task are overconfident. Nor is a shot that looks like a class of which no
    shot was tested: with a single shot, nobody knows how often that class is named wrongly.

    Parameters
    ----------
    probabilities : array of shape (shot, class)
        Calibrated out-of-fold predictions.
    labels : array of shape (shot,)
        Class numbers.

    Returns
    -------
    surprise : array of shape (shot,)
        0 for a shot that was predicted as its label.
    mislabelled : array of bool of shape (shot,)

    Examples
    --------
    Nine shots fit their labels. The last one certainly looks like another class:

    >>> p = np.array([[0.99, 0.01]] * 5 + [[0.01, 0.99]] * 4 + [[0.999, 0.001]])
    >>> surprise, mislabelled = likely_mislabelled(p, np.repeat([0, 1], 5))
    >>> np.flatnonzero(mislabelled).tolist()
    [9]

    If predictions are unsure, a wrong one says nothing about the label:

    >>> likely_mislabelled(np.array([[0.7, 0.3]] * 10), np.repeat([0, 1], [7, 3]))[1].any()
    np.False_
    """
    p = np.maximum(np.asarray(probabilities, np.float64), TINY)
    every = np.log(p.max(axis=1, keepdims=True) / p)  # (shot, class)
    surprise = _surprise(p, labels)
    order = np.argsort(every, axis=None)[::-1]
    expected = np.concatenate([[0.0], np.cumsum(p.ravel()[order])])
    ranked = np.sort(surprise)[::-1]
    above = np.searchsorted(-every.ravel()[order], -ranked, side="right")
    count = np.searchsorted(-ranked, -ranked, side="right")  # shots that are as surprising
    called = (expected[above] + MARGIN <= SHARE * count) & (ranked > LEAST)
    least = ranked[called].min() if called.any() else np.inf
    mislabelled = surprise >= least
    if mislabelled.sum() > max(2, MOST * len(p)):
        mislabelled[:] = False
    tested = np.bincount(labels, minlength=p.shape[1]) > 0
    return surprise, mislabelled & tested[p.argmax(axis=1)]


def _surprise(
    probabilities: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return log(max p / p_y) of each shot: 0 for a shot that was predicted as its label y."""
    p = np.maximum(np.asarray(probabilities, np.float64), TINY)
    surprise: NDArray[np.float64] = np.log(p.max(axis=1) / p[np.arange(len(p)), labels])
    return surprise


def find_groups(
    vectors: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> dict[int, NDArray[np.int64]]:
    """Find the shots of each class that are most unlike the rest of it, and alike.

    Three cups in a class of mugs confirm each other: each of them is predicted as a mug if only one
    is left out. The shots of a class are therefore divided in two by k-means, and the smaller part
    is a group that can be left out together.

    Parameters
    ----------
    vectors : array of shape (shot, channel)
        Mean vectors of the shots, of length 1.
    labels : array of shape (shot,)
        Class numbers.

    Returns
    -------
    dict of int to array
        By class, the rows of a group of two or more shots, fewer than half of the class. Classes
        of fewer than five shots have none.

    Examples
    --------
    >>> x = np.array([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [1.0, 0.1], [0.1, 0.99]])
    >>> find_groups(x, np.zeros(5, int))
    {0: array([2, 4])}
    """
    found = {}
    for number in np.unique(labels).tolist():
        rows = np.flatnonzero(labels == number)
        if len(rows) >= LEAST_SHOTS:
            first = _divide(vectors[rows].astype(np.float64))
            smaller = rows[first if 2 * first.sum() < len(rows) else ~first]
            if 2 <= len(smaller) < len(rows) / 2:
                found[number] = smaller
    return found


def _divide(x: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Divide vectors (shot, channel) in two by k-means; return which are in the first part.

    It starts from each vector, or STARTS of them, and the one least like it; the tightest division
    counts. Only products of vectors are needed: those with a centre are means of them.
    """
    similarity = x @ x.T  # (shot, shot)
    starts = np.linspace(0, len(x) - 1, min(len(x), STARTS)).astype(np.int64)
    first = similarity[starts] > similarity[similarity[starts].argmin(axis=1)]  # (start, shot)
    for step in range(STEPS + 1):
        first = first[first.any(axis=1) & ~first.all(axis=1)]
        if not len(first):
            return np.zeros(len(x), np.bool_)
        parts = np.stack([first, ~first]).astype(np.float64)  # (part, start, shot)
        sizes = parts.sum(axis=2, keepdims=True)
        products = parts @ similarity / sizes  # of each vector with the centres
        lengths = (parts * products).sum(axis=2, keepdims=True) / sizes  # of the centres, squared
        near, far = lengths - 2 * products  # squared distances from the centres, less |x|^2
        if step == STEPS or (first == (near < far)).all():
            break
        first = near < far
    tight = (sizes * lengths).sum(axis=(0, 2))
    best: NDArray[np.bool_] = first[tight.argmax()]
    return best


def mislabelled_group(
    probabilities: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Find the group of shots that looks mislabelled if all of it is left out.

    Parameters
    ----------
    probabilities : array of shape (shot, class)
        Predictions of the groups, each without itself; NaN for other shots.
    labels : array of shape (shot,)
        Class numbers.

    Returns
    -------
    array of int
        Rows of one group at most: the one that is most surprising on average, if another class is
        20 times likelier for every shot of it.

    Examples
    --------
    >>> p = np.array([[0.01, 0.99], [0.02, 0.98], [np.nan, np.nan], [0.3, 0.7], [0.99, 0.01]])
    >>> mislabelled_group(p, np.array([0, 0, 0, 1, 1])).tolist()
    [0, 1]
    """
    surprise = _surprise(probabilities, labels)
    groups = [np.flatnonzero((labels == c) & ~np.isnan(surprise)) for c in np.unique(labels)]
    sure = [group for group in groups if len(group) and surprise[group].min() > TOGETHER]
    if not sure:
        return np.empty(0, np.int64)
    most: NDArray[np.int64] = max(sure, key=lambda group: float(surprise[group].mean()))
    return most


def _calibrate(
    probabilities: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    *,
    spread: float = math.inf,
    noise: float = 0.0,
) -> NDArray[np.floating[Any]]:
    """Scale log probabilities so that the labels become most likely, each class counting the same.

    The logarithm of the scale has a normal prior of this spread around 0, and a share `noise` of
    the labels is taken to be wrong.
    """
    if not len(labels):
        return probabilities
    logs = np.log(np.maximum(probabilities, TINY))
    rows, weights = np.arange(len(labels)), 1 / np.bincount(labels)[labels]
    weights /= weights.mean()

    def likelihood(scale: float) -> float:
        own = softmax(scale * logs)[rows, labels]
        fit = float(weights @ np.log((1 - noise) * own + noise / logs.shape[1]))
        return fit - math.log(scale) ** 2 / (2 * spread**2)

    return softmax(max(np.geomspace(0.05, 20, 81).tolist(), key=likelihood) * logs)


def cross_validate(
    classifier: FeatureClassifier,
    table: FeatureTable,
    *,
    folds: int = FOLDS,
    class_vectors: Mapping[str, ArrayLike] | None = None,
    verbose: bool = True,
) -> CrossValidation:
    """Predict every shot of a support set with a head that has not seen it.

    Parameters
    ----------
    classifier : FeatureClassifier
        A classifier with the parameters to use; it need not be fitted and is not modified.
    table : FeatureTable
        The support set with its labels and, optionally, augmented views.
    folds : int, default=5
        Number of folds, and therefore of heads to train. More folds leave more shots to learn from.
    class_vectors : mapping or None, default=None
        Vectors of the classes, if the classifier is `MIVClassifier` and names are a member.
    verbose : bool, default=True
        Show a progress bar if this takes more than two seconds.

    Returns
    -------
    CrossValidation
        Out-of-fold predictions, the accuracy they give, and suspicious shots.

    Examples
    --------
    >>> from mivhead import Features
    >>> from mivhead.methods import make_method
    >>> X = Features(np.eye(4, dtype=np.float32)[[0, 0, 0, 1, 1, 0]])  # the last looks like an "a"
    >>> shots = FeatureTable(X, tuple("123456"), ("a", "a", "a", "b", "b", "b"))
    >>> result = cross_validate(make_method("ncc"), shots)
    >>> result.folds, result.score
    (3, Score(images=6, right=5))
    >>> [suspect.id for suspect in result.suspects]
    ['6']
    """
    if table.labels is None:
        raise InputError("The table has no labels, which cross-validation needs.")
    given = table.views, table.view_of, None, class_vectors
    support = SupportSet.read(table.features, table.labels, *given)
    order = np.argsort(np.asarray(table.labels), kind="stable")  # that of the support set
    names = [table.ids[row] for row in order]
    model = classifier.copy_unfitted()
    found = cross_validate_support(model, support, names, folds=folds, verbose=verbose)
    back = np.argsort(order)
    grouped = found.without_group
    return replace(
        found,
        ids=table.ids,
        labels=table.labels,
        probabilities=found.probabilities[back],
        without_group=None if grouped is None else grouped[back],
    )


def cross_validate_support(
    model: FeatureClassifier,
    support: SupportSet,
    ids: Sequence[str],
    *,
    folds: int = FOLDS,
    verbose: bool = True,
) -> CrossValidation:
    """Cross-validate as `cross_validate` does, with a classifier that must not be used afterwards.

    Parameters
    ----------
    model : FeatureClassifier
        A classifier with the parameters to use.
    support : SupportSet
        The shots.
    ids : sequence of str
        Their names.
    folds, verbose
        As for `cross_validate`.
    """
    if folds < 2:
        raise InputError(f"folds must be at least 2, got {folds}.")
    fold_of = _assign_folds(support.labels, folds)
    used = fold_numbers(fold_of)
    names = np.array([str(label) for label in support.classes[support.seen].tolist()])
    probabilities = np.full((len(fold_of), len(names)), np.nan)
    model.set_params(random_state=0)
    if "verbose" in model.get_params():
        model.set_params(verbose=False)  # this function shows its own progress
    stacks = isinstance(model, MIVClassifier) and model.stacks
    without_group = None
    with progress_bar("cross-validating", len(used), show=verbose, unit="fold") as advance:
        if isinstance(model, MIVClassifier) and stacks and used:
            logits = model.cross_validated_logits(support, fold_of, lambda: advance(1))
            probabilities[fold_of >= 0] = softmax(logits)
            without_group = _without_groups(model, support, fold_of)
        else:
            for fold in used:
                out = fold_of == fold
                model.fit_support(support.take(~out))
                probabilities[out] = model.predict_proba(support.features[np.flatnonzero(out)])
                advance(1)
    order = np.argsort(names)  # of strings: 10 before 9
    labels = tuple(names[support.labels].tolist())
    if without_group is not None:
        without_group = without_group[:, order]
    found = probabilities[:, order]
    return CrossValidation(
        tuple(ids), labels, names[order], found, len(used), stacks, without_group
    )


def _without_groups(
    model: MIVClassifier, support: SupportSet, fold_of: NDArray[np.int64]
) -> NDArray[np.floating[Any]] | None:
    """Predict the groups of `find_groups`, each without itself; by the experts, to save time."""
    with np.errstate(all="ignore"):  # of features that are far too large
        groups = find_groups(mean_vectors(support.features.blocks[-1]), support.labels)
    if not groups:
        return None
    fold = fold_of.copy()
    for number, rows in groups.items():
        fold[rows] = fold_of.max() + 1 + number
    experts = model.copy_unfitted().set_params(recipe="experts", random_state=0)
    assert isinstance(experts, MIVClassifier)
    logits = experts.cross_validated_logits(support, fold)
    found = np.full((len(fold), len(support.shots)), np.nan)
    grouped = fold > fold_of.max()
    found[grouped] = softmax(logits)[grouped[fold >= 0]]
    return found


def _assign_folds(labels: NDArray[Any], folds: int) -> NDArray[np.int64]:
    """Assign the shots of each class to folds in turn; -1 for the only shot of a class."""
    # scikit-learn's StratifiedKFold would test a single shot too, with nothing to learn it from.
    fold_of = np.full(len(labels), -1)
    for name in np.unique(labels):
        rows = np.flatnonzero(labels == name)
        if len(rows) > 1:
            fold_of[rows] = np.arange(len(rows)) % folds
    return fold_of
