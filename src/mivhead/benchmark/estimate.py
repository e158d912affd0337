"""What a run would take, without running it: images, tasks, disk space and hours.

The tasks are those of the run, or, of a set that is missing, tasks of a set with the declared
number of classes; what passes the backbone is counted. Each method is timed on one small task, and
its time for others follows from their operations (`mivhead.benchmark.gflops`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, default_device
from mivhead.benchmark.clock import Clock
from mivhead.benchmark.config import BackboneConfig, MethodConfig, RunConfig, sets_of
from mivhead.benchmark.gflops import count, measure_backbone
from mivhead.benchmark.inputs import ViewLimit, count_views, load_once, plain_features
from mivhead.benchmark.memory import PROCESS, candidate_bytes, feature_bytes
from mivhead.benchmark.runner import view_rule
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.benchmark.tasks import Task
from mivhead.datasets.catalogue import find_declared, paper_size
from mivhead.datasets.sets import find_sets, open_set
from mivhead.errors import MivError
from mivhead.executors.local import one_thread
from mivhead.extraction.cache import entry_size
from mivhead.features import Features
from mivhead.head.blocks import resolve_blocks
from mivhead.images.imageset import ImageSet, ImageSource
from mivhead.methods.cost import BackboneWork, TaskSize
from mivhead.methods.registry import make_method
from mivhead.model.readers import network_of

SIZED = 20  # tasks per set whose operations are counted
STEPS = 2  # of the task that is timed
NOMINAL_IMAGES = 60  # per class of a set that is missing
RANDOM = "random"


@dataclass(frozen=True)
class BackbonePlan:
    """One backbone: what it takes per image, and what is missing of it."""

    name: str  # its name in the run
    # Why its weights cannot be loaded; None if they can. It was then measured with random ones.
    missing: str | None
    seconds: float  # processor time of one image
    bytes: int  # size of the features of one image on the disk


@dataclass(frozen=True)
class SetPlan:
    """One data set: whether it is there, its size, and a remark."""

    name: str
    found: bool
    classes: int
    images: int
    remark: str = ""


@dataclass(frozen=True)
class ColumnPlan:
    """One method on one backbone: seconds per task, and hours of one core; None if unknown."""

    method: str
    backbone: str
    seconds: float | None
    hours: float | None


@dataclass(frozen=True)
class Plan:
    """What a run would take."""

    backbones: tuple[BackbonePlan, ...]  # its parts
    sets: tuple[SetPlan, ...]
    columns: tuple[ColumnPlan, ...]
    tasks: int  # number of tasks, over all sets and protocols
    passes: int  # images and views that pass a backbone, over all backbones
    bytes: int  # size of their features, if they are kept
    extraction_hours: float  # hours of one core for those passes
    # Size of the features of one backbone on one set, at most: what the cache has to hold.
    largest: int = 0
    task_passes: int = 0  # the same numbers if features are computed for each task and dropped
    task_hours: float = 0.0
    memory: int = 0  # bytes that the largest task needs, about

    @property
    def hours(self) -> float:
        """Hours of one core, without methods whose cost is unknown."""
        return self.extraction_hours + sum(column.hours or 0.0 for column in self.columns)


def estimate(
    config: RunConfig, data: Path | None, device: str | None = None, *, full: bool = False
) -> Plan:
    """Estimate what a run would take, on the sets it names or those in the data folder.

    With `full` the paper's sets that are missing count too, as if they were there.
    """
    sets = tuple(_plan_sets(config, data, full))
    counted = [each for each in sets if each.found or full]
    images = {each.name: _open(each, data) for each in counted}
    tasks = {each.name: _sample(each.name, images, config) for each in counted}
    backbones, columns, total = [], [], _Passes()
    for entry in config.backbones:
        measured = _Measured.load(entry, str(default_device(device)))
        backbones.append(measured.plan)
        methods = config.methods_on(entry.name)

        def rule(method: MethodConfig, name: str, own: _Measured = measured) -> ViewLimit:
            lowered = config.threshold(own.plan.name, name)
            return view_rule(method, own.backbone.preset, config.views, lowered)

        for method in methods:
            by_set = [(rule(method, name), found) for name, found in tasks.items() if found]
            columns.append(_column(measured, method, by_set))
        for name, found in tasks.items():
            rules = [rule(method, name) for method in methods if not method.needs_images]
            if rules and found:
                total.add(measured, found, rules)
    number = sum(map(len, tasks.values()))
    return Plan(tuple(backbones), sets, tuple(columns), number, **vars(total))


@dataclass
class _Passes:
    """What passes the backbones, summed over backbones and sets; fields as in `Plan`."""

    passes: int = 0
    bytes: int = 0
    extraction_hours: float = 0.0
    largest: int = 0
    task_passes: int = 0
    task_hours: float = 0.0
    memory: int = 0

    def add(self, measured: _Measured, tasks: Sequence[Task], rules: Sequence[ViewLimit]) -> None:
        """Add one backbone on one set."""
        needed = count_views(tasks, rules)
        once = len(needed) + sum(needed.values())
        views = [max(sum(rule.count(task)) for rule in rules) for task in tasks]
        drawn = [len(task.images) + more for task, more in zip(tasks, views, strict=True)]
        trained = [len(task.support) + more for task, more in zip(tasks, views, strict=True)]
        each, hour = measured.plan.bytes, measured.plan.seconds / 3600
        self.passes += once
        self.bytes += once * each
        self.largest = max(self.largest, once * each)
        self.extraction_hours += once * hour
        self.task_passes += sum(drawn)
        self.task_hours += sum(drawn) * hour
        blocks = resolve_blocks(measured.features, measured.backbone.preset)
        need = PROCESS + feature_bytes(measured.features) * max(drawn)
        self.memory = max(self.memory, need + candidate_bytes(blocks) * max(trained))


def _plan_sets(config: RunConfig, data: Path | None, full: bool) -> Iterator[SetPlan]:
    there = list(find_sets(data)) if data is not None else []
    of_paper = set(sets_of(config.benchmark))
    declared = {name: info.name for name in there if (info := find_declared(name)) is not None}
    usual = [n for n in there if config.benchmark is None or declared.get(n) in of_paper]
    wanted = list(config.sets or usual)
    if full:
        known = {info.name for name in wanted if (info := find_declared(name)) is not None}
        wanted += [name for name in sets_of(config.benchmark) if name not in known]
    for name in wanted:
        info = find_declared(name)
        if data is not None and name in there:
            images = open_set(name, data)
            side, size = max(images.load(0).size), paper_size(name)
            remark = ""
            if size not in (None, side):
                remark = (
                    f"{side} px; resized to {size} px first, as in the paper"
                    if config.paper_sizes
                    else f"{side} px; the paper's have {size} (--paper-sizes)"
                )
            yield SetPlan(name, True, len(images.classes), len(images), remark)
        else:
            classes = info.classes if info is not None else 0
            remark = (
                f"missing: `miv data list {name}` explains how to get it" if info else "missing"
            )
            yield SetPlan(name, False, classes, classes * NOMINAL_IMAGES, remark)


def _open(each: SetPlan, data: Path | None) -> ImageSet:
    """Open a set, or make one that has as many classes, for the sampler."""
    if each.found and data is not None:
        return open_set(each.name, data)
    labels = [f"set.{c}" for c in range(each.classes) for _ in range(NOMINAL_IMAGES)]
    sources = (ImageSource(f"{label}/{i}", lambda: b"", "") for i, label in enumerate(labels))
    return ImageSet(tuple(sources), tuple(labels))


def _sample(name: str, images: dict[str, ImageSet], config: RunConfig) -> list[Task]:
    """Sample the tasks of a set under all protocols."""
    others = {other: each for other, each in images.items() if other != name}
    found = [
        sample_tasks(
            images[name], name, Protocol.parse(p), config.seed, config.tasks, others=others
        )
        for p in config.protocols
    ]
    return [task for each in found if not isinstance(each, LeftOut) for task in each.tasks]


def _column(
    measured: _Measured, method: MethodConfig, by_set: Sequence[tuple[ViewLimit, list[Task]]]
) -> ColumnPlan:
    """Estimate the seconds of a method per task, over all sets, and its hours."""
    name, backbone = method.name, measured.plan.name
    try:
        timed = measured.time(method) if by_set else None
    except MivError:  # it does not run on this backbone
        timed = None
    if timed is None:
        return ColumnPlan(name, backbone, None, None)
    means, hours = [], 0.0
    for rule, tasks in by_set:
        sizes = [TaskSize.from_labels(t.support_labels, rule.count(t)) for t in tasks[:SIZED]]
        means.append(float(np.mean([timed.scale(size) for size in sizes])))
        hours += len(tasks) * means[-1] / 3600
    return ColumnPlan(name, backbone, float(np.mean(means)), hours)


@dataclass(frozen=True)
class _Timed:
    """A method that was timed on one task."""

    measured: _Measured
    method: MethodConfig
    seconds: float
    size: TaskSize
    params: dict[str, Any]

    def scale(self, size: TaskSize) -> float:
        """Estimate the seconds of a task: by its operations, or by its images if unknown."""
        there, here = self._gflops(size, {}), self._gflops(self.size, self.params)
        known = there is not None and here
        ratio = there / here if known else size.images / self.size.images  # type: ignore[operator]
        return self.seconds * ratio

    def _gflops(self, size: TaskSize, changes: dict[str, Any]) -> float | None:
        method, measured = self.method, self.measured
        return count(
            method.kind,
            measured.features,
            size,
            measured.flops if method.needs_images else None,
            preset=measured.backbone.preset,
            recipe=method.recipe,
            params=method.params | changes,
        ).gflops


@dataclass(frozen=True)
class _Measured:
    """A backbone and the speed of this machine with it."""

    backbone: Backbone
    plan: BackbonePlan
    flops: BackboneWork | None
    features: Features  # of one image
    device: str

    @classmethod
    def load(cls, entry: BackboneConfig, device: str) -> _Measured:
        """Load and measure a backbone, with random weights if it has no others here."""
        missing = None
        try:
            backbone = load_once(entry, device)
        except MivError as error:
            missing = str(error)
            # Untrained networks may give values that are too large for float16.
            backbone = load_backbone(
                entry.source,
                weights=RANDOM,
                image_size=entry.image_size,
                device=device,
                dtype="float32",
            )
        with one_thread():
            features = plain_features(backbone)  # also warms up
            clock = Clock(device)
            plain_features(backbone)
            seconds = clock.lap().spent
        size = entry_size({name: t[0] for name, t in features.tensors.items()})
        plan = BackbonePlan(entry.name, missing, seconds, size)
        return cls(backbone, plan, measure_backbone(backbone), features, device)

    def time(self, method: MethodConfig) -> _Timed:
        """Time a method on two classes of noise, for a few steps."""
        shots = 2 if method.needs_images else 5
        params = {"steps": STEPS} if "steps" in method.facts.hyperparameters() else {}
        rng, labels = np.random.default_rng(0), np.repeat([0, 1], shots)
        side = self.backbone.preset.preprocessing.size
        noise: Any = rng.integers(0, 256, (len(labels), side, side, 3), np.uint8)
        if not method.needs_images:
            shapes = {name: t.shape[1:] for name, t in self.features.tensors.items()}
            noise = Features.from_tensors(
                {name: rng.random((len(labels), *s), np.float32) for name, s in shapes.items()}
            )
        seconds = 0.0
        with one_thread():
            for _ in range(2):  # the first warms up
                made = make_method(
                    method.kind,
                    preset=self.backbone.preset,
                    recipe=method.recipe,
                    random_state=0,
                    device=self.device,
                    **method.params | params,
                )
                if method.needs_images:
                    made.verbose = False
                    made.attach(network_of(self.backbone, method.kind))
                clock = Clock(self.device)
                made.fit(noise, labels)
                seconds = clock.lap().spent
        return _Timed(self, method, seconds, TaskSize((shots, shots), (0, 0)), params)
