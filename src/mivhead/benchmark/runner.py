"""Runs a benchmark: set by set, features first, then every method on every task.

Nothing is computed twice: what the run folder holds is done, what the bank holds is extracted. Only
this process writes results; workers hand them over.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mivhead.backbones.base import Backbone
from mivhead.benchmark.bank import Bank
from mivhead.benchmark.config import BackboneConfig, MethodConfig, RunConfig
from mivhead.benchmark.cost import measure_backbone
from mivhead.benchmark.executors import Died, Executor
from mivhead.benchmark.executors.local import InlineExecutor
from mivhead.benchmark.extracting import ExtractJob, find_missing
from mivhead.benchmark.failures import MEMORY
from mivhead.benchmark.jobs import JobMaker, view_rule
from mivhead.benchmark.live import LiveView
from mivhead.benchmark.plan import PictureKeys, ViewRule, hash_images, needed_pictures
from mivhead.benchmark.results import BANK, TASKS, Journal, Result, Unit
from mivhead.benchmark.samplers import LeftOut, find_tasks
from mivhead.benchmark.source import Source
from mivhead.benchmark.tasks import Task, TaskSet
from mivhead.benchmark.units import TaskJob
from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import open_cache
from mivhead.images.imageset import ImageSet

BANK_GB = 50.0


@dataclass(frozen=True)
class Place:
    """Where a benchmark runs.

    Parameters
    ----------
    folder
        The run folder.
    data
        The folder of the data sets.
    bank
        Where features are kept; None: beside the feature cache, or in the run folder if that is
        switched off.
    bank_gb
        The most that the features of one set and one backbone may take.
    drop_bank
        Whether features are removed when their set is finished.
    device
        Where backbones and methods run, such as `"cpu"` or `"cuda"`.
    """

    folder: Path
    data: Path
    bank: Path | None = None
    bank_gb: float = BANK_GB
    drop_bank: bool = False
    device: str | None = None

    def bank_of(self, backbone: Backbone, name: str) -> Path:
        """Folder of the features of a set from a backbone."""
        cache = open_cache()
        usual = (self.folder if cache is None else cache.folder) / BANK
        return (self.bank or usual) / f"{name}-{backbone.identity.key[:16]}"


def run(
    config: RunConfig,
    place: Place,
    executor: Executor | None = None,
    *,
    backbones: Mapping[str, Backbone] | None = None,
    view: LiveView | None = None,
) -> list[Result]:
    """Run what is missing of a benchmark and return all results of the configuration.

    Parameters
    ----------
    config
        What to compare.
    place
        Where results, data and features are.
    executor
        Where the work is done; by default in this process.
    backbones
        Backbones of your own for names of the configuration. What needs them is done in this
        process, as they cannot be sent to others; what needs features only, by the executor.
    view
        Shows how far it is; None for silence.
    """
    if not config.sets:
        raise InputError("The benchmark names no data sets.")
    executor = executor or InlineExecutor()
    view = view or LiveView(quiet=True)
    own = backbones or {}
    with Journal(place.folder, config) as journal:
        parts = [(entry, name) for entry in config.backbones for name in config.sets]
        for number, (entry, name) in enumerate(parts, start=1):
            source = Source(own.get(entry.name, entry), name, place.data, place.device)
            title = f"[{number}/{len(parts)}] {entry.name}, {name}"
            _SetRun(config, place, executor, journal, view, entry, source, title).run()
        wanted = {
            (b.name, s, p, m.name)
            for b in config.backbones
            for s in config.sets
            for p in config.protocols
            for m in config.methods
        }
        found = journal.results.values()
        return [r for r in found if (r.backbone, r.set, r.protocol, r.method) in wanted]


@dataclass(frozen=True)
class _SetRun:
    """One backbone on one data set."""

    config: RunConfig
    place: Place
    executor: Executor
    journal: Journal
    view: LiveView
    entry: BackboneConfig
    source: Source
    title: str

    def run(self) -> None:
        config, entry, name = self.config, self.entry, self.source.set
        images = self.source.open_images()
        task_sets = [found for text in config.protocols if (found := self._task_set(text, images))]
        missing = [
            (tasks, number, methods)
            for tasks in task_sets
            for number in range(len(tasks.tasks))
            if (methods := self._missing_methods(tasks, number))
        ]
        if not missing:
            return
        backbone = self.source.open_backbone()
        rules = {m.name: view_rule(m, backbone.preset, self.config.views) for m in config.methods}
        bank, keys = Bank(self.place.bank_of(backbone, name)), None
        if any(not m.needs_images for _, _, methods in missing for m in methods):
            tasks = [tasks.tasks[number] for tasks, number, _ in missing]
            on_features = [rules[m.name] for m in config.methods if not m.needs_images]
            keys = self._fill(bank, images, tasks, on_features)
        jobs = JobMaker(
            source=self.source,
            backbone=entry.name,
            preset=backbone.preset,
            rules=rules,
            seed=config.seed,
            work=measure_backbone(backbone),
            bank=bank.folder,
            keys=keys,
        )
        made = [job for each in missing for job in jobs.make(*each)]
        self.view.start(self.title, [m.name for job in made for m in job.methods])
        self._run_jobs(made)
        if self.place.drop_bank:
            bank.drop()

    def _task_set(self, protocol: str, images: ImageSet) -> TaskSet | None:
        config, name = self.config, self.source.set
        path = self.place.folder / TASKS / protocol / f"{name}.json"
        tasks = find_tasks(path, images, name, protocol, config.seed, config.tasks)
        if isinstance(tasks, LeftOut):
            self.view.note(f"{name} is left out of {protocol!r}: {tasks.reason}")
            return None
        for reason in tasks.left_out:
            self.view.note(f"{name}, left out of {protocol!r}: {reason}")
        self.journal.check_tasks(name, protocol, tasks.hash)
        return tasks

    def _missing_methods(self, tasks: TaskSet, number: int) -> list[MethodConfig]:
        return [
            method
            for method in self.config.methods
            if not self.journal.is_done(
                Unit(self.entry.name, tasks.set, tasks.protocol, number, method.name)
            )
        ]

    def _fill(
        self, bank: Bank, images: ImageSet, tasks: list[Task], rules: list[ViewRule]
    ) -> PictureKeys:
        """Extract what the tasks need and the bank lacks."""
        source, seed = self.source, self.config.seed
        pictures = needed_pictures(tasks, rules)
        contents = hash_images(images, {picture.id for picture in pictures}, source.set)
        keys = PictureKeys(source.open_backbone(), contents, seed)
        missing = find_missing(source, bank, pictures, keys, seed)
        if missing.jobs:
            missing.check_space(bank, int(self.place.bank_gb * 1e9))
            self.view.note(
                f"{self.title}: {missing.images:,} images and "
                f"{missing.views:,} views pass the backbone; their features take "
                f"{missing.nbytes / 1e9:.3f} GB in {bank.folder}"
            )
            self._extract(missing.jobs)
            bank.refresh()
        return keys

    def _extract(self, jobs: tuple[ExtractJob, ...]) -> None:
        """Run the jobs; one whose worker dies is tried once more."""
        with self.view.extracting(sum(len(job.pictures) for job in jobs)) as advance:
            for last in (False, True):
                died = []
                for job, outcome in self._executor_for_backbone().run(jobs):
                    if isinstance(outcome, Died):
                        died.append((job, outcome))
                    else:
                        advance(outcome)
                if died and last:
                    raise NotAvailableError(
                        f"Features of {self.source.set} cannot be extracted: {died[0][1].reason}; "
                        "run the same command again with fewer --workers."
                    )
                jobs = tuple(job for job, _ in died)  # type: ignore[misc]  # what was given

    def _run_jobs(self, jobs: list[TaskJob]) -> None:
        """Run and record; a job whose worker dies is tried once more, method by method."""
        again: list[TaskJob] = []
        for job, outcome in self._everywhere(jobs):
            if isinstance(outcome, Died):
                again += job.split()
            else:
                self._record(outcome)
        for job, outcome in self._everywhere(again):
            if isinstance(outcome, Died):
                views = sum(job.rules[0].count(job.given.task))
                failed = replace(job.blank, method=job.methods[0].name, views=views)
                outcome = [replace(failed, error=f"{MEMORY}: {outcome.reason}")]
            self._record(outcome)

    def _everywhere(self, jobs: list[TaskJob]) -> Iterable[tuple[TaskJob, list[Result] | Died]]:
        """Run every job where it can be run."""
        at_home = [job for job in jobs if job.methods[0].needs_images]
        away = [job for job in jobs if not job.methods[0].needs_images]
        for executor, own in ((self.executor, away), (self._executor_for_backbone(), at_home)):
            yield from executor.run(own)  # type: ignore[misc]  # gives back what it was given

    def _executor_for_backbone(self) -> Executor:
        """Where jobs run that need the backbone itself."""
        is_own = not isinstance(self.source.backbone, BackboneConfig)
        return InlineExecutor() if is_own else self.executor

    def _record(self, results: list[Result]) -> None:
        self.journal.add(results)
        for result in results:
            self.view.show(result)


def default_workers() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
