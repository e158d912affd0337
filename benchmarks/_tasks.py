"""Tasks with their features in memory, so that a measurement can try many variants on each."""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from _bench import SETS, names
from mivhead.backbones.base import Backbone
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.datasets.sets import open_set
from mivhead.extraction import extract_table
from mivhead.extraction.cache import open_cache
from mivhead.features import Features
from mivhead.images.augmentation import number_views


def trial_options(description: str, tasks: int) -> argparse.ArgumentParser:
    """Make a parser for a trial on such tasks: where the sets are, which of them, which tasks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--protocol", default="5-way 1-shot")
    parser.add_argument("--tasks", type=int, default=tasks, help="per set")
    return parser


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """Features and labels of a task, with the same number of views of each shot."""

    set: str
    number: int
    X: Features
    y: NDArray[np.int64]
    all_views: Features | None
    views_per_shot: int
    queries: Features
    query_labels: NDArray[np.int64]

    def views(self, count: int) -> dict[str, object]:
        """Return the first `count` views of each shot, as arguments of `fit`."""
        if not count or self.all_views is None:
            return {}
        view_of = np.repeat(np.arange(len(self.y)), self.views_per_shot)
        kept = np.flatnonzero(np.arange(len(view_of)) % self.views_per_shot < count)
        return {"views": self.all_views[kept], "view_of": view_of[kept]}


def load_tasks(
    backbone: Backbone,
    data: str | Path,
    sets: Sequence[str],
    protocol: str,
    tasks: int,
    *,
    views: int = 0,
    seed: int = 0,
) -> Iterator[LoadedTask]:
    """Sample tasks and extract their features through the cache, set by set."""
    cache = open_cache()
    for name in sets:
        images = open_set(name, data)
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        found = sample_tasks(images, name, Protocol.parse(protocol), seed, tasks)
        if isinstance(found, LeftOut):
            print(found.reason, flush=True)
            continue
        for number, task in enumerate(found.tasks):
            chosen = images.take(rows[id_] for id_ in (*task.support, *task.queries))
            plan = number_views([views] * len(task.support) + [0] * len(task.queries))
            table = extract_table(backbone, chosen, plan, cache=cache, verbose=False)
            shots = len(task.support)
            yield LoadedTask(
                name,
                number,
                table.features[:shots],
                np.array(task.support_labels),
                table.views,
                views,
                table.features[shots:],
                np.array(task.query_labels),
            )


def seed_of(task: LoadedTask) -> int:
    """Return a random seed of a task that does not depend on the order of sets."""
    return zlib.crc32(f"{task.set} {task.number}".encode()) % 2**31
