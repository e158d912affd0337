"""How fast a head is trained and predicts, compared with the limit of the machine.

    python benchmarks/adapt.py --quick
    python benchmarks/adapt.py --json adapt.json

For the shapes of several backbones and tasks from 5-way 1-shot to 50-way with 500 support images:
seconds of one adaptation (40 steps), of 1,000 predictions, and peak memory of the adaptation over
the features and candidates as stored. In the same run: (a) the formulas as they read
(`_plain.py`; 10-way 5-shot only, a few steps, scaled), (b) the limit: patches read once forward and
once backward, in single precision, at the measured bandwidth, plus all floating-point operations at
the measured rate of matrix products. Likewise for
a whole fit of the default recipe: three heads of 15 steps, the ridge experts and stacking.

A limit comes from the fastest of several trials, so the adaptation it is compared with has the
fastest step of several, taken in turns with these; `--json` also holds the median. `--quick` takes
less than a minute, all of it about six.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from _plain import initial_head, plain_head
from _plain import logits as plain_logits
from _plain import train as plain_train
from _shapes import SHAPES, TASKS, Task
from mivhead import Features, MIVClassifier
from mivhead._util.threads import run_parts, set_threads, shared_cores, thread_count
from mivhead.features import SupportSet
from mivhead.head.components import PREDICT, Head, bag_starts
from mivhead.head.recipe import BlockConfig, Recipe, resolve_blocks
from mivhead.head.train import Trainer
from mivhead_bench.benchmark.memory import PeakMemory
from mivhead_bench.methods.cost import TaskSize, experts_products

STEPS = 40
PLAIN_STEPS = 3
PLAIN_QUERIES = 50
QUERIES = 4 * PREDICT  # images predicted in one call
STANDARD = "10-way 5-shot"
RECIPES = ("paper", "mivhead")
QUICK = ("EfficientNet-Lite0, two blocks", "ViT-S/16")
SECONDS = 4.0  # for which steps are timed,
ROUNDS = 3  # alternating this often with the machine's limits


@dataclass(frozen=True)
class Machine:
    """What the processor can do, measured with as many threads as the head has."""

    bytes_per_second: float
    flops: float

    @classmethod
    def measure(cls) -> Machine:
        """Read a large array; multiply matrices."""
        threads = thread_count()
        arrays = np.array_split(np.ones(50_000_000, np.float32), threads)
        matrix = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
        slabs = np.array_split(matrix, threads)

        def read() -> None:
            run_parts(lambda i: arrays[i] @ arrays[i], threads)

        def multiply() -> None:
            run_parts(lambda i: slabs[i] @ matrix, threads)

        with shared_cores():
            return cls(
                sum(each.nbytes for each in arrays) / best_of(read, 5),
                2 * 1024**3 / best_of(multiply, 10),
            )

    def better(self, other: Machine) -> Machine:
        """Take the best of two measurements."""
        return Machine(
            max(self.bytes_per_second, other.bytes_per_second), max(self.flops, other.flops)
        )

    def limit(self, blocks: Sequence[BlockConfig], task: Task, steps: int = STEPS) -> float:
        """Seconds that an adaptation takes at least."""
        numbers, flops = 0, 0.0
        pairs = task.images * task.support
        for block in blocks:
            C = block.channels
            patches = task.images * C * sum(h * w for h, w in block.candidate_sizes)
            numbers += 2 * patches  # forward and backward
            flops += 4 * 2 * patches  # scores and sums, forward and backward
            flops += 3 * 3 * 2 * task.images * C * C  # W^K, W^V, kappa; backward twice as much
            flops += 3 * 2 * 2 * pairs * C  # A V and A K
            flops += 3 * 3 * pairs * C  # the L1 distance
            flops += 3 * 3 * 2 * task.images * task.ways * C  # mean, norm and dot product
        return steps * (4 * numbers / self.bytes_per_second + flops / self.flops)

    def default_limit(self, blocks: Sequence[BlockConfig], task: Task) -> float:
        """Seconds that a fit of the default recipe takes at least.

        The head, two heads on half of the shots each for stacking, and the ridge experts: their
        matrix products, and reading the support once.
        """
        head = [block for block in blocks if not block.plain] or list(blocks)
        tasks = [task]
        if task.shots > 1:
            half = task.shots // 2
            tasks += [replace(task, shots=half), replace(task, shots=task.shots - half)]
        heads = sum(self.limit(head, each, Recipe().steps) for each in tasks)
        size = TaskSize((task.shots,) * task.ways, (0,) * task.ways)
        values = sum(b.channels * b.grid[0] * b.grid[1] for b in blocks if b.grid is not None)
        shapes = [np.ones((2, b.channels, *(b.grid or ())), np.float32) for b in blocks]
        fitted = MIVClassifier("experts").fit(shapes, [0, 1])
        experts = 2 * experts_products(fitted, size) / self.flops
        return heads + experts + 4 * task.support * values / self.bytes_per_second


@dataclass(frozen=True)
class Row:
    """Figures of one shape and task."""

    shapes: str
    task: str
    adapt: float  # seconds, with the fastest step
    adapt_median: float  # seconds, with the median step
    limit: float  # seconds
    predict: float  # seconds per 1,000 queries
    memory: float  # peak of the adaptation over features and candidates as stored
    plain: float | None = None  # seconds of an adaptation by the formulas as they read
    plain_predict: float | None = None  # seconds per 1,000 queries, likewise
    loss_error: float | None = None  # largest difference of losses to the formulas as they read


@dataclass(frozen=True)
class Adaptation:
    """Losses and seconds of an adaptation."""

    losses: list[float]
    once: float  # seconds in which candidates are derived
    steps: list[float]  # seconds of every step but the first, which derives them

    @classmethod
    def time(cls, support: SupportSet, blocks: Sequence[BlockConfig], recipe: Recipe) -> Adaptation:
        """Train a head."""
        times = [time.perf_counter()]

        def lap(_: float = 1.0) -> None:
            times.append(time.perf_counter())

        with shared_cores():
            assert support.views is not None
            for i, layer in enumerate(initial_head(blocks, recipe).layers):
                layer.prepare(support.features.blocks[i], support.views.blocks[i])
            lap()
            ((_, losses, _),) = Trainer(support, blocks, recipe, seed=0, on_step=lap).fit()
        once, _, *steps = (after - before for before, after in pairwise(times))
        return cls(losses, once, steps)


def best_of(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(name: str, task_name: str, *, plain: bool) -> Row:
    """Time one shape and task."""
    shapes, task = SHAPES[name], TASKS[task_name]
    features = shapes.features(task.images)
    support = task.support_set(features)
    blocks = resolve_blocks(features, shapes.blocks)
    patches = sum(b.channels * sum(h * w for h, w in b.candidate_sizes) for b in blocks)
    stored = features.nbytes + task.images * patches * features.dtype.itemsize

    def train(steps: int) -> Adaptation:
        return Adaptation.time(support, blocks, Recipe.paper(steps=steps))

    machine = Machine.measure()
    peak = PeakMemory()
    first = train(PLAIN_STEPS if plain else 2)  # the second step has gradients of the first
    memory = features.nbytes + peak.bytes()
    runs = []
    for _ in range(ROUNDS):
        runs.append(train(max(2, min(STEPS, round(SECONDS / ROUNDS / min(first.steps))))))
        machine = machine.better(Machine.measure())
    once, seconds = min(run.once for run in runs), [s for run in runs for s in run.steps]
    head = initial_head(blocks, Recipe.paper())
    row = Row(
        name,
        task_name,
        adapt=once + STEPS * min(seconds),
        adapt_median=once + STEPS * statistics.median(seconds),
        limit=machine.limit(blocks, task),
        predict=time_predictions(head, features, task),
        memory=memory / stored,
    )
    if not plain:
        return row
    # In a process of its own, so that neither of the two measurements disturbs the other.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        figures = pool.submit(time_plain, name, task_name, first.losses, thread_count()).result()
    return replace(row, **figures)


def measure_default(name: str, task_name: str) -> Row:
    """Time one shape and task with the default recipe: a whole fit, and its predictions."""
    shapes, task = SHAPES[name], TASKS[task_name]
    features, labels = shapes.features(task.images), task.labels()
    blocks = resolve_blocks(features, shapes.blocks)
    support, views = features[: task.support], features[task.support :]
    given = {"views": views, "view_of": task.view_of()}
    classifier = MIVClassifier(preset=shapes.blocks, random_state=0)
    machine, seconds = Machine.measure(), []
    classifier.fit(support, labels[: task.support], **given)  # loads what it needs
    peak = PeakMemory()
    classifier.fit(support, labels[: task.support], **given)
    memory = features.nbytes + peak.bytes()
    for _ in range(ROUNDS):
        seconds.append(best_of(lambda: classifier.fit(support, labels[: task.support], **given), 1))
        machine = machine.better(Machine.measure())
    queries = repeated(features, QUERIES)
    return Row(
        name,
        f"{task_name}, default recipe",
        adapt=min(seconds),
        adapt_median=statistics.median(seconds),
        limit=machine.default_limit(blocks, task),
        predict=best_of(lambda: classifier.logits(queries), 5) * 1000 / len(queries),
        memory=memory / features.nbytes,
    )


def time_plain(name: str, task_name: str, losses: list[float], threads: int) -> dict[str, float]:
    """Figures of the formulas as they read."""
    torch.set_num_threads(threads)
    shapes, task = SHAPES[name], TASKS[task_name]
    features, labels = shapes.features(task.images), torch.tensor(task.labels())
    blocks = resolve_blocks(features, shapes.blocks)
    plain = plain_head(initial_head(blocks, Recipe.paper()))
    features = features.to("float32")
    support = features[: task.support], labels[: task.support]
    start = time.perf_counter()
    with torch.inference_mode():
        plain_logits(plain, features[:PLAIN_QUERIES], *support)
    predicted = time.perf_counter()
    theirs = plain_train(plain, features, labels, task.support, PLAIN_STEPS)
    trained = time.perf_counter()
    return {
        "plain": (trained - predicted) * STEPS / PLAIN_STEPS,
        "plain_predict": (predicted - start) * 1000 / PLAIN_QUERIES,
        "loss_error": max(abs(a - b) for a, b in zip(losses, theirs, strict=True)),
    }


def time_predictions(head: Head, features: Features, task: Task) -> float:
    """Seconds per 1,000 queries, from features as stored to cosines, as the classifier does it."""
    queries, starts = repeated(features, QUERIES), bag_starts([task.shots] * task.ways)
    with shared_cores():
        support = head.embed(features[: task.support])
        best = best_of(lambda: head.cosines(support, starts, queries), 6)  # the first warms up
    return best * 1000 / QUERIES


def repeated(features: Features, count: int) -> Features:
    """Take `count` images, some of them several times if there are too few."""
    return features[np.arange(count) % len(features)]


def report(rows: Sequence[Row]) -> str:
    """Lay out the figures as a Markdown table."""
    header = "| shapes | task | adaptation s | limit s | times the limit | plain / ours | "
    header += "1,000 predictions s | plain / ours | peak memory / stored |"
    lines = [header, "|---|---|" + "---:|" * 7]
    for r in rows:
        plain = "" if r.plain is None else f"{r.plain / r.adapt:.0f}"
        predict = "" if r.plain_predict is None else f"{r.plain_predict / r.predict:.0f}"
        lines.append(
            f"| {r.shapes} | {r.task} | {r.adapt:.2f} | {r.limit:.2f} | {r.adapt / r.limit:.1f} | "
            f"{plain} | {r.predict:.2f} | {predict} | {r.memory:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, 10-way 5-shot only")
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--tasks", choices=list(TASKS), nargs="+", default=list(TASKS))
    parser.add_argument("--recipes", choices=RECIPES, nargs="+", default=RECIPES)
    parser.add_argument("--no-plain", action="store_true", help="leave the slow yardstick out")
    parser.add_argument("--threads", type=int, help="cores to use; by default all of them")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    set_threads(args.threads)
    machine = Machine.measure()
    print(
        f"{thread_count()} threads, {machine.bytes_per_second / 1e9:.1f} GB/s, "
        f"{machine.flops / 1e9:.0f} Gflop/s"
    )
    rows = []
    for name in QUICK if args.quick else args.shapes:
        for task in (STANDARD,) if args.quick else args.tasks:
            plain = task == STANDARD and not args.no_plain
            found = [measure(name, task, plain=plain)] if "paper" in args.recipes else []
            if "mivhead" in args.recipes:
                found.append(measure_default(name, task))
            for row in found:
                ratio = row.adapt / row.limit
                print(f"{name}, {row.task}: {row.adapt:.2f} s, {ratio:.2f} times the limit")
            rows += found
    print(f"\n{report(rows)}")
    if args.json:
        document = {
            "threads": thread_count(),
            "machine": asdict(machine),
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
