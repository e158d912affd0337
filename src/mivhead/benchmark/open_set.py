"""The open-set protocol: how well methods tell their classes from everything else.

A task has known classes, with shots and queries as usual, and two kinds of unknown queries: images
of other classes of the same set, which look alike, and images of other sets. Every method is fitted
once per task and judged by its usual scores, of which a larger one means "more likely unknown":

- `probability`: 1 minus the largest probability;
- `energy`: minus the log of the sum of the exponentials of the logits;
- `unknown`: the score of the decision rule (`mivhead.model.decision`), for `miv` and `miv-paper`;
- `knn` and `mahalanobis`, of the method `features`: the distance of pooled features to the nearest
  shot, and to the nearest class mean under a shared covariance, which is shrunk.

Decisions and prediction sets are judged with their default thresholds, which no query has seen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.progress import progress_bar
from mivhead._util.schema import from_json
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.background import background_vectors
from mivhead.backbones.base import Backbone
from mivhead.benchmark.compare import calibration_error
from mivhead.benchmark.measuring import score as calibrate
from mivhead.datasets.catalogue import groups_of
from mivhead.datasets.sets import open_set
from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Died, Executor
from mivhead.executors.local import InlineExecutor
from mivhead.extraction.cache import FeatureCache, open_cache
from mivhead.extraction.pipeline import extract_table
from mivhead.features import Features
from mivhead.images.augmentation import NO_VIEWS, number_views, views_per_image
from mivhead.images.imageset import ImageSet
from mivhead.methods.base import pooled, unit
from mivhead.methods.registry import make_method
from mivhead.model.decision import NONE, UNSURE, energy_of, softmax
from mivhead.model.prediction import predictions

METHODS = ("miv", "miv-paper", "ncc", "logistic", "ridge", "knn")
LEFT = 2  # classes of a set that stay unknown, at least
MAX_QUERIES = 10  # per class
COVERAGE = 0.9
ACCEPTED = 0.8  # share of the known queries whose accuracy is reported
TPR = 0.95
SHRINK = 0.5  # of a covariance, towards its mean variance
RESULTS = "open-set.jsonl"

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class OpenSetTask:
    """Rows of images of one set, and images of other sets as pairs of set and row."""

    classes: tuple[str, ...]
    support: tuple[int, ...]
    support_labels: tuple[int, ...]
    queries: tuple[int, ...]
    query_labels: tuple[int, ...]
    same: tuple[int, ...]
    other: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class OpenSetResult:
    """One score of one method on one task.

    Parameters
    ----------
    set, protocol, method, score : str
        What was run, such as `birds`, `10-way 5-shot`, `miv` and `energy`.
    task, ways : int
        Number of the task, and of its classes.
    auroc_same, auroc_other : float
        Area under the ROC curve: known queries against unknown classes of the same set, and
        against images of other sets.
    fpr_same, fpr_other : float
        Share of the unknown images that are accepted if 95 % of the known ones are.
    accuracy, accuracy_80 : float
        Of all known queries, and of the 80 % with the smallest score.
    calibration : tuple
        Per bin of confidence: queries, sum of confidences, correct ones.
    coverage, size : float or None
        Share of the 90 % prediction sets that hold the true class, and their mean size; None if
        the method or the number of shots allows none. Only with the score `unknown`, like all
        that follows.
    known_rejected, same_rejected, other_rejected : float or None
        Share of the decisions that are "none of these".
    named, named_wrong : float or None
        Share of the known queries that get a name, and of wrong ones among these names.
    """

    set: str
    protocol: str
    method: str
    score: str
    task: int
    ways: int
    auroc_same: float
    auroc_other: float
    fpr_same: float
    fpr_other: float
    accuracy: float
    accuracy_80: float
    calibration: tuple[tuple[float, float, float], ...] = ()
    coverage: float | None = None
    size: float | None = None
    known_rejected: float | None = None
    same_rejected: float | None = None
    other_rejected: float | None = None
    named: float | None = None
    named_wrong: float | None = None


def sample_open_set(
    name: str, sets: Mapping[str, ImageSet], ways: int, shots: int, seed: int, number: int
) -> OpenSetTask:
    """Sample task `number` of a set; at least two of its classes stay unknown.

    It depends on the names of the sets, the protocol, the seed and the number only.
    """
    images = sets[name]
    labels = np.asarray(images.labels)
    key = json.dumps([seed, name, sorted(sets), ways, shots, number]).encode()
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()))
    groups = groups_of(name, images.classes)
    pools: dict[str, list[str]] = {}
    for each in images.classes:
        if (labels == each).sum() > shots:
            pools.setdefault(groups[each], []).append(each)
    large = [pool for pool in pools.values() if len(pool) >= LEFT + 2]
    if not large:
        raise InputError(
            f"{name} has too few classes with more than {shots} images for an open-set task: "
            f"{LEFT + 2} are needed."
        )
    sizes = np.asarray([min(len(pool), ways + LEFT) for pool in large])
    large = [pool for pool, size in zip(large, sizes, strict=True) if size == sizes.max()]
    shuffled = [str(each) for each in rng.permutation(large[rng.integers(len(large))])]
    known = shuffled[: min(ways, len(shuffled) - LEFT)]
    support, queries = [], []
    for each in known:
        rows = rng.permutation(np.flatnonzero(labels == each)).tolist()
        support.append(rows[:shots])
        queries.append(rows[shots : shots + MAX_QUERIES])
    count = sum(map(len, queries))
    unknown = np.flatnonzero(np.isin(labels, shuffled[len(known) :]))
    others = [each for each in sorted(sets) if each != name]
    foreign = [
        (set_, int(row))
        for set_ in others
        for row in rng.permutation(len(sets[set_]))[: -(-count // len(others))]
    ]
    return OpenSetTask(
        tuple(known),
        _flat(support),
        _labels(support),
        _flat(queries),
        _labels(queries),
        tuple(rng.permutation(unknown)[:count].tolist()),
        tuple(foreign),
    )


def _flat(rows: list[list[int]]) -> tuple[int, ...]:
    return tuple(row for each in rows for row in each)


def _labels(rows: list[list[int]]) -> tuple[int, ...]:
    return tuple(label for label, each in enumerate(rows) for _ in each)


def run_open_set(
    sets: Sequence[str],
    data: str | Path,
    output: str | Path,
    *,
    protocols: Sequence[tuple[int, int]] = ((10, 5), (5, 1)),
    methods: Sequence[str] = METHODS,
    tasks: int = 20,
    views: int = 4,
    seed: int = 0,
    backbone: str | Backbone = DEFAULT_BACKBONE,
    cache: FeatureCache | None = None,
    executor: Executor | None = None,
    verbose: bool = True,
) -> list[OpenSetResult]:
    """Run what is missing of the protocol and return all its results.

    Parameters
    ----------
    sets : sequence of str
        Names of data sets, at least two: images of the others are the foreign ones.
    data : str or Path
        The folder of the data sets.
    output : str or Path
        A folder, in which `open-set.jsonl` keeps every result as soon as it is there. The same
        call again resumes.
    protocols : sequence of (int, int)
        Ways and shots.
    methods : sequence of str
        Names of methods on features.
    tasks : int, default=20
        Tasks per set and protocol.
    views : int, default=4
        Maximum number of augmented views per image.
    seed : int, default=0
        Random seed.
    backbone : str or Backbone, default="efficientnet_lite0"
        What gives the features.
    cache : FeatureCache or None, default=None
        Where features are kept; None: the user's feature cache.
    executor : Executor or None, default=None
        Where tasks run; by default in this process. A backbone that is an object can only be used
        there.
    verbose : bool, default=True
        Show a progress bar.
    """
    if len(sets) < 2:
        raise InputError(f"The open-set protocol needs at least two data sets, got {len(sets)}.")
    path = Path(output) / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_open_set(path) if path.exists() else []
    done = {(r.set, r.protocol, r.task, r.method) for r in results}
    if executor is not None and not isinstance(backbone, str):
        raise InputError("A backbone of your own cannot be sent to workers: omit the executor.")
    where = _Where(tuple(sets), Path(data), backbone, cache)
    calls = [
        _TaskCall(where, name, ways, shots, number, tuple(missing), views, seed)
        for number in range(tasks)
        for ways, shots in protocols
        for name in sets
        if (
            missing := [
                method
                for method in (*methods, "features")
                if (name, f"{ways}-way {shots}-shot", number, method) not in done
            ]
        )
    ]
    with progress_bar("tasks", len(calls), show=verbose, unit="task") as advance:
        for call, found in (executor or InlineExecutor()).run(calls):
            if isinstance(found, Died):
                raise NotAvailableError(
                    f"A worker died on task {call.number} of {call.name}: {found.reason}; run the "  # type: ignore[attr-defined]  # returns what it was given
                    "same command again with fewer --workers."
                )
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(each)) + "\n" for each in found)
            results += found
            advance(1)
    return results


@dataclass(frozen=True)
class _Where:
    """Where the images and features of all tasks come from; every worker opens them itself."""

    sets: tuple[str, ...]
    data: Path
    backbone: str | Backbone
    cache: FeatureCache | None

    def open(self) -> tuple[Mapping[str, ImageSet], Backbone, FeatureCache | None]:
        """Open the sets, the backbone and the cache, once per process."""
        images = {name: _open_set(name, self.data) for name in self.sets}
        named = isinstance(self.backbone, str)
        backbone = _load(self.backbone) if named else self.backbone  # type: ignore[arg-type]
        return images, backbone, open_cache() if self.cache is None else self.cache  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _open_set(name: str, data: Path) -> ImageSet:
    return open_set(name, data)


@lru_cache(maxsize=1)
def _load(name: str) -> Backbone:
    return load_backbone(name)


@dataclass(frozen=True)
class _TaskCall:
    """Runs methods on one task when called."""

    where: _Where
    name: str
    ways: int
    shots: int
    number: int
    methods: tuple[str, ...]
    views: int
    seed: int

    def __call__(self) -> list[OpenSetResult]:
        images, backbone, cache = self.where.open()
        task = sample_open_set(self.name, images, self.ways, self.shots, self.seed, self.number)
        inputs = _read(task, self.name, images, backbone, cache, self.views, self.seed)
        protocol = f"{self.ways}-way {self.shots}-shot"
        return [
            result
            for method in self.methods
            for result in _run(inputs, method, self.name, protocol, self.number, backbone)
        ]


def read_open_set(path: str | Path) -> list[OpenSetResult]:
    """Read the results of a run; a line that a kill truncated is dropped."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return [from_json(OpenSetResult, json.loads(line), "a result") for line in lines]


