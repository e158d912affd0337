"""Runs a benchmark: data set by data set, first the features, then every method on every task.

Nothing is computed twice: results that are already in the run folder and features that are already
in the cache are reused. Only this process writes results; workers return them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from mivhead.backbones.base import Backbone, default_device
from mivhead.backbones.preset import Preset
from mivhead.errors import InputError, MivError, NotAvailableError
from mivhead.extraction.cache import DEFAULT_LIMIT, open_cache
from mivhead.features import Features
from mivhead.images.imageset import ImageSet
from mivhead.jobs.executors import Died
from mivhead_bench.benchmark.clock import Seconds
from mivhead_bench.benchmark.config import BackboneConfig, MethodConfig, RunConfig
from mivhead_bench.benchmark.executors import (
    Executor,
    InlineExecutor,
    one_thread,
    visible_gpus,
)
from mivhead_bench.benchmark.inputs import (
    Extraction,
    FeatureKeys,
    Inputs,
    TaskKeys,
    ViewLimit,
    count_views,
    find_missing,
    load_once,
    measure_seconds,
    plain_features,
)
from mivhead_bench.benchmark.live import LiveView
from mivhead_bench.benchmark.measuring import MEMORY, Outcome, TaskRun
from mivhead_bench.benchmark.memory import available_memory, fitting_workers, image_bytes
from mivhead_bench.benchmark.results import (
    FEATURES,
    RESULTS,
    TASKS,
    Result,
    ResultKey,
    RunFolder,
    describe_device,
)
from mivhead_bench.benchmark.samplers import LeftOut, find_tasks
from mivhead_bench.benchmark.tasks import Task, TaskSet
from mivhead_bench.datasets.catalogue import paper_size
from mivhead_bench.datasets.sets import check_sets
from mivhead_bench.methods import make_method
from mivhead_bench.methods.cost import measure_backbone
from mivhead_bench.methods.tuning.network import network_of


@dataclass(frozen=True)
class Workspace:
    """The folders and the device of a benchmark.

    Parameters
    ----------
    folder : Path
        The run folder, for tasks and results.
    data : Path
        Folder of the data sets.
    cache : Path, optional
        Folder of the feature cache; by default the user's (`mivhead.extraction.open_cache`), or
        `features` in the run folder if that is disabled.
    cache_gb : float, optional
        Size in gigabytes up to which the cache may grow; by default as the user has configured.
    device : str, optional
        Where all backbones and methods run, such as `"cpu"` or `"cuda"`; by default a GPU if there
        is one.
    features : {"auto", "cache", "task"}, default="auto"
        Whether features are computed once and kept in the cache, or for each task and then
        dropped, as the paper's authors do. `"auto"`: kept if they fit into the cache.
    """

    folder: Path
    data: Path
    cache: Path | None = None
    cache_gb: float | None = None
    device: str | None = None
    features: Literal["auto", "cache", "task"] = "auto"

    def find_cache(self) -> tuple[Path, int]:
        """Return the folder of the feature cache and its maximum size in bytes."""
        usual = open_cache(self.cache)
        folder = self.folder / FEATURES if usual is None else usual.folder
        limit = DEFAULT_LIMIT if usual is None else usual.limit
        return folder, limit if self.cache_gb is None else int(self.cache_gb * 1e9)


def run(
    config: RunConfig,
    workspace: Workspace,
    executor: Executor | None = None,
    *,
    backbones: Mapping[str, Backbone] | None = None,
    view: LiveView | None = None,
) -> list[Result]:
    """Run what is missing of a benchmark and return all results of the configuration.

    Parameters
    ----------
    config : RunConfig
        What to compare.
    workspace : Workspace
        Where results, data and features are, and on which device it runs.
    executor : Executor, optional
        Where tasks run; by default in this process.
    backbones : mapping of str to Backbone, optional
        Your own backbones for names in the configuration. They cannot be sent to other processes:
        extraction, and methods that tune the backbone, then run in this process.
    view : LiveView, optional
        Shows the progress; by default nothing is shown.

    Returns
    -------
    list of Result
        One per backbone, data set, protocol, task and method, in the order of the configuration.
    """
    if not config.sets:
        raise InputError("The configuration names no data sets.")
    if config.is_open and len(config.sets) < 2:
        raise InputError(
            "An open protocol needs at least two data sets: images of the others are foreign ones."
        )
    executor = executor or InlineExecutor()
    view = view or LiveView(quiet=True)
    backbones = backbones or {}
    # One device for all methods, so that their times can be compared.
    workspace = replace(workspace, device=str(default_device(workspace.device)))
    check_sets(config.sets, workspace.data)
    check_backbones(config, workspace, backbones)
    with discard_if_failed(workspace.folder):
        return _run(config, workspace, executor, backbones, view)


@contextmanager
def discard_if_failed(folder: Path) -> Iterator[None]:
    """Remove a run folder that an error left without results, if it did not exist before."""
    is_new = not folder.exists()
    try:
        yield
    except MivError:
        if is_new and not _has_content(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_backbones(
    config: RunConfig, workspace: Workspace, backbones: Mapping[str, Backbone]
) -> None:
    """Check all backbones and what runs on them, before anything is computed."""
    problems: dict[str, MivError] = {}
    for entry in config.backbones:
        methods = config.methods_on(entry.name)
        for method in methods:
            method.check()
        if not methods:
            continue
        try:
            backbone = backbones.get(entry.name) or load_once(entry, workspace.device)
        except MivError as error:
            problems[entry.name] = error
            continue
        for method in methods:
            _check_method(method, entry.name, backbone, workspace.device)
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        listed = list_reasons({name: str(problem) for name, problem in problems.items()})
        raise NotAvailableError(f"{len(problems)} backbones cannot be loaded:\n{listed}")


def _check_method(method: MethodConfig, name: str, backbone: Backbone, device: str | None) -> None:
    """Raise an error if a method cannot run on a backbone."""
    try:
        if method.needs_images:
            classifier = make_method(method.kind, device=device, **method.params)
            classifier.check(network_of(backbone, method.kind))
        elif method.last_blocks is not None:
            blocks = sum(not block.pooled for block in backbone.preset.blocks)
            if method.last_blocks > blocks:
                raise InputError(
                    f"it uses the last {method.last_blocks} blocks, and the backbone has only "
                    f"{blocks}."
                )
    except InputError as error:
        raise InputError(
            f"The method {method.name!r} cannot run on the backbone {name!r}: {error}"
        ) from error


def _has_content(folder: Path) -> bool:
    """Return whether a run folder holds results or features."""
    results = folder / RESULTS
    return (folder / FEATURES).exists() or (results.exists() and results.stat().st_size > 0)


def _run(
    config: RunConfig,
    workspace: Workspace,
    executor: Executor,
    backbones: Mapping[str, Backbone],
    view: LiveView,
) -> list[Result]:
    features, limit = workspace.find_cache()
    with RunFolder(
        workspace.folder, config, device=describe_device(workspace.device)
    ) as run_folder:
        for name in config.sets if config.paper_sizes else ():
            if size := paper_size(name):
                view.note(f"{name}: images are resized to {size} x {size} pixels first (Lanczos)")
        parts = [(entry, name) for entry in config.backbones for name in config.sets]
        for number, (entry, name) in enumerate(parts, start=1):
            backbone = backbones.get(entry.name, entry)
            inputs = Inputs(
                backbone,
                name,
                workspace.data,
                features,
                limit,
                config.seed,
                workspace.device,
                config.paper_sizes,
                tuple(s for s in run_folder.config.sets if s != name) if config.is_open else (),
            )
            title = f"[{number}/{len(parts)}] {entry.name}, {name}"
            _SetRun(config, workspace, executor, run_folder, view, entry, inputs, title).run()
        columns = [
            (b.name, s, p, m.name)
            for b in config.backbones
            for s in config.sets
            for p in config.protocols
            for m in config.methods_on(b.name)
        ]
        last = {column[:3]: number for number, column in enumerate(columns)}
        order = {column: number for number, column in enumerate(columns)}
        by_place: dict[tuple[int, int, int], Result] = {}
        for r in run_folder.results.values():
            column = (r.backbone, r.set, r.protocol, r.method)
            if column in order:
                by_place[last[column[:3]], r.task, order[column]] = r
        return [by_place[key] for key in sorted(by_place)]


@dataclass(frozen=True)
class _SetRun:
    """One backbone on one data set."""

    config: RunConfig
    workspace: Workspace
    executor: Executor
    run_folder: RunFolder
    view: LiveView
    entry: BackboneConfig
    inputs: Inputs
    title: str

    def run(self) -> None:
        images = self.inputs.open_images()
        task_sets = [task_set for p in self.config.protocols if (task_set := self._task_set(p))]
        missing = [
            (tasks, number, methods)
            for tasks in task_sets
            for number in range(len(tasks.tasks))
            if (methods := self._missing_methods(tasks, number))
        ]
        if not missing:
            return
        self.run_folder.check_weights(self.entry.name, self._backbone.identity.weights)
        keys = None
        if any(not m.needs_images for _, _, methods in missing for m in methods):
            keys = self._extract(images, [tasks.tasks[number] for tasks, number, _ in missing])
        flops = measure_backbone(self._backbone)
        runs = [
            task_run
            for tasks, number, methods in missing
            for task_run in self._task_runs(tasks, number, methods, keys, flops)
        ]
        self.view.start(self.title, sum(len(task_run.methods) for task_run in runs))
        self._run_tasks(runs)

    @property
    def _has_backbone_object(self) -> bool:
        """Whether the backbone is an object of this process, which cannot be sent to others."""
        return not isinstance(self.inputs.backbone, BackboneConfig)

    @property
    def _backbone(self) -> Backbone:
        return self.inputs.open_backbone()

    @cached_property
    def _sample(self) -> Features:
        return plain_features(self._backbone)

    @cached_property
    def _rules(self) -> dict[str, ViewLimit]:
        """How many views each method gets."""
        preset, views = self._backbone.preset, self.config.views
        lowered = self.config.threshold(self.entry.name, self.inputs.set)
        return {m.name: view_rule(m, preset, views, lowered) for m in self._methods}

    @property
    def _methods(self) -> tuple[MethodConfig, ...]:
        return self.config.methods_on(self.entry.name)

    def _task_set(self, protocol: str) -> TaskSet | None:
        config, inputs, name = self.config, self.inputs, self.inputs.set
        path = self.workspace.folder / TASKS / protocol / f"{name}.json"
        tasks = find_tasks(
            path, inputs.open_set, name, protocol, config.seed, config.tasks, inputs.others
        )
        if isinstance(tasks, LeftOut):
            self.view.note(f"{name} is left out of {protocol!r}: {tasks.reason}")
            return None
        for reason in tasks.left_out:
            self.view.note(f"{name}, left out of {protocol!r}: {reason}")
        self.run_folder.check_tasks(name, protocol, tasks.hash)
        return tasks

    def _missing_methods(self, tasks: TaskSet, number: int) -> list[MethodConfig]:
        return [
            method
            for method in self._methods
            if not self.run_folder.is_done(
                ResultKey(self.entry.name, tasks.set, tasks.protocol, number, method.name)
            )
        ]

    # Features first.

    def _extract(self, images: ImageSet, tasks: list[Task]) -> FeatureKeys | None:
        """Extract the features that tasks need and the cache lacks; return the keys of all.

        None if features are not kept: then every task computes its own.
        """
        inputs = self.inputs
        rules = [self._rules[m.name] for m in self._methods if not m.needs_images]
        views = count_views(tasks, rules)
        keys = None
        if self.workspace.features != "task":
            keys = FeatureKeys(self._backbone, images, views, inputs.set, inputs.seed)
            keys = self._fill_cache(keys, views, tasks, rules)
        if self.entry.name not in self.run_folder.seconds:
            with one_thread():
                measured = measure_seconds(self._backbone, inputs.device)
            self.run_folder.set_seconds(self.entry.name, measured)
        return keys

    def _fill_cache(
        self,
        keys: FeatureKeys,
        views: Mapping[str, int],
        tasks: list[Task],
        rules: Sequence[ViewLimit],
    ) -> FeatureKeys | None:
        """Extract what the cache lacks; None if it does not fit and need not be kept."""
        inputs = self.inputs
        missing = find_missing(inputs, keys, views)
        if missing.extractions:
            obstacle = missing.find_obstacle(inputs.cache, inputs.set)
            if obstacle is not None:
                if self.workspace.features == "cache":
                    raise NotAvailableError(obstacle)
                once = sum(1 + count for count in views.values())
                passes = sum(
                    len(t.images) + int(np.max([r.count(t) for r in rules], axis=0).sum())
                    for t in tasks
                )
                self.view.note(
                    f"{self.title}: features are computed for each task and dropped, {passes:,} "
                    f"passes of the backbone instead of {once:,}. {obstacle}"
                )
                return None
            self.view.note(
                f"{self.title}: {missing.images:,} images and {missing.views:,} views pass the "
                f"backbone; their features take {missing.bytes / 1e9:.3f} GB in {inputs.features}"
            )
            with self.view.extracting(sum(e.size for e in missing.extractions)) as advance:
                seconds = self._run_extractions(missing.extractions, advance)
            if seconds:
                self.run_folder.set_seconds(self.entry.name, Seconds.median(seconds))
        return keys

    def _run_extractions(
        self, extractions: Sequence[Extraction], advance: Callable[[int], object]
    ) -> list[Seconds]:
        """Run extractions, again if their worker dies; return the backbone's times per image."""
        seconds: list[Seconds] = []
        for last in (False, True):
            died: list[tuple[Extraction, Died]] = []
            for extraction, outcome in self._executor_for_backbone().run(extractions):
                if isinstance(outcome, Died):
                    died.append((extraction, outcome))  # type: ignore[arg-type]  # what was given
                else:
                    seconds += [] if outcome is None else [outcome]
                    advance(extraction.size)  # type: ignore[attr-defined]
            if died and last:
                raise NotAvailableError(
                    f"Features of {self.inputs.set} cannot be extracted: {died[0][1].reason}; run "
                    "the same command again with fewer --workers."
                )
            extractions = [extraction for extraction, _ in died]
        return seconds

    # Then the tasks.

    def _task_runs(
        self,
        tasks: TaskSet,
        number: int,
        methods: Sequence[MethodConfig],
        keys: FeatureKeys | None,
        flops: float | None,
    ) -> Iterator[TaskRun]:
        """Yield one call for all methods that need features, which are read once; one per other."""
        on_features = [method for method in methods if not method.needs_images]
        groups = [on_features] if on_features else []
        for group in groups + [[method] for method in methods if method.needs_images]:
            task = tasks.tasks[number]
            rules = tuple(self._rules[method.name] for method in group)
            inputs = self.inputs
            task_keys: TaskKeys | tuple[int, ...] | None = None
            if not group[0].needs_images:
                most = np.max([rule.count(task) for rule in rules], axis=0).tolist()
                task_keys = tuple(most) if keys is None else keys.of_task(task, most)
                if keys is not None and self._has_backbone_object:
                    inputs = replace(inputs, backbone=None)
            yield TaskRun(
                inputs=inputs,
                preset=self._backbone.preset,
                identity=self._backbone.identity,
                task=task,
                seed=_task_seed(self.config.seed, number),
                keys=task_keys,
                blank=_blank(self.entry.name, tasks, number),
                methods=tuple(group),
                rules=rules,
                flops=flops,
                seconds=self.run_folder.seconds.get(self.entry.name, Seconds(0.0, 0.0)),
            )

    def _run_tasks(self, runs: list[TaskRun]) -> None:
        """Run and record; if a worker dies, its task is tried once more, method by method."""
        again: list[TaskRun] = []
        for task_run, outcome in self._execute(runs):
            if isinstance(outcome, Died):
                again += task_run.split()
            else:
                self._record(outcome)
        for task_run, outcome in self._execute(again):
            if isinstance(outcome, Died):
                views = task_run.rules[0].count(task_run.task)
                reason = f"{MEMORY}: {outcome.reason}"
                outcome = [Outcome(task_run.failure(task_run.methods[0], views, reason))]
            self._record(outcome)

    def _execute(self, runs: list[TaskRun]) -> Iterable[tuple[TaskRun, list[Outcome] | Died]]:
        """Run every task where it can run, as many at a time as fit into memory."""
        for executor, needs_backbone in (
            (self.executor, False),
            (self._executor_for_backbone(), True),
        ):
            group = [task_run for task_run in runs if task_run.needs_backbone == needs_backbone]
            if group:
                most = self._fitting(group, executor.workers)
                yield from executor.run(group, most)  # type: ignore[misc]  # what it was given

    def _fitting(self, runs: Sequence[TaskRun], workers: int) -> int:
        """Return how many of these tasks fit into memory at a time; note a limit."""
        features, candidates = image_bytes(self._sample, self._backbone.preset)
        if self.inputs.device != "cpu":
            candidates = 0  # they are on the device
        need = max(run.estimate_bytes(features, candidates) for run in runs)
        available = available_memory()
        fitting = fitting_workers(workers, need, available)
        if available is not None and (fitting < workers or need > available):
            self.view.note(
                f"{self.title}: {fitting} of {workers} workers, because the largest task needs "
                f"about {need / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
            )
        return fitting

    def _executor_for_backbone(self) -> Executor:
        """Return the executor of calls that need the backbone itself."""
        return InlineExecutor() if self._has_backbone_object else self.executor

    def _record(self, outcomes: list[Outcome]) -> None:
        self.run_folder.add([outcome.result for outcome in outcomes])
        for outcome in outcomes:
            self.view.show(outcome.result, outcome.traceback)


