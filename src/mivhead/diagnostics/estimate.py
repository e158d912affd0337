"""An honest estimate for a model fitted on a handful of images, and the shots that look wrong.

Every shot is predicted by a head that has not seen it, nor its views: the shots of each class are
dealt into folds, and the head is trained once per fold on the rest. With at most as many shots per
class as folds this leaves one shot of each class out at a time. A class with one shot cannot be
tested, because nothing of it would be left to learn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from mivhead._progress import progress_bar
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError
from mivhead.features import FeatureTable


@dataclass(frozen=True)
class Suspect:
    """A shot whose label the others contradict."""

    id: str
    label: str
    predicted: str
    probability: float  # of the predicted class


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out predictions of the shots of a support set."""

    ids: tuple[str, ...]
    labels: tuple[str, ...]
    classes: NDArray[Any]
    probabilities: NDArray[np.floating[Any]]  # (image, class); NaN where a shot was not tested

    @property
    def tested(self) -> NDArray[np.bool_]:
        """Which shots could be tested."""
        tested: NDArray[np.bool_] = ~np.isnan(self.probabilities[:, 0])
        return tested

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Which of the tested shots were predicted right."""
        best = self.classes[self.probabilities[self.tested].argmax(axis=1)]
        right: NDArray[np.bool_] = best == np.asarray(self.labels)[self.tested]
        return right

    @property
    def accuracy(self) -> float:
        """Share of the tested shots that were predicted right; NaN if none could be tested."""
        return float(self.correct.mean()) if len(self.correct) else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        return wilson_interval(int(self.correct.sum()), len(self.correct))

    @property
    def suspects(self) -> list[Suspect]:
        """Tested shots that were predicted as another class, the surest first."""
        found = []
        for row in np.flatnonzero(self.tested):
            best = int(self.probabilities[row].argmax())
            name = str(self.classes[best])
            if name != self.labels[row]:
                p = float(self.probabilities[row, best])
                found.append(Suspect(self.ids[row], self.labels[row], name, p))
        return sorted(found, key=lambda s: -s.probability)


def held_out(
    classifier: FeatureClassifier, table: FeatureTable, *, folds: int = 5, verbose: bool = True
) -> HeldOut:
    """Predict every shot of a support set by a head that has not seen it.

    Parameters
    ----------
    classifier
        Its parameters are used; it need not be fitted and is not changed.
    table
        The support set, with labels and perhaps views.
    folds
        Trainings to spend; more folds, more shots to learn from in each.
    verbose
        Show a progress bar if it takes more than two seconds.
    """
    if table.labels is None:
        raise InputError("The table has no labels.")
    if folds < 2:
        raise InputError(f"folds must be at least 2, got {folds}.")
    labels = np.asarray(table.labels)
    classes = np.unique(labels)
    fold_of = _deal(labels, folds)
    probabilities = np.full((len(labels), len(classes)), np.nan)
    used = [fold for fold in range(folds) if (fold_of == fold).any()]
    with progress_bar("checking", len(used), show=verbose, unit="fold") as advance:
        for fold in used:
            out = fold_of == fold
            kept = np.flatnonzero(~out)
            model = clone(classifier).set_params(random_state=0)
            model.fit(table.features[kept], labels[kept], **_views_of(table, kept))
            probabilities[out] = model.predict_proba(table.features[np.flatnonzero(out)])
            advance(1)
    return HeldOut(table.ids, table.labels, classes, probabilities)


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return an interval of a proportion that is right for few trials too; NaN for none.

    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    if trials == 0:
        return math.nan, math.nan
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return (centre - half) / scale, (centre + half) / scale


def _deal(labels: NDArray[Any], folds: int) -> NDArray[np.int64]:
    """Deal the shots of each class into folds; -1 for the only shot of a class."""
    fold_of = np.full(len(labels), -1)
    for name in np.unique(labels):
        rows = np.flatnonzero(labels == name)
        if len(rows) > 1:
            fold_of[rows] = np.arange(len(rows)) % folds
    return fold_of


def _views_of(table: FeatureTable, kept: NDArray[np.int64]) -> dict[str, Any]:
    """Select the views of the kept images, with rows counted among them."""
    if table.views is None or table.view_of is None:
        return {}
    place = np.full(len(table), -1)
    place[kept] = np.arange(len(kept))
    rows = place[table.view_of]
    return {"views": table.views[np.flatnonzero(rows >= 0)], "view_of": rows[rows >= 0]}
