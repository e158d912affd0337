"""How fast a head is trained and predicts, beside the machine's own limit.

    python benchmarks/adapt.py --quick
    python benchmarks/adapt.py --json adapt.json

For the shapes of several backbones and tasks from 5-way 1-shot to 50-way with 500 support images:
seconds of one adaptation (40 steps), of 1,000 predictions, and peak memory of the adaptation over
the features as stored. Beside them, in the same run: (a) the formulas as they read (`_plain.py`;
10-way 5-shot only, a few steps, scaled), (b) logistic regression on pooled features, (c) the limit:
patches read once forward and once backward at the measured bandwidth, plus all floating-point
operations at the measured rate of matrix products. `--quick` takes less than a minute, all of it
about half an hour on two free cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression

from _plain import train as plain_train
from mivhead import Features, Preset
from mivhead.backbones.paper import PAPER
from mivhead.backbones.presets import PRESETS
from mivhead.benchmark.measuring import PeakMemory
from mivhead.head.bags import Bags
from mivhead.head.config import BlockConfig, Recipe, resolve_blocks
from mivhead.head.head import MIVHead
from mivhead.head.training import train
from mivhead.preset import BlockPreset

STEPS = 40
PLAIN_STEPS = 3
LONG = 4e9  # features above so many bytes: fewer steps are run, and scaled


@dataclass(frozen=True)
class Shapes:
    """What a backbone gives: the shape of each block's map, and whether it has tokens."""

    maps: tuple[tuple[int, int, int], ...]
    blocks: tuple[BlockPreset, ...]
    tokens: bool = False

    def features(self, images: int, generator: torch.Generator) -> Features:
        """Draw random features, stored in half precision."""
        parts: dict[str, torch.Tensor] = {}
        for i, shape in enumerate(self.maps):
            parts[f"block{i}.map"] = torch.randn(images, *shape, generator=generator).relu_().half()
            if self.tokens:
                parts[f"block{i}.token"] = torch.randn(images, shape[0], generator=generator).half()
        return Features.from_tensors(parts)


@dataclass(frozen=True)
class Task:
    """Classes, shots of each class, and augmented views of each shot."""

    ways: int
    shots: int
    views: int

    @property
    def support(self) -> int:
        """Support images."""
        return self.ways * self.shots

    @property
    def images(self) -> int:
        """Pseudo-queries: the support and its views."""
        return self.support * (1 + self.views)

    def labels(self) -> torch.Tensor:
        """Class numbers of all pseudo-queries, the support first."""
        return torch.arange(self.ways).repeat_interleave(self.shots).repeat(1 + self.views)


def _paper(name: str, *maps: tuple[int, int, int], tokens: bool = False) -> Shapes:
    return Shapes(maps, PAPER[name].preset.blocks, tokens)


LITE0: Preset = PRESETS["efficientnet_lite0"]
SHAPES = {
    "EfficientNet-Lite0, two blocks": Shapes(
        ((112, 14, 14), (320, 7, 7)), (BlockPreset((13, 11, 9, 8)), BlockPreset((6, 5, 4)))
    ),
    "EfficientNet-Lite0, as shipped": Shapes(
        ((112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)), LITE0.blocks
    ),
    "ViT-S/16": _paper("dino_vits16", *[(384, 14, 14)] * 4, tokens=True),
    "ViT-S/8": _paper("dino_vits8", *[(384, 28, 28)] * 4, tokens=True),
    "ResNet-50": _paper("resnet50", (1024, 14, 14), (2048, 7, 7)),
    "CLIP ViT-L/14": _paper("clip_vitl14", *[(1024, 16, 16)] * 2, tokens=True),
}
TASKS = {
    "5-way 1-shot": Task(5, 1, 15),
    "10-way 5-shot": Task(10, 5, 3),
    "20-way 10-shot": Task(20, 10, 2),
    "50-way 10-shot": Task(50, 10, 2),
}
STANDARD = "10-way 5-shot"
QUICK = ("EfficientNet-Lite0, two blocks", "ViT-S/16")


@dataclass(frozen=True)
class Machine:
    """What the processor can do, measured with as many threads as the head has."""

    bytes_per_second: float
    flops: float

    @classmethod
    def measure(cls) -> Machine:
        """Read a large array; multiply matrices."""
        array, matrix = torch.ones(50_000_000), torch.randn(1024, 1024)
        return cls(
            array.numel() * 4 / best_of(array.sum, 5),
            2 * 1024**3 / best_of(lambda: matrix @ matrix, 10),
        )

    def limit(self, blocks: Sequence[BlockConfig], task: Task) -> float:
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
        return STEPS * (4 * numbers / self.bytes_per_second + flops / self.flops)


@dataclass(frozen=True)
class Row:
    """Figures of one shape and task."""

    shapes: str
    task: str
    adapt: float  # seconds
    limit: float  # seconds
    logistic: float  # seconds
    predict: float  # seconds per 1,000 queries
    plain: float | None  # seconds of the formulas as they read
    memory: float  # peak of the adaptation over features and candidates as stored
    loss_error: float | None  # largest difference of losses to the formulas as they read


