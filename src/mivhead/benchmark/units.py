"""The work itself: methods on one task, timed and measured, in one thread."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mivhead.benchmark.config import MethodConfig
from mivhead.benchmark.cost import count
from mivhead.benchmark.failures import NotFiniteError, describe_failure
from mivhead.benchmark.measuring import Clock, PeakMemory
from mivhead.benchmark.plan import ViewRule
from mivhead.benchmark.results import Result
from mivhead.benchmark.trials import (
    FeatureTrial,
    Gathered,
    Given,
    ImageTrial,
    Keys,
    Probabilities,
    Trial,
)
from mivhead.methods.cost import BackboneWork, TaskSize

BINS = 15  # of confidence, equally wide
_warm: set[tuple[str, str]] = set()  # backbones and methods that this process has run before


@dataclass(frozen=True)
class TaskJob:
    """Runs methods on one task and returns their results, errors included.

    Parameters
    ----------
    given
        What all methods are given.
    bank, keys
        Where the features are; only read for methods on features.
    blank
        A result that names the backbone, the set, the protocol and the task.
    methods, rules
        The methods, and how many views each of them gets.
    work
        Of one image's pass through the backbone, if known.
    """

    given: Given
    bank: Path
    keys: Keys
    blank: Result
    methods: tuple[MethodConfig, ...]
    rules: tuple[ViewRule, ...]
    work: BackboneWork | None

    def __call__(self) -> list[Result]:
        """Do it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "did not converge": the accuracy tells
            return self._run()

    def _run(self) -> list[Result]:
        shared: Gathered | None = None
        results = []
        for method, rule in zip(self.methods, self.rules, strict=True):
            views = rule.count(self.given.task)
            blank = replace(self.blank, method=method.name, views=sum(views))
            try:
                trial: Trial
                if method.needs_images:
                    trial = ImageTrial(self.given, method)
                else:
                    shared = shared or Gathered(self.bank, self.keys)
                    trial = FeatureTrial(self.given, method, views, shared)
                    seconds = shared.seconds * (len(self.given.task.support) + sum(views))
                    blank = replace(blank, backbone_seconds=seconds)
                results.append(_measure(trial, self, method, views, blank))
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


def _measure(
    trial: Trial, job: TaskJob, method: MethodConfig, views: Sequence[int], blank: Result
) -> Result:
    key = (blank.backbone, method.name)
    if key not in _warm:
        _warm.add(key)
        with suppress(Exception):  # a few images may be too few; only the task itself counts
            trial.warm_up()
    memory, clock = PeakMemory(), Clock(job.given.source.device)
    trial.fit()
    adapt_seconds, peak = clock.lap(), memory.bytes()
    clock.lap()
    probabilities = trial.predict()
    infer_seconds = clock.lap()
    accuracy, calibration = score(probabilities, np.asarray(job.given.task.query_labels))
    cost = count(
        method.kind,
        trial.sample(),
        TaskSize.from_labels(job.given.task.support_labels, views),
        job.work,
        preset=job.given.preset,
        recipe=method.recipe,
        params=method.params,
        iterations=trial.iterations,
    )
    return replace(
        blank,
        accuracy=accuracy,
        calibration=calibration,
        adapt_seconds=adapt_seconds,
        infer_seconds=infer_seconds,
        peak_bytes=peak,
        gflops=cost.gflops,
        gflops_paper=cost.gflops_paper,
    )


def score(
    probabilities: Probabilities, labels: NDArray[np.int64]
) -> tuple[float, tuple[tuple[float, float, float], ...]]:
    """Return the accuracy, and per bin of confidence: queries, sum of confidences, right ones.

    >>> accuracy, bins = score(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    >>> accuracy, bins[13], bins[9]
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
