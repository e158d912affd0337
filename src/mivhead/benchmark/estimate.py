"""What a run would take, without running it: images, tasks, disk space and hours.

The sizes of tasks come from the sampler: of the sets that are there, or of sets of the declared
number of classes. Their cost in operations is counted (`mivhead.benchmark.gflops`), and the speed
of this machine is measured for a few seconds: one pass of each backbone, one short training of a
head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, default_device
from mivhead.benchmark.clock import Clock
from mivhead.benchmark.config import BackboneConfig, MethodConfig, RunConfig, sets_of
from mivhead.benchmark.gflops import count, measure_backbone
from mivhead.benchmark.inputs import Inputs, ViewLimit, plain_features
from mivhead.benchmark.memory import PROCESS, candidate_bytes, feature_bytes
from mivhead.benchmark.runner import view_rule
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.datasets.catalogue import find_declared, paper_size
from mivhead.datasets.sets import find_sets, open_set
from mivhead.errors import MivError
from mivhead.executors.local import one_thread
from mivhead.extraction.cache import entry_size
from mivhead.features import Features
from mivhead.head.blocks import BlockConfig, resolve_blocks
from mivhead.images.augmentation import views_per_image
from mivhead.methods.cost import BackboneWork, TaskSize
from mivhead.methods.registry import make_method

SAMPLED = 20  # tasks per set whose sizes are looked at
NOMINAL_IMAGES = 60  # per class of a set that is not there
RANDOM = "random"


@dataclass(frozen=True)
class BackbonePlan:
    """One backbone: what it takes per image, and what is missing of it.

    Parameters
    ----------
    name : str
        Its name in the run.
    missing : str or None
        Why its weights cannot be loaded; None if they can. It was then measured with random ones.
    seconds : float
        Processor time of one image.
    bytes : int
        Size of the features of one image on the disk.
    """

    name: str
    missing: str | None
    seconds: float
    bytes: int


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
    """What a run would take.

    Parameters
    ----------
    backbones, sets, columns : tuple
        Its parts.
    tasks : int
        Number of tasks, over all sets and protocols.
    passes : int
        Images and views that pass a backbone, over all backbones.
    bytes : int
        Size of their features, if they are kept.
    extraction_hours : float
        Hours of one core for those passes.
    largest : int
        Size of the features of one backbone on one set, at most: what the cache has to hold.
    task_passes, task_hours
        The same numbers if features are computed for each task and dropped.
    memory : int
        Bytes that the largest task needs, about.
    """

    backbones: tuple[BackbonePlan, ...]
    sets: tuple[SetPlan, ...]
    columns: tuple[ColumnPlan, ...]
    tasks: int
    passes: int
    bytes: int
    extraction_hours: float
    largest: int = 0
    task_passes: int = 0
    task_hours: float = 0.0
    memory: int = 0

    @property
    def hours(self) -> float:
        """Hours of one core, without methods whose cost is unknown."""
        return self.extraction_hours + sum(column.hours or 0.0 for column in self.columns)


@dataclass(frozen=True)
class _TaskShape:
    """What matters of a task: shots by class, and the number of queries."""

    shots: tuple[int, ...]
    queries: int

    def size(self, rule: ViewLimit) -> TaskSize:
        """Return the size of the task with its views."""
        return TaskSize(self.shots, tuple(s * self._views(s, rule) for s in self.shots))

    @staticmethod
    def _views(shots: int, rule: ViewLimit) -> int:
        return min(rule.limit, views_per_image(shots, rule.threshold, rule.rule))

    def most_views(self, rule: ViewLimit) -> int:
        """Return the largest number of views of an image."""
        return max(self._views(s, rule) for s in self.shots)

    @property
    def drawn(self) -> int:
        """Number of images that the task needs."""
        return sum(self.shots) + self.queries


def estimate(
    config: RunConfig, data: Path | None, device: str | None = None, *, full: bool = False
) -> Plan:
    """Estimate what a run would take.

    Parameters
    ----------
    config : RunConfig
        The run. Without sets: those in the data folder.
    data : Path or None
        Folder of the data sets; None if there is none.
    device : str, optional
        Where it would run.
    full : bool, default=False
        Whether to count the paper's sets that are not there too, as if they were.

    Returns
    -------
    Plan
    """
    sets = tuple(_plan_sets(config, data, full))
    counted = [each for each in sets if each.found or full]
    shapes = {
        (each.name, protocol): list(_shapes(each, protocol, config, data))
        for each in counted
        for protocol in config.protocols
    }
    backbones, columns, total = [], [], _Passes()
    for entry in config.backbones:
        measured = _Measured.load(entry, device)
        backbones.append(measured.plan)
        methods = config.methods_on(entry.name)
        rules = {
            (method.name, each.name): view_rule(
                method,
                measured.backbone.preset,
                config.views,
                config.threshold(entry.name, each.name),
            )
            for method in methods
            for each in counted
        }
        columns += [
            _column(
                measured,
                method,
                [(rules[method.name, name], found) for (name, _), found in shapes.items()],
                config.tasks,
            )
            for method in methods
        ]
        for each in counted:
            on_features = [rules[m.name, each.name] for m in methods if not m.needs_images]
            own = [s for p in config.protocols for s in shapes[each.name, p]]
            if on_features and own:
                tasks = config.tasks * len(config.protocols)
                total.add(measured, each.images, own, on_features, tasks)
    tasks = config.tasks * sum(bool(found) for found in shapes.values())
    return Plan(tuple(backbones), sets, tuple(columns), tasks, **vars(total))


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

    def add(
        self,
        measured: _Measured,
        images: int,
        shapes: Sequence[_TaskShape],
        rules: Sequence[ViewLimit],
        tasks: int,
    ) -> None:
        """Add one backbone on one set."""
        once = _count_passes(images, shapes, rules, tasks)
        views = [max(sum(shape.size(rule).views) for rule in rules) for shape in shapes]
        drawn = [shape.drawn + more for shape, more in zip(shapes, views, strict=True)]
        every = round(tasks * float(np.mean(drawn)))
        each, hour = measured.plan.bytes, measured.plan.seconds / 3600
        self.passes += once
        self.bytes += once * each
        self.largest = max(self.largest, once * each)
        self.extraction_hours += once * hour
        self.task_passes += every
        self.task_hours += every * hour
        trained = [sum(s.shots) + more for s, more in zip(shapes, views, strict=True)]
        need = PROCESS + feature_bytes(measured.features) * max(drawn)
        need += candidate_bytes(measured.blocks) * max(trained)
        self.memory = max(self.memory, need)


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


def _shapes(
    each: SetPlan, protocol: str, config: RunConfig, data: Path | None
) -> Iterator[_TaskShape]:
    """Sample the sizes of some tasks of a set."""
    rules = Protocol.parse(protocol)
    number = min(config.tasks, SAMPLED)
    if each.found and data is not None:
        found = sample_tasks(open_set(each.name, data), each.name, rules, config.seed, number)
        if not isinstance(found, LeftOut):
            for task in found.tasks:
                shots = Counter(task.support_labels)
                yield _TaskShape(tuple(shots[c] for c in sorted(shots)), len(task.queries))
        return
    rng = np.random.default_rng(config.seed)
    for _ in range(number):
        sizes = np.full(rules.sample_ways(rng, each.classes), NOMINAL_IMAGES)
        queries = len(sizes) * rules.queries_per_class(sizes)
        yield _TaskShape(tuple(rules.sample_shots(rng, sizes).tolist()), queries)


def _count_passes(
    images: int, shapes: Sequence[_TaskShape], rules: Sequence[ViewLimit], tasks: int
) -> int:
    """Estimate how many images and views of a set pass the backbone, each of them once."""
    if not shapes:
        return 0
    views = 0.0
    for rule in rules:
        most = max(shape.most_views(rule) for shape in shapes)
        needed = float(np.mean([sum(shape.size(rule).views) for shape in shapes]))
        views = max(views, _distinct(images * most, needed, tasks))
    drawn = float(np.mean([shape.drawn for shape in shapes]))
    return round(_distinct(images, drawn, tasks) + views)


def _distinct(images: int, drawn: float, tasks: int) -> float:
    """Return the expected number of different images in tasks that each draw some of them.

    >>> round(_distinct(1000, 10, 1)), round(_distinct(1000, 100, 1000))
    (10, 1000)
    """
    share = min(1.0, drawn / max(1, images))
    return float(images * (1 - (1 - share) ** tasks))


def _column(
    measured: _Measured,
    method: MethodConfig,
    shapes: Sequence[tuple[ViewLimit, Sequence[_TaskShape]]],
    tasks: int,
) -> ColumnPlan:
    """Average the seconds of a method over the sampled tasks of every set and its rule."""
    name, backbone = method.name, measured.plan.name
    means = []
    for rule, of_set in shapes:
        if not of_set:
            continue
        spent = [measured.seconds(method, shape.size(rule)) for shape in of_set]
        known = [seconds for seconds in spent if seconds is not None]
        if len(known) < len(spent):
            return ColumnPlan(name, backbone, None, None)
        means.append(float(np.mean(known)))
    if not means:
        return ColumnPlan(name, backbone, None, None)
    return ColumnPlan(name, backbone, float(np.mean(means)), tasks * sum(means) / 3600)


@dataclass(frozen=True)
class _Measured:
    """A backbone and the speed of this machine with it."""

    backbone: Backbone
    plan: BackbonePlan
    flops: BackboneWork | None
    features: Features  # of one image
    device: str | None = None

    @property
    def blocks(self) -> Sequence[BlockConfig]:
        """The blocks as the head sees them."""
        return resolve_blocks(self.features, self.backbone.preset)

    @classmethod
    def load(cls, entry: BackboneConfig, device: str | None) -> _Measured:
        """Load and measure a backbone, with random weights if it has no others here."""
        missing = None
        try:
            backbone = _open(entry, device)
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

    def seconds(self, method: MethodConfig, size: TaskSize) -> float | None:
        """Estimate the seconds of an adaptation; None for a method that does not count its work."""
        cost = count(
            method.kind,
            self.features,
            size,
            self.flops if method.needs_images else None,
            preset=self.backbone.preset,
            recipe=method.recipe,
            params=method.params,
        )
        if cost.gflops is None or (method.needs_images and self.flops is None):
            return None
        return cost.gflops / (self._pass_rate if method.needs_images else self._head_rate)

    @property
    def _pass_rate(self) -> float:
        """GFLOPs per second of the backbone."""
        assert self.flops is not None, "otherwise nothing is estimated"
        return 2e-9 * self.flops.total / max(self.plan.seconds, 1e-9)

    @cached_property
    def _head_rate(self) -> float:
        """GFLOPs per second of a head, from a short training on noise."""
        generator = np.random.default_rng(0)
        noise = Features.from_tensors(
            {
                name: generator.random((10, *t.shape[1:]), np.float32)
                for name, t in self.features.tensors.items()
            }
        )
        labels, preset, steps = [0, 1] * 5, self.backbone.preset, 3
        size = TaskSize((5, 5), (0, 0))
        cost = count("miv-paper", noise, size, None, preset=preset, params={"steps": steps})
        with one_thread():
            device = str(default_device(self.device))
            head = make_method(
                "miv-paper", preset=preset, random_state=0, steps=steps, device=device
            )
            head.fit(noise, labels)  # warms up
            clock = Clock(device)
            head.fit(noise, labels)
            spent = clock.lap().spent
        return (cost.gflops or 0.0) / max(spent, 1e-6)


def _open(entry: BackboneConfig, device: str | None) -> Backbone:
    nowhere = Path()
    return Inputs(entry, "", nowhere, nowhere, 0, 0, device).open_backbone()
