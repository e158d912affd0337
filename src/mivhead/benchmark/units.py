"""The work itself: methods on one task, timed and measured, in one thread."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mivhead.benchmark.bank import Bank
from mivhead.benchmark.config import MethodConfig
from mivhead.benchmark.failures import NotFiniteError, describe_failure
from mivhead.benchmark.measuring import PeakMemory
from mivhead.benchmark.plan import ViewRule
from mivhead.benchmark.results import Result
from mivhead.benchmark.source import Source
from mivhead.benchmark.tasks import Task
from mivhead.features import Features
from mivhead.fewshot import FewShotClassifier
from mivhead.methods.registry import METHODS, make_method
from mivhead.preset import Preset

BINS = 15  # of confidence, equally wide
_warm: set[tuple[str, str]] = set()  # backbones and methods that this process has run before

Probabilities = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Keys:
    """Rows of a bank: of the support images, of the views of each, and of the queries."""

    support: tuple[str, ...]
    views: tuple[tuple[str, ...], ...]
    queries: tuple[str, ...]


@dataclass(frozen=True)
class TaskJob:
    """Runs methods on one task and returns their results, errors included.

    Parameters
    ----------
    source, preset
        The data set and the backbone, and its settings.
    bank, keys
        Where the features are; only read for methods on features.
    blank
        A result that names the backbone, the set, the protocol and the task.
    task
        The task.
    methods, rules
        The methods, and how many views each of them gets.
    seed
        Of the methods.
    """

    source: Source
    preset: Preset
    bank: Path
    keys: Keys
    blank: Result
    task: Task
    methods: tuple[MethodConfig, ...]
    rules: tuple[ViewRule, ...]
    seed: int

    def __call__(self) -> list[Result]:
        """Do it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "did not converge": the accuracy tells
            return self._run()

    def _run(self) -> list[Result]:
        shared: _Gathered | None = None
        results = []
        for method, rule in zip(self.methods, self.rules, strict=True):
            views = rule.count(self.task)
            blank = replace(self.blank, method=method.name, views=sum(views))
            try:
                trial: _Trial
                if method.needs_images:
                    trial = _ImageTrial(self, method)
                else:
                    shared = shared or _Gathered(self)
                    trial = _FeatureTrial(self, method, views, shared)
                    seconds = shared.seconds * (len(self.task.support) + sum(views))
                    blank = replace(blank, backbone_seconds=seconds)
                results.append(_measure(trial, self, method, blank))
            # One task that fails must not end a run of a week: it is recorded and shown.
            except Exception as error:
                results.append(replace(blank, error=describe_failure(error)))
        return results

    def split(self) -> list[TaskJob]:
        """One job per method: to find the one that kills the worker."""
        return [
            replace(self, methods=(method,), rules=(rule,))
            for method, rule in zip(self.methods, self.rules, strict=True)
        ]


class _Trial(Protocol):
    """A method that is about to be run on a task."""

    def warm_up(self) -> None: ...
    def fit(self) -> None: ...
    def predict(self) -> Probabilities: ...


def _measure(trial: _Trial, job: TaskJob, method: MethodConfig, blank: Result) -> Result:
    key = (blank.backbone, method.name)
    if key not in _warm:
        _warm.add(key)
        with suppress(Exception):  # a few images may be too few; only the task itself counts
            trial.warm_up()
    memory = PeakMemory()
    start = time.perf_counter()
    trial.fit()
    fitted = time.perf_counter()
    peak = memory.bytes()
    again = time.perf_counter()
    probabilities = trial.predict()
    end = time.perf_counter()
    accuracy, calibration = score(probabilities, np.asarray(job.task.query_labels))
    return replace(
        blank,
        accuracy=accuracy,
        calibration=calibration,
        adapt_seconds=fitted - start,
        infer_seconds=end - again,
        peak_bytes=peak,
    )


def score(
    probabilities: Probabilities, labels: NDArray[np.int64]
) -> tuple[float, tuple[tuple[float, float, float], ...]]:
    """Return the accuracy, and per bin of confidence: queries, sum of confidences, right ones.

    >>> accuracy, bins = score(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    >>> accuracy, bins[13], bins[8]
    (0.5, (1.0, 0.9, 1.0), (1.0, 0.6, 0.0))
    """
    if not np.isfinite(probabilities).all():
        raise NotFiniteError("the probabilities are not finite")
    right = probabilities.argmax(axis=1) == labels  # (query)
    confidence = probabilities.max(axis=1)  # (query)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    sums = [np.bincount(bins, weights, BINS) for weights in (None, confidence, right)]
    calibration = tuple(tuple(map(float, row)) for row in zip(*sums, strict=True))
    return float(right.mean()), calibration  # type: ignore[return-value]  # three sums