@dataclass(frozen=True)
class _Inputs:
    """Features of a task."""

    support: Features
    labels: NDArray[np.int64]
    views: dict[str, Any]
    known: Features
    known_labels: NDArray[np.int64]
    same: Features
    other: Features


def _read(
    task: OpenSetTask,
    name: str,
    images: Mapping[str, ImageSet],
    backbone: Backbone,
    cache: FeatureCache | None,
    views: int,
    seed: int,
) -> _Inputs:
    def features(set_: str, rows: Iterable[int]) -> Features:
        chosen = images[set_].take(rows)
        return extract_table(backbone, chosen, NO_VIEWS, cache=cache, verbose=False).features

    shots = len(task.support) // len(task.classes)
    count = min(views, views_per_image(shots, backbone.preset.threshold, "few"))
    plan = number_views([count] * len(task.support), seed)
    chosen = images[name].take(task.support)
    table = extract_table(backbone, chosen, plan, cache=cache, verbose=False)
    by_set: dict[str, list[int]] = {}
    for set_, row in task.other:
        by_set.setdefault(set_, []).append(row)
    return _Inputs(
        table.features,
        np.asarray(task.support_labels),
        {} if table.views is None else {"views": table.views, "view_of": table.view_of},
        features(name, task.queries),
        np.asarray(task.query_labels),
        features(name, task.same),
        Features.concat([features(set_, rows) for set_, rows in by_set.items()]),
    )


