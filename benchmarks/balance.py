"""Unequal shots: the default method against plain heads, each with its best correction.

    python benchmarks/balance.py --data DIR [--protocol "unequal shots"] [--sets tuning] [--tasks 6]
    python benchmarks/balance.py ... --csv results/accuracy.csv     # adds a row per task and method
    python benchmarks/balance.py ... --head --backbone resnet50 --resnet50 WEIGHTS    # what it adds

There are up to 10 queries per class, and accuracy is the mean over classes. The default method and
the recipe `experts` are measured as they are. The logits of all others are corrected by minus a
power of the number of shots, log p - tau log n, and the best of several powers counts, chosen on
the very tasks of the table, which favours the rivals. About 3 s per task on one core, most of it
the paper's recipe (`--no-paper`). `--head` compares the default method with the recipe `experts`
alone, with equal shots too. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mivhead
from _bench import SETS, names
from mivhead.backbones import DEFAULT_BACKBONE
from mivhead.backbones.base import Backbone
from mivhead.benchmark.compare import paired_test
from mivhead.benchmark.samplers import Protocol
from mivhead.datasets.catalogue import groups_of
from mivhead.datasets.sets import open_set
from mivhead.extraction import extract_table
from mivhead.extraction.cache import open_cache
from mivhead.features import Features
from mivhead.methods import make_method
from which_backbone import load

QUERIES = 10  # per class, at most
LEAST_QUERIES = 3
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)
OURS, EXPERTS, PAPER = "miv", "miv, recipe experts", "miv-paper"
CORRECTED = "+correction"

DRAWN = {  # shots that are drawn for each of 5 to 10 classes
    "unequal shots": ("U", (1, 1, 2, 3, 5, 8, 12)),
    "3 to 8 shots": ("M", (3, 4, 5, 6, 7, 8)),
    "1 to 3 shots": ("S", (1, 2, 3)),
    "2 to 20 shots": ("L", (2, 5, 10, 20)),
    "5 shots": ("E5", (5,)),
    "10 shots": ("E10", (10,)),
    "20 shots": ("E20", (20,)),
}
LARGE = {"60 to 1": ("H60", 60), "300 to 1": ("H300", 300)}  # one class, perhaps made of several
LONE = "1 against 12"  # 12 shots of one class and one of another
VARYING = "varying"  # Meta-Dataset's sampler, with at most 20 classes and 200 shots
PROTOCOLS = (*DRAWN, LONE, VARYING, *LARGE)

Ints = NDArray[np.int64]


class UnequalTask(NamedTuple):
    """Features and class numbers of a task."""

    X: Features
    y: Ints
    queries: Features
    wanted: Ints


def sample(
    name: str, labels: NDArray[Any], protocol: str, number: int, most: int = QUERIES
) -> tuple[Any, Any]:
    """Sample the rows of shots and of queries, a list per class; task i is always the same."""
    classes = np.unique(labels)
    short = {VARYING: "V", LONE: "O"}.get(protocol) or (DRAWN | LARGE)[protocol][0]
    rng = np.random.default_rng(zlib.crc32(f"{name} {short} {number}".encode()))
    groups = groups_of(name, classes.tolist())
    if len(set(groups.values())) > 1:  # one alphabet
        members: dict[str, list[str]] = {}
        for each in classes:
            members.setdefault(groups[each], []).append(each)
        large = [own for own in members.values() if len(own) >= 5]
        classes = np.array(large[rng.integers(len(large))])
    if protocol in LARGE:
        return _with_large_class(labels, classes, LARGE[protocol][1], rng)
    if protocol == VARYING:
        sampler = Protocol(max_ways=20, max_support=200)
        chosen = rng.choice(classes, int(rng.integers(5, min(20, len(classes)) + 1)), replace=False)
        sizes = np.array([(labels == each).sum() for each in chosen])
        shots, most = sampler.sample_shots(rng, sizes), sampler.queries_per_class(sizes)
    elif protocol == LONE:
        chosen, shots = rng.choice(classes, 2, replace=False), np.array([12, 1])
    else:
        count = min(int(rng.integers(5, 11)), len(classes))
        chosen = rng.choice(classes, count, replace=False)
        shots = rng.choice(DRAWN[protocol][1], count)
    support, queries = [], []
    for wanted, label in zip(shots, chosen, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == label))
        split = min(int(wanted), len(rows) - LEAST_QUERIES)
        support.append(rows[:split])
        queries.append(rows[split : split + most])
    return support, queries


def _with_large_class(
    labels: NDArray[Any], classes: NDArray[Any], size: int, rng: np.random.Generator
) -> tuple[Any, Any]:
    """Sample 4 to 7 classes of 1 to 3 shots, and a large one: as many classes as it takes."""
    count = min(int(rng.integers(4, 8)), len(classes) - 1)
    order = rng.permutation(classes)
    sizes = [(labels == each).sum() for each in order]
    needed = 70 / min(sizes) if size == 60 else 310 / np.median(sizes)
    joined = min(int(np.ceil(needed)), len(classes) - 2)
    rows = rng.permutation(np.flatnonzero(np.isin(labels, order[:joined])))
    split = min(size, len(rows) - QUERIES)
    support, queries = [rows[:split]], [rows[split : split + QUERIES]]
    for label in order[joined : joined + min(count, len(classes) - joined)]:
        rows = rng.permutation(np.flatnonzero(labels == label))
        split = int(rng.integers(1, 4))
        support.append(rows[:split])
        queries.append(rows[split : split + QUERIES])
    return support, queries


def load_tasks(
    backbone: Backbone, data: str, name: str, protocol: str, tasks: int, queries: int = QUERIES
) -> Iterator[UnequalTask]:
    """Sample tasks of a set, and extract their features through the cache."""
    images, cache = open_set(name, data), open_cache()
    labels = np.asarray(images.labels)
    for number in range(tasks):
        parts = sample(name, labels, protocol, number, queries)
        y, wanted = (
            np.repeat(np.arange(len(part)), [len(rows) for rows in part]) for part in parts
        )
        rows = np.concatenate([*parts[0], *parts[1]])
        table = extract_table(backbone, images.take(rows), cache=cache, verbose=False)
        yield UnequalTask(table.features[: len(y)], y, table.features[len(y) :], wanted)


def all_logits(
    task: UnequalTask, backbone: Backbone, *, rivals: bool = True, paper: bool = True
) -> dict[str, NDArray[np.float64]]:
    """Fit every method, and return its log probabilities of the queries."""
    preset: dict[str, Any] = {"preset": backbone.preset, "random_state": 0}
    methods = {
        OURS: make_method("miv", **preset),
        EXPERTS: make_method("miv", recipe="experts", **preset),
    }
    if paper:
        methods[PAPER] = make_method("miv-paper", **preset)
    if rivals:
        methods |= {
            "ridge": make_method("ridge"),
            "ridge, power 0.5": make_method("ridge", power=0.5),
            "logistic": make_method("logistic"),
            "ncc": make_method("ncc"),
            "ncc, centred": make_method("ncc", centred=True),
            "simpleshot": make_method("simpleshot"),
            "fit-lda": make_method("fit-lda"),
        }
    found = {}
    for name, method in methods.items():
        probabilities = method.fit(task.X, task.y).predict_proba(task.queries)
        found[name] = np.log(np.maximum(probabilities, 1e-300))
    return found


def mean_class_accuracy(logits: NDArray[np.float64], wanted: Ints) -> float:
    """Return the accuracy in percent, as a mean over classes."""
    right = logits.argmax(axis=1) == wanted
    return 100 * float(np.mean([right[wanted == c].mean() for c in np.unique(wanted)]))


class Accuracies:
    """Accuracies by method and power of the correction, task by task."""

    def __init__(self, backbone: str) -> None:
        self.backbone = backbone
        self.tasks: list[tuple[str, int]] = []
        self.found: dict[tuple[str, float], list[float]] = defaultdict(list)

    def add(self, name: str, number: int, logits: dict[str, Any], y: Ints, wanted: Ints) -> None:
        """Add a task, given the log probabilities of each method."""
        self.tasks.append((name, number))
        log_n = np.log(np.bincount(y))
        for method, own in logits.items():
            for power in POWERS[:1] if method in (OURS, EXPERTS) else POWERS:
                accuracy = mean_class_accuracy(own - power * log_n, wanted)
                self.found[method, power].append(accuracy)

    @property
    def methods(self) -> list[str]:
        """All methods, in their order."""
        return list(dict.fromkeys(method for method, _ in self.found))

    def best_power(self, method: str) -> float:
        """Return the power of the correction with the highest mean."""
        own = [power for each, power in self.found if each == method]
        return max(own, key=lambda power: np.mean(self.found[method, power]))

    def print(self) -> None:
        """Print a table in Markdown."""
        ours = np.array(self.found[OURS, 0.0])
        print(f"{len(ours)} tasks, {OURS}: {ours.mean():.1f}")
        print("| method | as it is | corrected (tau) | miv minus that (p) |\n|---|---:|---:|---:|")
        for method in self.methods[1:]:
            best = self.best_power(method)
            theirs = np.array(self.found[method, best])
            test = paired_test(ours, theirs)
            ahead = test.difference
            corrected = "" if method == EXPERTS else f"{theirs.mean():.1f} ({best:g})"
            print(
                f"| {method} | {np.mean(self.found[method, 0.0]):.1f} | {corrected} "
                f"| {ahead.mean:+.1f} ± {ahead.half_width:.1f} ({test.p:.1g}) |"
            )

    def rows(self, protocol: str) -> Iterator[tuple[object, ...]]:
        """Yield rows for results/accuracy.csv."""
        for method in self.methods:
            for suffix, power in (("", 0.0), (CORRECTED, self.best_power(method))):
                if suffix and method in (OURS, EXPERTS):
                    continue
                own = self.found[method, power]
                for (name, number), accuracy in zip(self.tasks, own, strict=True):
                    task = (self.backbone, protocol, name, number, f"{method}{suffix}")
                    yield (*task, f"{accuracy:.2f}", mivhead.__version__)


def replace_rows(path: Path, rows: list[tuple[object, ...]]) -> None:
    """Write rows to a file of results, in the places of the same tasks and methods."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *old = list(csv.reader(file))
    by_task: dict[tuple[str, ...], Iterable[object]] = {tuple(row[:5]): row for row in old}
    by_task |= {tuple(map(str, row[:5])): row for row in rows}
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *by_task.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--tasks", type=int, default=6, help="per set")
    parser.add_argument("--queries", type=int, default=QUERIES, help="per class, at most")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="unequal shots")
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's recipe out")
    parser.add_argument("--head", action="store_true", help="only ours, with and without the head")
    parser.add_argument("--backbone", default=DEFAULT_BACKBONE, help="or resnet50, vit")
    parser.add_argument("--resnet50", type=Path, help="weights")
    parser.add_argument("--vit", type=Path, help="weights")
    parser.add_argument("--csv", type=Path, help="file to add the results to")
    args = parser.parse_args()
    (backbone,) = load(args.backbone, args)
    found = Accuracies(args.backbone)
    for name in args.sets:
        what = (args.data, name, args.protocol, args.tasks, args.queries)
        tasks = load_tasks(backbone, *what)
        for number, task in enumerate(tasks):
            paper = not (args.no_paper or args.head)
            logits = all_logits(task, backbone, rivals=not args.head, paper=paper)
            found.add(name, number, logits, task.y, task.wanted)
            if args.head:
                ours, experts = (found.found[method, 0.0][-1] for method in (OURS, EXPERTS))
                print(f"{name} {number}: {ours:.1f}, experts {experts:.1f}", flush=True)
    found.print()
    if args.csv:
        replace_rows(args.csv, list(found.rows(args.protocol)))


if __name__ == "__main__":
    main()
