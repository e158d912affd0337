"""Open tasks: how well a method tells its classes from everything else.

A task of a protocol such as `10-way 5-shot, open` has two more kinds of queries: of other classes
of the same set, which look alike, and of other sets. A method is judged by its scores, of which a
larger one means "more likely unknown":

- `probability`: 1 minus the largest probability;
- `energy`: minus the log of the sum of the exponentials of the logits;
- `unknown`: the score of the decision rule (`mivhead.model.decision`).

Decisions and prediction sets are judged with their default thresholds, which no query has seen.
Methods that tune the backbone have probabilities only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.diagnostics.evaluation import Tradeoff
from mivhead.errors import InputError
from mivhead.model.decision import NONE, UNSURE, Thresholds, energy_of
from mivhead.model.prediction import Prediction, predictions

COVERAGE = 0.9
ACCEPTED = 0.8  # share of the known queries whose accuracy is reported
TPR = 0.95
OPEN_SET = "open-set.jsonl"  # results of `miv bench open-set` of version 0.2.0

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Separation:
    """How well one score separates known queries from unknown ones."""

    score: str  # name of the score
    # Area under the ROC curve: known queries against unknown classes of the same set, and against
    # images of other sets.
    auroc_same: float
    auroc_other: float
    fpr_same: float  # share of the unknown images that are accepted if 95 % of the known ones are
    fpr_other: float
    accuracy_80: float  # of the 80 % of the known queries with the smallest score


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
    # Share of the 90 % prediction sets that contain the true class, and their mean size; None if
    # the number of shots allows none.
    coverage: float | None = None
    size: float | None = None


def judge(
    classifier: Any, queries: Sequence[Any], labels: Sequence[int], background: Floats | None
) -> OpenResult:
    """Judge all scores and the decisions of a fitted method.

    Queries are of the classes (`labels`), of other classes and of other sets; `background` are
    vectors of background images (`mivhead.backbones.background`), as `miv fit` uses them.
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
    near, far = (Tradeoff(known, right, known, unknown, Thresholds()) for unknown in (same, other))
    return Separation(
        score,
        near.auroc,
        far.auroc,
        false_positives(near),
        false_positives(far),
        float(right[accepted].mean()),
    )


def false_positives(tradeoff: Tradeoff) -> float:
    """Return the share of unknown images that are accepted if a share TPR of known ones is."""
    known, unknown = tradeoff.roc()
    return float(1 - unknown[known <= 1 - TPR + 1e-9].max())


def _decisions(
    classifier: Any, probabilities: list[Floats], unknown: list[Floats], labels: NDArray[np.int64]
) -> dict[str, float | None]:
    """Judge decisions with their default thresholds, and 90 % sets if there can be any."""
    try:
        thresholds = classifier.decision_.thresholds(coverage=COVERAGE)
    except InputError:  # not enough shots, or a method without out-of-fold predictions
        thresholds = classifier.decision_.thresholds()
    decided = [
        list(predictions([""] * len(p), classifier.classes_, p, score, thresholds))
        for p, score in zip(probabilities, unknown, strict=True)
    ]
    known: list[tuple[Prediction, int]] = list(zip(decided[0], labels.tolist(), strict=True))
    named = [p.label != label for p, label in known if p.decision not in (NONE, UNSURE)]
    rejected = [float(np.mean([p.decision == NONE for p in part])) for part in decided]
    names = ("known_rejected", "same_rejected", "other_rejected")
    found: dict[str, float | None] = dict(zip(names, rejected, strict=True))
    found["named"] = len(named) / len(labels)
    found["named_wrong"] = float(np.mean(named)) if named else None
    if thresholds.set is not None:
        sets = [p.prediction_set or () for p, _ in known]
        found["coverage"] = float(np.mean([y in s for (_, y), s in zip(known, sets, strict=True)]))
        found["size"] = float(np.mean([len(s) for s in sets]))
    return found


def convert(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn the results of `miv bench open-set` of version 0.2.0 into results of open tasks.

    That version wrote a line per score, and named neither the backbone nor the time that anything
    took. Its scores of features without a head (`features`) are left out.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["method"] != "features":
            key = (line["set"], line["protocol"], line["method"], line["task"])
            groups.setdefault(key, []).append(line)
    measured = list(Separation.__dataclass_fields__)
    of_decisions = [name for name in OpenResult.__dataclass_fields__ if name != "scores"]
    return [
        {
            "backbone": "efficientnet_lite0",
            "set": name,
            "protocol": f"{protocol}, open",
            "method": method,
            "task": task,
            "ways": own[0]["ways"],
            "accuracy": own[0]["accuracy"],
            "calibration": own[0]["calibration"],
            "open": {
                "scores": [{each: line[each] for each in measured} for line in own],
                **{each: own[-1][each] for each in of_decisions},
            },
            "tasks": "0.2.0",
            **dict.fromkeys(("error", "gflops", "gflops_paper")),
            **dict.fromkeys(("shots", "views", "queries", "peak_bytes"), 0),
            **dict.fromkeys(("adapt_seconds", "infer_seconds", "backbone_seconds"), 0.0),
        }
        for (name, protocol, method, task), own in groups.items()
    ]