def _run(
    inputs: _Inputs, method: str, name: str, protocol: str, number: int, backbone: Backbone
) -> list[OpenSetResult]:
    """Fit one method and judge all its scores."""
    parts = (inputs.known, inputs.same, inputs.other)
    ways = int(inputs.labels.max()) + 1
    blank = (name, protocol, method)
    if method == "features":
        scorers = _feature_scores(inputs)
        return [
            OpenSetResult(*blank, score, number, ways, *_judge([f(x) for x in parts]), 0.0, 0.0)
            for score, f in scorers.items()
        ]
    classifier = make_method(method, preset=_preset(method, backbone), random_state=number)
    views = inputs.views if method.startswith("miv") else {}
    classifier.fit(inputs.support, inputs.labels, **views)
    logits = [classifier.logits(x).astype(np.float64) for x in parts]
    p = softmax(logits[0])
    right = p.argmax(axis=1) == inputs.known_labels
    scores: dict[str, list[Floats]] = {
        "probability": [1 - softmax(each).max(axis=1) for each in logits],
        "energy": [-energy_of(each) for each in logits],
    }
    extra: dict[str, Any] = {}
    if method.startswith("miv"):
        vectors = background_vectors(backbone.identity)
        if vectors is not None:
            classifier.decision_ = classifier.decision_.with_background(vectors)
        scores["unknown"] = [classifier.score_unknown(x)[1] for x in parts]
        extra = _decisions(classifier, logits, scores["unknown"], inputs.known_labels)
    _, bins = calibrate(p, inputs.known_labels)
    return [
        OpenSetResult(
            *blank,
            score,
            number,
            ways,
            *_judge(values),
            float(right.mean()),
            float(right[np.argsort(values[0])[: round(ACCEPTED * len(right))]].mean()),
            bins,
            **(extra if score == "unknown" else {}),
        )
        for score, values in scores.items()
    ]


