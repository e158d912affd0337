"""Open tasks: how well a method tells its classes from everything else.

A task of a protocol such as `10-way 5-shot, open` has two more kinds of queries: of other classes
of the same set, which look alike, and of other sets. A method is judged by its scores, of which a
larger one means "more likely unknown":

- `probability`: 1 minus the largest probability;
- `energy`: minus the log of the sum of the exponentials of the logits;
- `unknown`: the score of the decision rule (`mivhead.decision`).

Decisions are judged with their default thresholds, which no query has seen.
Methods that tune the backbone have probabilities only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from mivhead.decision import NONE, UNSURE, energy_of
from mivhead.prediction import Prediction, predictions

ACCEPTED = 0.8  # share of the known queries whose accuracy is reported
TPR = 0.95

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Separation:
    """How well one score separates known queries from unknown ones."""

    score: str  # name of the score
    # Area under the ROC curve: known queries against unknown classes of the same set, and against
    # images of other sets.
    auroc_same: float
    auroc_other: float
    fpr_same: float  # share of the unknown images that are accepted if 95% of the known ones are
    fpr_other: float
    accuracy_80: float  # of the 80% of the known queries with the smallest score


@dataclass(frozen=True)
class OpenResult:
    """What one method made of the unknown queries of one task."""

    scores: tuple[Separation, ...]  # one per score
    # Share of the decisions that are "none of these"; None for a method without decisions.
    known_rejected: float | None = None
    same_rejected: float | None = None
    other_rejected: float | None = None
    # Share of the known queries that get a name, and of wrong ones among these names.
    named: float | None = None
    named_wrong: float | None = None


def judge(
    classifier: Any, queries: Sequence[Any], labels: Sequence[int], background: Floats | None
) -> OpenResult:
    """Judge all scores and the decisions of a fitted method.

    Queries are of the classes (`labels`), of other classes and of other sets; `background` are
    vectors of background images (`mivhead.backbones.efficientnet_lite`), as `miv fit` uses them.
    """
    truth = np.asarray(labels)
    probabilities = [classifier.predict_proba(x) for x in queries]
    right = probabilities[0].argmax(axis=1) == truth
    scores = {"probability": [1 - p.max(axis=1) for p in probabilities]}
    decided: dict[str, float | None] = {}
    if hasattr(classifier, "score_unknown"):
        if background is not None:
            classifier.decision_ = classifier.decision_.with_background(background)
        scores["energy"] = [-energy_of(classifier.logits(x).astype(np.float64)) for x in queries]
        scores["unknown"] = [classifier.score_unknown(x)[1] for x in queries]
        decided = _decisions(classifier, probabilities, scores["unknown"], truth)
    return OpenResult(
        tuple(separate(score, values, right) for score, values in scores.items()), **decided
    )


def separate(score: str, values: Sequence[Floats], right: NDArray[np.bool_]) -> Separation:
    """Measure one score, by its values for known queries, the same set and other sets."""
    known, same, other = values
    accepted = np.argsort(known)[: round(ACCEPTED * len(known))]
    return Separation(
        score,
        _auroc(known, same),
        _auroc(known, other),
        false_positives(known, same),
        false_positives(known, other),
        float(right[accepted].mean()),
    )


def _auroc(known: Floats, unknown: Floats) -> float:
    return float(roc_auc_score(*_against(known, unknown)))


def _against(known: Floats, unknown: Floats) -> tuple[Floats, Floats]:
    """Return which scores are of unknown images, and the scores."""
    return np.repeat([0.0, 1.0], [len(known), len(unknown)]), np.concatenate([known, unknown])


def false_positives(known: Floats, unknown: Floats) -> float:
    """Return the share of unknown images that are accepted if a share TPR of known ones is."""
    known_rejected, unknown_rejected, _ = roc_curve(*_against(known, unknown))
    return float(1 - unknown_rejected[known_rejected <= 1 - TPR + 1e-9].max())


def _decisions(
    classifier: Any, probabilities: list[Floats], unknown: list[Floats], labels: NDArray[np.int64]
) -> dict[str, float | None]:
    """Judge decisions with their default thresholds."""
    thresholds = classifier.decision_.calibration.thresholds()
    decided = [
        list(predictions([""] * len(p), classifier.classes_, p, score, thresholds))
        for p, score in zip(probabilities, unknown, strict=True)
    ]
    known: list[tuple[Prediction, int]] = list(zip(decided[0], labels.tolist(), strict=True))
    named = [p.label != label for p, label in known if p.decision not in (NONE, UNSURE)]
    rejected = [float(np.mean([p.decision == NONE for p in part])) for part in decided]
    names = ("known_rejected", "same_rejected", "other_rejected")
    shares: dict[str, float | None] = dict(zip(names, rejected, strict=True))
    shares["named"] = len(named) / len(labels)
    shares["named_wrong"] = float(np.mean(named)) if named else None
    return shares