class _Gathered:
    """Features of a task, in memory: read once for all methods."""

    def __init__(self, job: TaskJob) -> None:
        bank, keys = _open_bank(job.bank), job.keys
        self.support = bank.take(keys.support)
        self.queries = bank.take(keys.queries)
        views = [key for own in keys.views for key in own]
        self.views = bank.take(views) if views else None
        # Where the views of each support image begin among all views.
        self.starts = np.cumsum([0, *map(len, keys.views)])
        self.seconds = bank.seconds

    def take_views(self, counts: Sequence[int]) -> tuple[Features, NDArray[np.int64]] | None:
        """Return the first views of each support image, and the image that each belongs to."""
        view_of = np.repeat(np.arange(len(counts)), counts)
        if self.views is None or not len(view_of):
            return None
        starts = self.starts[:-1]
        rows = [s + i for s, count in zip(starts, counts, strict=True) for i in range(count)]
        all_of_them = len(rows) == len(self.views)
        return (self.views if all_of_them else self.views[rows]), view_of


@lru_cache(maxsize=2)
def _open_bank(folder: Path) -> Bank:
    return Bank(folder)


class _FeatureTrial:
    """A method on features of the bank."""

    def __init__(
        self, job: TaskJob, method: MethodConfig, counts: Sequence[int], shared: _Gathered
    ) -> None:
        self._job, self._method, self._shared = job, method, shared
        self._labels = np.asarray(job.task.support_labels)
        self._views = shared.take_views(counts)
        self._classifier = self._make()

    def _make(self, **changes: Any) -> Any:
        return make_method(
            self._method.kind,
            preset=self._job.preset,
            recipe=self._method.recipe,
            random_state=self._job.seed,
            device=self._job.source.device,
            **self._method.params | changes,
        )

    def warm_up(self) -> None:
        rows = few_rows(self._labels)
        classifier = self._make(**one_step(self._method))
        classifier.fit(self._shared.support[rows], self._labels[rows])
        classifier.predict_proba(self._shared.queries[:2])

    def fit(self) -> None:
        views, view_of = self._views or (None, None)
        self._classifier.fit(self._shared.support, self._labels, views=views, view_of=view_of)

    def predict(self) -> Probabilities:
        probabilities: Probabilities = self._classifier.predict_proba(self._shared.queries)
        return probabilities


class _ImageTrial:
    """A method that tunes the backbone, on decoded images."""

    def __init__(self, job: TaskJob, method: MethodConfig) -> None:
        self._job, self._method = job, method
        images = job.source.open_images()
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        self._support = [images.load(rows[id_]) for id_ in job.task.support]
        self._queries = [images.load(rows[id_]) for id_ in job.task.queries]
        self._backbone = job.source.open_backbone()
        self._classifier = self._make()

    def _make(self, **changes: Any) -> FewShotClassifier:
        return FewShotClassifier(
            self._backbone,
            method=self._method.kind,
            method_params=self._method.params | changes,
            recipe=self._method.recipe or "paper",
            threshold=self._method.threshold,
            random_state=self._job.seed,
            device=self._job.source.device,
            cache=False,
            verbose=False,
        )

    def warm_up(self) -> None:
        labels = np.asarray(self._job.task.support_labels)
        rows = few_rows(labels)
        classifier = self._make(**one_step(self._method))
        classifier.fit([self._support[row] for row in rows], labels[rows].tolist())
        classifier.predict_proba(self._queries[:2])

    def fit(self) -> None:
        self._classifier.fit(self._support, list(self._job.task.support_labels))

    def predict(self) -> Probabilities:
        return self._classifier.predict_proba(self._queries)


def few_rows(labels: NDArray[np.int64]) -> list[int]:
    """Rows of two images of each of the first two classes.

    >>> few_rows(np.array([0, 0, 0, 1, 2, 2]))
    [0, 1, 3]
    """
    return [int(row) for label in (0, 1) for row in np.flatnonzero(labels == label)[:2]]


def one_step(method: MethodConfig) -> dict[str, int]:
    """Shorten the training of a method, where it can be."""
    return {"steps": 1} if "steps" in METHODS[method.kind].hyperparameters() else {}
