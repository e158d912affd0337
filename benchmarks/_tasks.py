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
from mivhead.extraction import extract_table
from mivhead.extraction.cache import open_cache
from mivhead.features import Features
from mivhead.images.augmentation import number_views
from mivhead.images.imageset import ImageSet
from mivhead_bench.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead_bench.benchmark.tasks import Task
from mivhead_bench.datasets.catalogue import groups_of
from mivhead_bench.datasets.sets import open_set

UNEQUAL = "unequal shots"  # a protocol: 5 to 10 classes, with shots drawn from
SHOTS = (1, 1, 2, 3, 5, 8, 12)
QUERIES, LEAST_QUERIES = 10, 3  # per class


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
        if protocol == UNEQUAL:
            found = [sample_unequal(images, name, number) for number in range(tasks)]
        else:
            sampled = sample_tasks(images, name, Protocol.parse(protocol), seed, tasks)
            if isinstance(sampled, LeftOut):
                print(sampled.reason, flush=True)
                continue
            found = list(sampled.tasks)
        for number, task in enumerate(found):
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


def sample_unequal(images: ImageSet, name: str, number: int) -> Task:
    """Sample a task of the protocol `unequal shots`; task i is always the same."""
    labels, ids = np.asarray(images.labels), images.ids
    classes = np.unique(labels)
    rng = np.random.default_rng(zlib.crc32(f"{name} U {number}".encode()))
    groups = groups_of(name, classes.tolist())
    if len(set(groups.values())) > 1:  # one alphabet
        members: dict[str, list[str]] = {}
        for each in classes:
            members.setdefault(groups[each], []).append(each)
        large = [own for own in members.values() if len(own) >= 5]
        classes = np.array(large[rng.integers(len(large))])
    count = min(int(rng.integers(5, 11)), len(classes))
    chosen = rng.choice(classes, count, replace=False)
    parts: tuple[list[str], list[int], list[str], list[int]] = ([], [], [], [])
    for label, (wanted, class_) in enumerate(zip(rng.choice(SHOTS, count), chosen, strict=True)):
        rows = rng.permutation(np.flatnonzero(labels == class_))
        split = min(int(wanted), len(rows) - LEAST_QUERIES)
        for place, own in ((0, rows[:split]), (2, rows[split : split + QUERIES])):
            parts[place].extend(ids[row] for row in own)
            parts[place + 1].extend([label] * len(own))
    return Task(tuple(chosen.tolist()), *map(tuple, parts))


def seed_of(task: LoadedTask) -> int:
    """Return a random seed of a task that does not depend on the order of sets."""
    return zlib.crc32(f"{task.set} {task.number}".encode()) % 2**31