def _preset(method: str, backbone: Backbone) -> Any:
    return backbone.preset if method.startswith("miv") else None


def _judge(scores: list[Floats]) -> tuple[float, float, float, float]:
    """AUROC and FPR at 95 % TPR of known queries against the same set and against other sets."""
    known, same, other = scores
    return auroc(known, same), auroc(known, other), fpr(known, same), fpr(known, other)


def auroc(known: Floats, unknown: Floats) -> float:
    """Return the probability that an unknown image has the larger score.

    >>> auroc(np.array([1.0, 2.0]), np.array([2.0, 3.0]))
    0.875
    """
    from scipy.stats import rankdata

    n, m = len(known), len(unknown)
    ranks = rankdata(np.concatenate([known, unknown]))
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def fpr(known: Floats, unknown: Floats, tpr: float = TPR) -> float:
    """Return the share of unknown images that are accepted if a share `tpr` of known ones is.

    >>> fpr(np.arange(100.0), np.array([50.0, 94.0, 95.0, 200.0]))
    0.5
    """
    threshold = np.sort(known)[int(np.ceil(tpr * len(known))) - 1]
    return float((unknown <= threshold).mean())


def _decisions(
    classifier: Any, logits: list[Floats], unknown: list[Floats], labels: NDArray[np.int64]
) -> dict[str, Any]:
    """Judge decisions with their default thresholds, and 90 % sets if there can be any."""
    try:
        thresholds = classifier.decision_.thresholds(coverage=COVERAGE)
    except InputError:  # not enough shots, or a method without out-of-fold predictions
        thresholds = classifier.decision_.thresholds()
    names = classifier.classes_
    decided = [
        predictions([""] * len(each), names, softmax(each), score, thresholds)
        for each, score in zip(logits, unknown, strict=True)
    ]
    rejected = [float(np.mean([p.decision == NONE for p in each])) for each in decided]
    known = [p for p in decided[0] if p.decision not in (NONE, UNSURE)]
    truth = dict(zip(map(id, decided[0]), labels.tolist(), strict=True))
    wrong = [p.label != truth[id(p)] for p in known]
    found: dict[str, Any] = {
        "known_rejected": rejected[0],
        "same_rejected": rejected[1],
        "other_rejected": rejected[2],
        "named": len(known) / len(labels),
        "named_wrong": float(np.mean(wrong)) if wrong else None,
    }
    if thresholds.set is not None:
        sets = [p.prediction_set or () for p in decided[0]]
        held = [label in chosen for label, chosen in zip(labels.tolist(), sets, strict=True)]
        found |= {"coverage": float(np.mean(held)), "size": float(np.mean([len(s) for s in sets]))}
    return found


def _feature_scores(inputs: _Inputs) -> dict[str, Callable[[Features], Floats]]:
    """Scores of pooled features that need no head."""
    shots = pooled(inputs.support)
    units = unit(shots)
    x, labels = shots.astype(np.float64), inputs.labels
    means = np.stack([x[labels == c].mean(axis=0) for c in range(labels.max() + 1)])
    # One shot per class has no scatter within classes: that around the mean of all stands in.
    several = len(x) > len(means)
    centred = x - (means[labels] if several else x.mean(axis=0))
    covariance = centred.T @ centred / max(1, len(x) - (len(means) if several else 1))
    mean_variance = np.trace(covariance) / len(covariance)
    shrunk = (1 - SHRINK) * covariance + SHRINK * mean_variance * np.eye(len(covariance))
    root = np.linalg.cholesky(np.linalg.inv(shrunk))

    def knn(features: Features) -> Floats:
        distances: Floats = 1 - (unit(pooled(features)) @ units.T).max(axis=1)
        return distances

    def mahalanobis(features: Features) -> Floats:
        z = pooled(features).astype(np.float64) @ root
        distances: Floats = ((z[:, None] - (means @ root)[None]) ** 2).sum(axis=2)
        nearest: Floats = distances.min(axis=1)
        return nearest

    return {"knn": knn, "mahalanobis": mahalanobis}