def view_rule(
    method: MethodConfig, preset: Preset, views: int | None, lowered: int | None = None
) -> ViewLimit:
    """Return how many views a method gets, at most `views` per image, or all with None.

    T is the method's own, or `lowered` for this set (`RunConfig.threshold`), or the preset's.

    >>> from mivhead.backbones.efficientnet_lite import PRESETS
    >>> view_rule(MethodConfig("miv"), PRESETS["efficientnet_lite0"], 4)
    ViewLimit(threshold=15, rule='few', limit=4)
    """
    overrides = [t for t in (method.threshold, lowered) if t is not None]
    threshold = overrides[0] if overrides else preset.threshold
    rule = method.views_rule
    limit = threshold if views is None else views
    return ViewLimit(0 if rule is None else threshold, rule or "ceil", limit)


def _task_seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) >> 1


def _blank(backbone: str, tasks: TaskSet, number: int) -> Result:
    """Return a result that names the task and has no values yet."""
    task = tasks.tasks[number]
    return Result(
        backbone=backbone,
        set=tasks.set,
        protocol=tasks.protocol,
        method="",
        task=number,
        tasks=tasks.hash,
        ways=len(task.classes),
        shots=len(task.support),
        views=0,
        queries=len(task.queries),
    )


def default_workers(device: str | None = None) -> int:
    """Return the number of workers: one per GPU if they are used, or else one per core."""
    chosen = default_device(device)
    if chosen.type == "cuda":
        return max(1, len(visible_gpus())) if chosen.index is None else 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_reasons(reasons: Mapping[str, str]) -> str:
    """List names and what is said of each; what is said of several is printed once, of NAME.

    >>> print(list_reasons({"a": "a is gone: see a.x.", "b": "b is gone: see b.x.", "c": "No."}))
    - a, b: NAME is gone: see NAME.x.
    - No.
    """
    shared: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        general = re.sub(rf"\b{re.escape(name)}\b", lambda _: "NAME", reason)
        shared.setdefault(general, []).append(name)
    return "\n".join(
        f"- {', '.join(names)}: {reason}" if len(names) > 1 else f"- {reasons[names[0]]}"
        for reason, names in shared.items()
    )
