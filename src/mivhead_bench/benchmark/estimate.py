"""What a run would take, without running it: tasks, passes of the backbone, bytes, and hours.

The tasks are those of the run. Each backbone is timed on one image, and each method on one small
task of noise; its time on others grows with their operations, or with their images where these are
not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, default_device
from mivhead.errors import MivError
from mivhead.extraction.cache import entry_size
from mivhead.features import Features
from mivhead_bench.benchmark.clock import Clock
from mivhead_bench.benchmark.config import BackboneConfig, MethodConfig, RunConfig
from mivhead_bench.benchmark.executors import one_thread
from mivhead_bench.benchmark.inputs import ViewLimit, count_views, load_once, plain_features
from mivhead_bench.benchmark.runner import view_rule
from mivhead_bench.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead_bench.benchmark.tasks import Task
from mivhead_bench.datasets.catalogue import BENCHMARKS, find_declared
from mivhead_bench.datasets.sets import find_sets, open_set
from mivhead_bench.methods import make_method
from mivhead_bench.methods.cost import TaskSize, count
from mivhead_bench.methods.tuning.network import network_of

SIZED = 20  # tasks per set whose operations are counted
STEPS = 2  # of the task that is timed
SHOTS = 3  # per class of it


@dataclass(frozen=True)
class Column:
    """One method on one backbone: mean seconds per task, and hours of one core."""

    method: str
    backbone: str
    seconds: float
    hours: float


@dataclass(frozen=True)
class Plan:
    """What a run would take, on the sets that are there."""

    tasks: int
    passes: int  # images and views that pass a backbone
    bytes: int  # size of their features on the disk
    extraction_hours: float  # hours of one core for these passes
    columns: tuple[Column, ...]
    missing_sets: tuple[str, ...]
    missing_backbones: dict[str, str]  # with the reason; they were measured with random weights

    @property
    def hours(self) -> float:
        """Hours of one core in total."""
        return self.extraction_hours + sum(column.hours for column in self.columns)


def estimate(config: RunConfig, data: Path | None, device: str | None = None) -> Plan:
    """Estimate what a run would take on the sets that it names, or that are in the data folder."""
    device = str(default_device(device))
    present = find_sets(data) if data is not None else ()
    declared = {name: info.name for name in present if (info := find_declared(name))}
    wanted = config.sets or BENCHMARKS.get(config.benchmark or "", present)
    chosen = [name for name in present if name in wanted or declared.get(name) in wanted]
    tasks = {name: _sample(name, Path(data or "."), config) for name in chosen}
    columns: list[Column] = []
    passes = size = 0
    extraction = 0.0
    problems: dict[str, str] = {}
    for entry in config.backbones:
        backbone = _load(entry, device, problems)
        seconds, layout = _measure_backbone(backbone, device)
        rules = {
            (name, m.name): view_rule(
                m, backbone.preset, config.views, config.threshold(entry.name, name)
            )
            for name in tasks
            for m in config.methods_on(entry.name)
        }
        for method in config.methods_on(entry.name):
            of_sets = [
                (rules[name, method.name], set_tasks)
                for name, set_tasks in tasks.items()
                if set_tasks
            ]
            columns.append(_column(method, entry.name, backbone, layout, of_sets, device))
        for name, set_tasks in tasks.items():
            frozen = [m.name for m in config.methods_on(entry.name) if not m.needs_images]
            views = (
                count_views(set_tasks, [rules[name, method_name] for method_name in frozen])
                if frozen
                else {}
            )
            once = len(views) + sum(views.values())
            passes += once
            size += once * entry_size({part: t[0] for part, t in layout.tensors.items()})
            extraction += once * seconds / 3600
    return Plan(
        sum(map(len, tasks.values())),
        passes,
        size,
        extraction,
        tuple(columns),
        tuple(name for name in wanted if name not in (*chosen, *declared.values())),
        problems,
    )


def _sample(name: str, data: Path, config: RunConfig) -> list[Task]:
    """Sample the tasks of a set under all protocols."""
    images = open_set(name, data)
    sampled = [
        sample_tasks(images, name, Protocol.parse(protocol), config.seed, config.tasks)
        for protocol in config.protocols
    ]
    return [
        task for task_set in sampled if not isinstance(task_set, LeftOut) for task in task_set.tasks
    ]


def _load(entry: BackboneConfig, device: str, problems: dict[str, str]) -> Backbone:
    """Load a backbone, with random weights if it has no others here; note why."""
    try:
        return load_once(entry, device)
    except MivError as error:
        problems[entry.name] = str(error)
        # Untrained networks may give values that are too large for float16.
        how: dict[str, Any] = {**entry.settings, "dtype": "float32"}
        return load_backbone(entry.source, weights="random", device=device, **how)


def _measure_backbone(backbone: Backbone, device: str) -> tuple[float, Features]:
    """Return the seconds of one image, and its features."""
    with one_thread():
        features = plain_features(backbone)  # also warms up
        clock = Clock(device)
        plain_features(backbone)
        return clock.lap().spent, features


def _column(
    method: MethodConfig,
    name: str,
    backbone: Backbone,
    layout: Features,
    of_sets: Sequence[tuple[ViewLimit, list[Task]]],
    device: str,
) -> Column:
    """Time a method on two classes of noise, and scale its time to the tasks of all sets."""
    rng, labels = np.random.default_rng(0), np.repeat([0, 1], SHOTS)
    side = backbone.preset.preprocessing.size
    noise: Any = rng.integers(0, 256, (len(labels), side, side, 3), np.uint8)
    if not method.needs_images:
        shapes = {part: t.shape[1:] for part, t in layout.tensors.items()}
        noise = Features.from_tensors(
            {part: rng.random((len(labels), *shape), np.float32) for part, shape in shapes.items()}
        )

    def make(**changes: Any) -> Any:
        how: dict[str, Any] = {"random_state": 0, "device": device, **method.params, **changes}
        if method.needs_images:
            return make_method(method.kind, **how).attach(network_of(backbone, method.kind))
        return make_method(method.kind, preset=backbone.preset, recipe=method.recipe, **how)

    has_steps = "steps" in method.facts.hyperparameters()
    short = {"steps": STEPS} if has_steps else {}
    with one_thread():
        make(**short).fit(noise, labels)  # warms up
        timed, clock = make(**short), Clock(device)
        timed.fit(noise, labels)
        seconds = clock.lap().spent
    small = TaskSize((SHOTS, SHOTS), (0, 0))
    flops, whole = (1.0 if method.needs_images else None), make()
    base = count(timed, layout, small, flops).gflops_paper
    means, hours = [], 0.0
    for rule, tasks in of_sets:
        sizes = [TaskSize.from_labels(t.support_labels, rule.count(t)) for t in tasks[:SIZED]]
        ratios = [
            count(whole, layout, size, flops).gflops_paper / base
            if base
            else size.images / small.images
            for size in sizes
        ]
        means.append(seconds * float(np.mean(ratios)))
        hours += len(tasks) * means[-1] / 3600
    return Column(method.name, name, float(np.mean(means)) if means else 0.0, hours)