FIELDS = (
    *("auroc_same", "auroc_other", "fpr_same", "fpr_other", "accuracy", "accuracy_80"),
    *("coverage", "size", "known_rejected", "same_rejected", "other_rejected"),
    *("named", "named_wrong"),
)


@dataclass(frozen=True)
class OpenSetSummary:
    """Means of a method's score over tasks, then over sets; None where nothing was measured."""

    protocol: str
    method: str
    score: str
    sets: int
    tasks: int
    means: dict[str, float | None]


def summarise(results: Sequence[OpenSetResult]) -> list[OpenSetSummary]:
    """Average over the tasks of each set, then over sets; the calibration error is per set."""
    groups: dict[tuple[str, str, str], dict[str, list[OpenSetResult]]] = {}
    for r in results:
        by_set = groups.setdefault((r.protocol, r.method, r.score), {})
        by_set.setdefault(r.set, []).append(r)
    found = []
    for (protocol, method, score), by_set in groups.items():
        means = {name: _mean(by_set, name) for name in FIELDS}
        errors = [calibration_error(r.calibration for r in own) for own in by_set.values()]
        known = [error for error in errors if not math.isnan(error)]
        means["calibration_error"] = float(np.mean(known)) if known else None
        if method == "features":
            means |= {"accuracy": None, "accuracy_80": None}
        tasks = sum(len(own) for own in by_set.values())
        found.append(OpenSetSummary(protocol, method, score, len(by_set), tasks, means))
    return sorted(found, key=lambda each: each.protocol)  # stable: methods in their order


def _mean(by_set: Mapping[str, Sequence[OpenSetResult]], name: str) -> float | None:
    values = [
        np.mean(own)
        for each in by_set.values()
        if (own := [v for r in each if (v := getattr(r, name)) is not None])
    ]
    return float(np.mean(values)) if values else None


_COLUMNS = {
    "auroc_same": "AUROC same set",
    "auroc_other": "AUROC other sets",
    "fpr_same": "FPR same set",
    "fpr_other": "FPR other sets",
    "accuracy": "accuracy",
    "accuracy_80": "accuracy at 80 %",
    "calibration_error": "calibration error",
}


def describe_open_set(results: Sequence[OpenSetResult]) -> str:
    """Return a report in Markdown: all methods and scores, then the decisions of `miv` per set.

    Parameters
    ----------
    results : sequence of OpenSetResult
        All results of a run.

    Returns
    -------
    str
        Two tables per protocol.
    """
    lines = ["# Open-set results"]
    for protocol in sorted({r.protocol for r in results}):
        own = [r for r in results if r.protocol == protocol]
        header = ["method", "score", "tasks", *_COLUMNS.values()]
        lines += ["", f"## {protocol}", "", *_row(header), "|---" * len(header) + "|"]
        for each in summarise(own):
            figures = [_figure(each.means[name]) for name in _COLUMNS]
            lines += _row([f"`{each.method}`", each.score, str(each.tasks), *figures])
        chosen = [r for r in own if r.method == "miv" and r.score == "unknown"]
        if not chosen:
            continue
        header = [
            *("set", "tasks", "AUROC same set / other sets", "accuracy", "calibration error"),
            *("known / same / other rejected", "named, of these wrong"),
            "coverage of 90 % sets, classes",
        ]
        lines += ["", "Per set, `miv`:", "", *_row(header), "|---" * len(header) + "|"]
        for name in sorted({r.set for r in chosen}):
            lines += _row(_decided(name, [r for r in chosen if r.set == name]))
        lines += _row(_decided("**mean**", chosen))
    return "\n".join(lines) + "\n"


def _decided(name: str, results: Sequence[OpenSetResult]) -> list[str]:
    """One row of the table of decisions."""
    (found,) = summarise(results)
    text = {key: _figure(value) for key, value in found.means.items()}
    return [
        name,
        str(found.tasks),
        f"{text['auroc_same']} / {text['auroc_other']}",
        text["accuracy"],
        text["calibration_error"],
        f"{text['known_rejected']} / {text['same_rejected']} / {text['other_rejected']}",
        f"{text['named']}, {text['named_wrong'] or 'none'}",
        f"{text['coverage']}, {text['size']}" if text["coverage"] else "not possible",
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _row(cells: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(cells)} |"]