def best_of(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(name: str, task_name: str, machine: Machine, *, plain: bool) -> Row:
    """Time one shape and task."""
    shapes, task = SHAPES[name], TASKS[task_name]
    generator = torch.Generator().manual_seed(0)
    features = shapes.features(task.images, generator)
    labels = task.labels()
    blocks = resolve_blocks(features, shapes.blocks)
    bags = Bags.from_labels(labels[: task.support], task.ways)
    stored = sum(t.nbytes for t in features.tensors.values())
    candidates = sum(4 * task.images * b.channels * _patches(b) for b in blocks)
    steps = STEPS if stored + candidates < LONG else 4
    recipe = Recipe(steps=steps)

    def head() -> MIVHead:
        return MIVHead(blocks, recipe, torch.Generator().manual_seed(0))

    def adapt() -> list[float]:
        trained = head()
        return train(trained, trained.prepare(features), labels, bags)

    peak = PeakMemory()
    losses = adapt()  # also warms up
    memory = peak.bytes()
    once = best_of(lambda: head().prepare(features), 1)
    seconds = best_of(adapt, 3 if steps == STEPS else 1)
    plain_seconds, error = None, None
    if plain:
        plain_seconds, error = time_plain(
            head(), features.to(torch.float32), labels, task.support, losses
        )
    return Row(
        name,
        task_name,
        once + (seconds - once) * STEPS / steps,
        machine.limit(blocks, task),
        time_logistic(features, labels),
        time_predictions(head(), features, task, bags),
        plain_seconds,
        memory / candidates,
        error,
    )


def _patches(block: BlockConfig) -> int:
    return sum(h * w for h, w in block.candidate_sizes)


def time_plain(
    head: MIVHead, features: Features, labels: torch.Tensor, shots: int, losses: list[float]
) -> tuple[float, float]:
    """Seconds of an adaptation by the formulas as they read, and the difference of losses."""
    start = time.perf_counter()
    theirs = plain_train(head, features, labels, shots, PLAIN_STEPS)
    seconds = (time.perf_counter() - start) / PLAIN_STEPS * STEPS
    return seconds, max(abs(a - b) for a, b in zip(losses[:PLAIN_STEPS], theirs, strict=True))


def time_logistic(features: Features, labels: torch.Tensor) -> float:
    """Seconds of a logistic regression on the average of the last block's map."""
    last = features.blocks[-1].map
    assert last is not None
    x = last.float().mean(dim=(2, 3)).numpy()
    x /= (x**2).sum(axis=1, keepdims=True) ** 0.5
    return best_of(lambda: LogisticRegression(C=10.0, max_iter=2000).fit(x, labels.numpy()), 1)


def time_predictions(head: MIVHead, features: Features, task: Task, bags: Bags) -> float:
    """Seconds per 1,000 queries, from features as stored to logits."""
    queries = features[: min(len(features), 200)]
    with torch.inference_mode():
        support = head.embed(head.prepare(features[: task.support]))

        def predict() -> torch.Tensor:
            return head.compare(head.embed(head.prepare(queries)), support, bags)

        predict()  # warms up
        return best_of(predict, 3) * 1000 / len(queries)


def report(rows: Sequence[Row]) -> str:
    """Lay out the figures as Markdown tables."""
    header = "| shapes | task | adaptation s | limit s | times the limit | plain / ours | "
    header += "logistic s | 1,000 predictions s | peak memory / candidates |"
    lines = [header, "|---|---|" + "---:|" * 7]
    for r in rows:
        plain = "" if r.plain is None else f"{r.plain / r.adapt:.0f}"
        lines.append(
            f"| {r.shapes} | {r.task} | {r.adapt:.2f} | {r.limit:.2f} | {r.adapt / r.limit:.1f} | "
            f"{plain} | {r.logistic:.2f} | {r.predict:.2f} | {r.memory:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, 10-way 5-shot only")
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--tasks", choices=list(TASKS), nargs="+", default=list(TASKS))
    parser.add_argument("--no-plain", action="store_true", help="leave the slow yardstick out")
    parser.add_argument("--threads", type=int, help="cores to use; by default PyTorch's choice")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = Machine.measure()
    print(
        f"{torch.get_num_threads()} threads, {machine.bytes_per_second / 1e9:.1f} GB/s, "
        f"{machine.flops / 1e9:.0f} Gflop/s"
    )
    rows = []
    for name in QUICK if args.quick else args.shapes:
        for task in (STANDARD,) if args.quick else args.tasks:
            plain = task == STANDARD and not args.no_plain
            rows.append(measure(name, task, machine, plain=plain))
            print(f"{name}, {task}: {rows[-1].adapt:.2f} s", flush=True)
    print("\n" + report(rows))
    if args.json:
        document = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
