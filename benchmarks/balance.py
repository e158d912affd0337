"""Unequal shots: the default method against plain heads, each with its best correction.

    python benchmarks/balance.py --data DIR [--sets tuning] [--tasks 6] [--shots 1,1,2,3,5,8,12]

Every task has 5 to 10 classes, and shots per class are drawn from a list; `--shots 5 --ways 10` are
tasks with equal shots. There are up to 10 queries per class, and accuracy is the mean over classes.
The default method is measured as it is. The logits of every other method are corrected by minus a
power of the number of shots, log p - tau log n, and the best of several powers counts: chosen on
the very tasks of the table, which favours the rivals. About 3 s per task on one core.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from _bench import SETS, names
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import Backbone
from mivhead.benchmark.compare import summarise
from mivhead.datasets.sets import open_set
from mivhead.extraction import extract_table
from mivhead.extraction.cache import open_cache
from mivhead.features import Features
from mivhead.methods import make_method

QUERIES = 10  # per class, at most
LEAST_QUERIES = 3
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)
OURS = "miv"


class UnequalTask(NamedTuple):
    """Features and class numbers of a task."""

    X: Features
    y: NDArray[np.int64]
    queries: Features
    wanted: NDArray[np.int64]


def sample_tasks(
    backbone: Backbone, data: str, name: str, tasks: int, shots: list[int], ways: list[int]
) -> Iterator[UnequalTask]:
    """Sample tasks of a set; task i does not depend on how many there are."""
    images, cache = open_set(name, data), open_cache()
    labels = np.asarray(images.labels)
    classes = np.unique(labels)
    for number in range(tasks):
        rng = np.random.default_rng(zlib.crc32(f"{name} {shots} {ways} {number}".encode()))
        count = min(int(rng.integers(ways[0], ways[-1] + 1)), len(classes))
        chosen = rng.choice(classes, count, replace=False)
        support, queries = [], []
        for wanted, label in zip(rng.choice(shots, count), chosen, strict=True):
            rows = rng.permutation(np.flatnonzero(labels == label))
            split = min(int(wanted), len(rows) - LEAST_QUERIES)
            support.append(rows[:split])
            queries.append(rows[split : split + QUERIES])
        y, wanted = (
            np.repeat(np.arange(count), [len(rows) for rows in part]) for part in (support, queries)
        )
        rows = np.concatenate(support + queries)
        table = extract_table(backbone, images.take(rows), cache=cache, verbose=False)
        yield UnequalTask(table.features[: len(y)], y, table.features[len(y) :], wanted)


def all_logits(task: UnequalTask, backbone: Backbone) -> dict[str, NDArray[np.float64]]:
    """Fit every method, and return its log probabilities of the queries."""
    preset: dict[str, Any] = {"preset": backbone.preset, "random_state": 0}
    roots = [np.sqrt(np.maximum(pooled(x), 0)) for x in (task.X, task.queries)]
    plain = (task.X, task.queries)
    runs: dict[str, tuple[Any, Any]] = {
        OURS: (make_method("miv", **preset), plain),
        "miv-paper": (make_method("miv-paper", **preset), plain),
        "ridge": (make_method("ridge"), plain),
        "ridge, square roots": (make_method("ridge"), roots),
        "logistic": (make_method("logistic"), plain),
        "fit-lda": (make_method("fit-lda"), plain),
        "ncc": (make_method("ncc"), plain),
        "ncc, centred": (make_method("ncc", centred=True), plain),
    }
    found = {}
    for name, (method, (X, queries)) in runs.items():
        probabilities = method.fit(X, task.y).predict_proba(queries)
        found[name] = np.log(np.maximum(probabilities, 1e-300))
    return found


def pooled(features: Features) -> NDArray[np.float32]:
    """Return the mean patch of the deepest map."""
    map_ = np.asarray(features.blocks[-1].map, np.float32)
    mean: NDArray[np.float32] = map_.mean(axis=(2, 3))
    return mean


def mean_class_accuracy(logits: NDArray[np.float64], wanted: NDArray[np.int64]) -> float:
    """Return the accuracy in percent, as a mean over classes."""
    right = logits.argmax(axis=1) == wanted
    return 100 * float(np.mean([right[wanted == c].mean() for c in np.unique(wanted)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--tasks", type=int, default=6, help="per set")
    parser.add_argument("--shots", default="1,1,2,3,5,8,12", help="drawn for each class")
    parser.add_argument("--ways", default="5,10", help="smallest and largest number of classes")
    args = parser.parse_args()
    shots, ways = ([int(part) for part in names(text)] for text in (args.shots, args.ways))
    backbone = load_backbone(DEFAULT_BACKBONE)
    accuracies: dict[tuple[str, float], list[float]] = defaultdict(list)
    for name in args.sets:
        for task in sample_tasks(backbone, args.data, name, args.tasks, shots, ways):
            log_n = np.log(np.bincount(task.y))
            for method, logits in all_logits(task, backbone).items():
                for power in POWERS[:1] if method == OURS else POWERS:
                    found = mean_class_accuracy(logits - power * log_n, task.wanted)
                    accuracies[method, power].append(found)
    ours = np.array(accuracies[OURS, 0.0])
    print(f"{len(ours)} tasks, {OURS}: {ours.mean():.1f}")
    print("| method | as it is | corrected | tau | miv minus that |\n|---|---:|---:|---:|---:|")
    for method in dict.fromkeys(method for method, _ in accuracies if method != OURS):
        best = max(POWERS, key=lambda power: np.mean(accuracies[method, power]))
        theirs = np.array(accuracies[method, best])
        ahead = summarise(ours - theirs)
        print(
            f"| {method} | {np.mean(accuracies[method, 0.0]):.1f} | {theirs.mean():.1f} | {best:g} "
            f"| {ahead.mean:+.1f} ± {ahead.half_width:.1f} |"
        )


if __name__ == "__main__":
    main()
