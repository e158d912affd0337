"""From what is missing to jobs: which methods of a task run together, on which rows of the bank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mivhead.benchmark.config import MethodConfig
from mivhead.benchmark.cost import BackboneWork
from mivhead.benchmark.plan import Picture, PictureKeys, ViewRule
from mivhead.benchmark.results import Result
from mivhead.benchmark.source import Source
from mivhead.benchmark.tasks import Task, TaskSet
from mivhead.benchmark.trials import Given, Keys
from mivhead.benchmark.units import TaskJob
from mivhead.head.recipe import Recipe
from mivhead.methods.ablation import views_rule
from mivhead.preset import Preset

NO_KEYS = Keys((), (), ())


def view_rule(method: MethodConfig, preset: Preset, views: int) -> ViewRule:
    """Tell how many views a method gets, of at most `views` per image in the bank.

    >>> from mivhead.backbones.efficientnet_lite import PRESETS
    >>> view_rule(MethodConfig("miv"), PRESETS["efficientnet_lite0"], 4)
    ViewRule(threshold=15, rule='ceil', cap=4)
    """
    threshold = preset.threshold if method.threshold is None else method.threshold
    rule = views_rule(method.kind, method.recipe, method.params)
    # A method on images makes its views itself, as many as it wants.
    cap = threshold if method.needs_images else views
    return ViewRule(0 if rule is None else threshold, rule or Recipe().views_rule, cap)


@dataclass(frozen=True)
class JobMaker:
    """Makes the jobs of one backbone on one data set.

    Parameters
    ----------
    source, backbone, preset
        The data set and the backbone, its name in results, and its settings.
    rules
        How many views each method gets.
    seed
        Of the run.
    work
        Of one image's pass through the backbone, if known.
    bank, keys
        Where features are, and what their rows are called; None if no method needs features.
    """

    source: Source
    backbone: str
    preset: Preset
    rules: Mapping[str, ViewRule]
    seed: int
    work: BackboneWork | None
    bank: Path
    keys: PictureKeys | None

    def make(
        self, tasks: TaskSet, number: int, methods: Sequence[MethodConfig]
    ) -> Iterator[TaskJob]:
        """One job for all methods on features, so that these are read once; one for each other."""
        on_features = [method for method in methods if not method.needs_images]
        groups = [on_features] if on_features else []
        for group in groups + [[method] for method in methods if method.needs_images]:
            yield self._job(tasks, number, group)

    def _job(self, tasks: TaskSet, number: int, methods: Sequence[MethodConfig]) -> TaskJob:
        on_images = methods[0].needs_images
        return TaskJob(
            given=Given(self.source, self.preset, tasks.tasks[number], self._task_seed(number)),
            bank=self.bank,
            keys=NO_KEYS if on_images else self._rows(tasks.tasks[number], methods),
            blank=self._blank(tasks, number),
            methods=tuple(methods),
            rules=tuple(self.rules[method.name] for method in methods),
            work=self.work,
        )

    def _task_seed(self, number: int) -> int:
        return int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0]) >> 1

    def _blank(self, tasks: TaskSet, number: int) -> Result:
        task = tasks.tasks[number]
        return Result(
            backbone=self.backbone,
            set=tasks.set,
            protocol=tasks.protocol,
            method="",
            task=number,
            tasks=tasks.hash,
            ways=len(task.classes),
            shots=len(task.support),
            views=0,
            queries=len(task.queries),
            accuracy=None,
            error=None,
            adapt_seconds=0.0,
            infer_seconds=0.0,
            backbone_seconds=0.0,
            peak_bytes=0,
            gflops=0.0,
            gflops_paper=0.0,
            calibration=(),
        )

    def _rows(self, task: Task, methods: Sequence[MethodConfig]) -> Keys:
        """Rows of all images of a task, and of as many views as the greediest method gets."""
        assert self.keys is not None, "methods on features need a bank"
        key = self.keys.key
        most = np.max([self.rules[method.name].count(task) for method in methods], axis=0)
        return Keys(
            tuple(key(Picture(id_, None)) for id_ in task.support),
            tuple(
                tuple(key(Picture(id_, view)) for view in range(count))
                for id_, count in zip(task.support, most.tolist(), strict=True)
            ),
            tuple(key(Picture(id_, None)) for id_ in task.queries),
        )
