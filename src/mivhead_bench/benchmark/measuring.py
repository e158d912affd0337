"""Fits, times and scores methods on one task, in one thread."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from traceback import format_exc
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mivhead.backbones.base import Identity
from mivhead.backbones.efficientnet_lite import background_vectors
from mivhead.backbones.preset import Preset
from mivhead.errors import MivError
from mivhead.features import Features
from mivhead.images.augmentation import number_views
from mivhead_bench.benchmark.clock import Clock, Seconds
from mivhead_bench.benchmark.config import MethodConfig
from mivhead_bench.benchmark.inputs import Inputs, TaskFeatures, TaskKeys, ViewLimit, plain_features
from mivhead_bench.benchmark.memory import PROCESS, TUNING, PeakMemory, device_module
from mivhead_bench.benchmark.open_set import judge
from mivhead_bench.benchmark.results import Result
from mivhead_bench.benchmark.tasks import Task
from mivhead_bench.methods import make_method
from mivhead_bench.methods.cost import TaskSize, count
from mivhead_bench.methods.tuning.network import load_pixels, network_of

BINS = 15  # of confidence, equally wide
MEMORY = "memory"
NUMERICAL = "numerical"

_warm: set[tuple[str, str]] = set()  # backbones and methods that this process has run before


class Outcome(NamedTuple):
    """A result and, if the method failed for an unknown reason, the traceback."""

    result: Result
    traceback: str | None = None


@dataclass(frozen=True)
class TaskRun:
    """Runs methods on one task and returns their results, including failures, when called."""

    inputs: Inputs  # images, backbone and cache
    preset: Preset  # settings of the backbone
    identity: Identity  # which backbone it is
    task: Task
    seed: int  # random seed of the methods on this task
    # Keys of the features in the cache. A tuple of int: the views of each support image, to compute
    # the features for this task alone. None if the methods need images.
    keys: TaskKeys | tuple[int, ...] | None
    blank: Result  # a result that names the backbone, the data set, the protocol and the task
    # The methods, which need either features or images, and how many views each of them gets.
    methods: tuple[MethodConfig, ...]
    rules: tuple[ViewLimit, ...]
    flops: float | None  # multiply-adds of one pass of an image through the backbone, if known
    seconds: Seconds  # duration of that pass

    def __call__(self) -> list[Outcome]:
        """Run all methods, one after the other."""
        features: TaskFeatures | None = None
        outcomes = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "did not converge": the accuracy shows it
            for method, rule in zip(self.methods, self.rules, strict=True):
                views = rule.count(self.task)
                blank = self.failure(method, views)
                try:
                    if self.keys is None:
                        prepared = self._on_images(method, views)
                    else:
                        features = features or TaskFeatures(self.inputs, self.task, self.keys)
                        prepared = self._on_features(method, features, views)
                        spent, wall = self.seconds.times(len(self.task.support) + sum(views))
                        blank = replace(blank, backbone_seconds=spent, backbone_wall=wall)
                    outcomes.append(Outcome(self._measure(prepared, method, views, blank)))
                # A failed task must not end a run of a week: it is recorded and shown.
                except Exception as error:
                    failed = replace(blank, error=describe_failure(error))
                    if device := device_module(self.inputs.device):
                        device.empty_cache()  # what the failed method left in it
                    known = isinstance(error, MivError)  # its message says what to do
                    outcomes.append(Outcome(failed, None if known else format_exc()))
        return outcomes

    @property
    def needs_backbone(self) -> bool:
        """Whether the call loads the backbone, because no cache holds its features."""
        return not isinstance(self.keys, TaskKeys)

    def estimate_bytes(self, features: int, candidates: int) -> int:
        """Estimate the memory of the call from the bytes of one image."""
        views = int(np.max([rule.count(self.task) for rule in self.rules], axis=0).sum())
        images = len(self.task.images) + views
        if self.keys is None:
            return PROCESS + TUNING + 3 * self.preset.preprocessing.size**2 * images
        return PROCESS + features * images + candidates * (len(self.task.support) + views)

    def split(self) -> list[TaskRun]:
        """Return one call per method, to find the method that kills the worker."""
        return [
            replace(self, methods=(method,), rules=(rule,))
            for method, rule in zip(self.methods, self.rules, strict=True)
        ]

    def failure(self, method: MethodConfig, views: Sequence[int], error: str = "") -> Result:
        """Return the result of a method that failed."""
        return replace(self.blank, method=method.name, views=sum(views), error=error or None)

    def _on_features(
        self, method: MethodConfig, features: TaskFeatures, views: Sequence[int]
    ) -> _Prepared:
        def make(changes: dict[str, Any]) -> Any:
            return make_method(
                method.kind,
                preset=self.preset,
                recipe=method.recipe,
                random_state=self.seed,
                device=self.inputs.device,
                **method.params | changes,
            )

        extra = features.take_views(views)
        if method.facts.uses_unlabelled:
            extra["unlabelled"] = features.unlabelled if self.task.unlabelled else None
        queries = (features.queries, features.unknown, features.foreign)
        return _Prepared(make, features.support, queries, extra, lambda: features.queries[:1])

    def _on_images(self, method: MethodConfig, views: Sequence[int]) -> _Prepared:
        """Decode, resize and augment before the clock starts, as for frozen backbones."""
        images, backbone = self.inputs.open_images(), self.inputs.open_backbone()
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        size = self.preset.preprocessing.size
        shots, *queries = (
            images.take([rows[id_] for id_ in ids])
            for ids in (self.task.support, self.task.queries, self.task.unknown, self.task.foreign)
        )
        plan = number_views(views, self.inputs.seed)
        support, augmented = load_pixels(shots, size, plan)

        def make(changes: dict[str, Any]) -> Any:
            classifier = make_method(
                method.kind,
                random_state=self.seed,
                device=self.inputs.device,
                **method.params | changes,
            )
            return classifier.attach(network_of(backbone, method.kind))

        return _Prepared(
            make,
            support,
            tuple(load_pixels(part, size)[0] for part in queries if len(part)),
            {"views": augmented, "view_of": plan.view_of} if len(augmented) else {},
            lambda: plain_features(backbone),
        )

    def _measure(
        self, prepared: _Prepared, method: MethodConfig, views: Sequence[int], blank: Result
    ) -> Result:
        """Fit and score one method."""
        labels = list(self.task.support_labels)
        if (blank.backbone, method.name) not in _warm:
            _warm.add((blank.backbone, method.name))
            with suppress(Exception):  # a few images may be too few; only the task itself counts
                prepared.warm_up(labels, one_step(method))
        classifier = prepared.make({})
        memory, clock = PeakMemory(self.inputs.device), Clock(self.inputs.device)
        classifier.fit(prepared.support, labels, **prepared.views)
        adapted, peak = clock.lap(), memory.bytes()
        clock.lap()
        probabilities = classifier.predict_proba(prepared.queries[0])
        inferred = clock.lap()
        opened = None
        if self.task.unknown:
            vectors = background_vectors(self.identity)
            opened = judge(classifier, prepared.queries, self.task.query_labels, vectors)
        accuracy, calibration = score(probabilities, np.asarray(self.task.query_labels))
        size = TaskSize.from_labels(self.task.support_labels, views)
        cost = count(classifier, prepared.sample(), size, self.flops)
        return replace(
            blank,
            accuracy=accuracy,
            calibration=calibration,
            adapt_seconds=adapted.spent,
            infer_seconds=inferred.spent,
            adapt_wall=adapted.wall,
            infer_wall=inferred.wall,
            peak_bytes=peak,
            gflops_paper=cost.gflops_paper,
            gflops_authors=cost.gflops_authors,
            open=opened,
        )


@dataclass(frozen=True)
class _Prepared:
    """A method with the features or images of a task, ready to be timed."""

    make: Callable[[dict[str, Any]], Any]  # an unfitted classifier, from changed hyperparameters
    support: Any  # features, or pixels
    queries: tuple[Any, ...]  # and, in an open task, those of unknown classes and of other sets
    views: dict[str, Any]  # `views`, `view_of` and `unlabelled`, or nothing
    sample: Callable[[], Features]  # features of any image, for their shapes

    def warm_up(self, labels: Sequence[int], changes: dict[str, Any]) -> None:
        """Run the method on two images of each of two classes: one-time work is not timed."""
        numbers = np.asarray(labels)
        rows = [int(row) for label in (0, 1) for row in np.flatnonzero(numbers == label)[:2]]
        classifier = self.make(changes).fit(self.support[rows], [labels[row] for row in rows])
        classifier.predict_proba(self.queries[0][:2])


def one_step(method: MethodConfig) -> dict[str, Any]:
    """Return hyperparameters that shorten the training of a method, if it has any."""
    return {"steps": 1} if "steps" in method.facts.hyperparameters() else {}


def score(
    probabilities: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> tuple[float, tuple[tuple[float, float, float], ...]]:
    """Return the accuracy and, per bin of confidence: queries, sum of confidences, correct ones.

    >>> accuracy, bins = score(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    >>> accuracy, bins[13], bins[9]
    (0.5, (1.0, 0.9, 1.0), (1.0, 0.6, 0.0))
    """
    if not np.isfinite(probabilities).all():
        raise FloatingPointError("the probabilities are not finite")
    right = probabilities.argmax(axis=1) == labels  # (query)
    confidence = probabilities.max(axis=1)  # (query)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    sums = [np.bincount(bins, weights, BINS) for weights in (None, confidence, right)]
    calibration = tuple(tuple(map(float, row)) for row in zip(*sums, strict=True))
    return float(right.mean()), calibration  # type: ignore[return-value]  # three sums


_NO_MEMORY = re.compile("allocate memory|not enough memory|out of memory", re.IGNORECASE)
_NOT_FINITE = re.compile(r"\b(nan|infinity|not finite|singular)\b", re.IGNORECASE)


def describe_failure(error: Exception) -> str:
    """Describe an error in one line; `memory:` or `numerical:` comes first where it applies.

    >>> describe_failure(MemoryError()), describe_failure(KeyError("x"))
    ('memory: MemoryError', "KeyError: 'x'")
    >>> describe_failure(ValueError("Input contains NaN."))
    'numerical: Input contains NaN.'
    """
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(text)
    ):
        return f"{MEMORY}: {text or kind}"
    if isinstance(error, ArithmeticError | np.linalg.LinAlgError) or (
        isinstance(error, ValueError | RuntimeError) and _NOT_FINITE.search(text)
    ):
        return f"{NUMERICAL}: {text or kind}"
    return f"{kind}: {text}"
