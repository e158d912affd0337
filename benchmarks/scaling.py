"""How time and memory of a head grow with shots, ways, queries, channels and patches.

    python benchmarks/scaling.py -o scaling.png

One block with random features; one quantity grows, the others stay. Prints, for the upper half of
each range, the exponent b of seconds ~ quantity^b, and draws the curves. Training steps are timed
for all but queries, which are predicted; memory is the peak beyond the features.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from mivhead import Features
from mivhead._util.threads import set_threads, shared_cores
from mivhead.backbones.preset import BlockPreset
from mivhead.benchmark.measuring import PeakMemory
from mivhead.engine.head import PREDICT, Bags, Head
from mivhead.engine.training import Trainer
from mivhead.head.blocks import BlockConfig, resolve_blocks
from mivhead.head.recipe import Recipe
from mivhead.support import SupportSet

QUERIES = 4 * PREDICT  # that have features of their own; more queries repeat them


@dataclass(frozen=True)
class Setting:
    """One block's shape, and a task: every image has one view."""

    ways: int = 10
    shots: int = 5
    queries: int = 500
    channels: int = 256
    side: int = 14  # of the map; patches are its square

    def features(self, images: int) -> Features:
        """Random features, in half precision; pooled to half the side too."""
        shape = (images, self.channels, self.side, self.side)
        drawn = np.random.default_rng(0).random(shape, np.float32)
        return Features([drawn.astype(np.float16)])

    def blocks(self, features: Features) -> list[BlockConfig]:
        """Take the map and one pooled map as candidates."""
        return list(resolve_blocks(features, (BlockPreset((self.side // 2,)),)))

    def train(self) -> tuple[float, float]:
        """Seconds of the fastest of several steps, and peak memory in bytes."""
        labels = np.repeat(np.arange(self.ways), self.shots)
        images = len(labels)
        features = self.features(2 * images)
        support = SupportSet(features[:images], labels, features[images:], np.arange(images))
        recipe, times = Recipe.paper(steps=6), []
        peak = PeakMemory()
        with shared_cores():
            trainer = Trainer(
                support,
                self.blocks(features),
                recipe,
                seed=0,
                on_step=lambda _: times.append(time.perf_counter()),
            )
            times.append(time.perf_counter())
            trainer.fit()
        seconds = [b - a for a, b in pairwise(times)]
        return min(seconds), peak.bytes()

    def predict(self) -> tuple[float, float]:
        """Seconds of all queries, and peak memory in bytes."""
        support = self.features(self.ways * self.shots)
        head = Head.initial(self.blocks(support), Recipe.paper(), seed=0)
        bags = Bags.from_shots([self.shots] * self.ways)
        batch = self.features(min(self.queries, QUERIES))
        with shared_cores():
            bank = head.embed(head.prepare(support))
            peak = PeakMemory()
            start = time.perf_counter()
            for _ in range(0, self.queries, len(batch)):
                head.cosines(bank, bags, batch)
            return time.perf_counter() - start, peak.bytes()


RANGES: dict[str, Sequence[int]] = {
    "shots": (1, 2, 5, 10, 20, 40),
    "ways": (2, 5, 10, 20, 40, 80),
    "queries": (64, 256, 1024, 4096),
    "channels": (32, 64, 128, 256, 512, 1024),
    "side": (4, 7, 10, 14, 20, 28),
}


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope between the middle and the end of a curve on logarithmic axes."""
    middle = len(x) // 2
    return math.log(y[-1] / y[middle]) / math.log(x[-1] / x[middle])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="picture to draw")
    parser.add_argument("--threads", type=int, help="cores to use; by default all of them")
    args = parser.parse_args()
    set_threads(args.threads)
    Setting().train()  # warms up
    curves = {}
    print("| quantity | range | seconds | exponent of time | memory, MiB | exponent of memory |")
    print("|---|---|---|---:|---|---:|")
    for name, values in RANGES.items():
        settings = [replace(Setting(), **{name: value}) for value in values]
        found = [s.predict() if name == "queries" else s.train() for s in settings]
        seconds, memory = [f[0] for f in found], [max(f[1], 2**20) for f in found]
        x = [v * v for v in values] if name == "side" else list(values)
        label = "patches" if name == "side" else name
        curves[label] = x, seconds, memory
        print(
            f"| {label} | {x[0]} to {x[-1]} | {seconds[0]:.4f} to {seconds[-1]:.3f} | "
            f"{exponent(x, seconds):.2f} | {memory[0] / 2**20:.0f} to {memory[-1] / 2**20:.0f} | "
            f"{exponent(x, memory):.2f} |",
            flush=True,
        )
    if args.output:
        draw(curves, args.output)


def draw(curves: dict[str, tuple[list[int], list[float], list[float]]], path: Path) -> None:
    """Draw time and memory against each quantity, on logarithmic axes."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, len(curves), figsize=(2.6 * len(curves), 4.6), squeeze=False)
    for column, (name, (x, seconds, memory)) in enumerate(curves.items()):
        for row, y, label in ((0, seconds, "seconds"), (1, [m / 2**20 for m in memory], "MiB")):
            axes = rows[row][column]
            axes.loglog(x, y, "o-", color="#1f6f8b", markersize=3)
            linear = [y[-1] * each / x[-1] for each in x]
            axes.loglog(x, linear, ":", color="#999999")
            axes.minorticks_off()
            axes.grid(visible=True, alpha=0.3)
            axes.set_xlabel(name if row else "")
            axes.set_ylabel(label if column == 0 else "")
    rows[0][0].set_title("dotted: linear", fontsize=8, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
