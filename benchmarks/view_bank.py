"""Whether it matters that the benchmark takes views from a bank, not fresh ones for every task.

    python benchmarks/view_bank.py --data DIR --sets eurosat,cifar10 [--tasks 20] [--json out.json]

An image that serves as a shot in several tasks has the same views in all of them if they come from
a bank. Here every method is trained on every task twice, from the same initial weights: with the
bank's views, and with views that were made for this task alone. Prints both accuracies and the
paired difference (fresh - bank) with its 95 % interval, by method and set and over all tasks. Each
task costs two trainings of each method and the fresh views' pass through the backbone: some 5 s on
one core for 5-way 1-shot tasks with the default backbone. Expect an interval that holds 0.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mivhead import Features
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import Backbone, extract_all
from mivhead.benchmark.plan import ViewRule, view_seed
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.benchmark.tasks import Task
from mivhead.datasets.sets import open_set
from mivhead.images.augmentation import augment
from mivhead.images.imageset import ImageSet
from mivhead.methods import make_method

Pictures = Sequence[tuple[str, int | None]]  # ids, and seeds of views


class Extractor:
    """Features of a set's images and views; those of the bank are extracted once and kept."""

    def __init__(self, backbone: Backbone, images: ImageSet) -> None:
        self._backbone = backbone
        self._images = images
        self._rows = {id_: row for row, id_ in enumerate(images.ids)}
        self._kept: dict[tuple[str, int | None], Features] = {}

    def fresh(self, pictures: Pictures) -> Features:
        """Features of pictures, extracted now."""
        return extract_all(self._backbone, self._load(pictures))

    def kept(self, pictures: Pictures) -> Features:
        """Features of pictures, each extracted once."""
        missing = [each for each in dict.fromkeys(pictures) if each not in self._kept]
        if missing:
            self._kept |= dict(zip(missing, self.fresh(missing), strict=True))
        return Features.concat([self._kept[each] for each in pictures])

    def _load(self, pictures: Pictures) -> Iterator[Image.Image]:
        size = self._backbone.preset.preprocessing.size
        for id_, seed in pictures:
            image = self._images.load(self._rows[id_])
            yield image if seed is None else augment(image, size, seed)


def compare(
    extractor: Extractor,
    backbone: Backbone,
    methods: Sequence[str],
    task: Task,
    number: int,
    rule: ViewRule,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Accuracies of each method with views of the bank and with fresh ones."""
    counts = rule.count(task)
    view_of = np.repeat(np.arange(len(counts)), counts)
    support = extractor.kept([(id_, None) for id_ in task.support])
    queries = extractor.kept([(id_, None) for id_ in task.queries])

    def views(own_seed: int) -> Pictures:
        return [
            (id_, view_seed(own_seed, id_, view))
            for id_, count in zip(task.support, counts, strict=True)
            for view in range(count)
        ]

    def accuracy(name: str, extra: Features) -> float:
        method = make_method(name, preset=backbone.preset, random_state=number)
        method.fit(support, task.support_labels, views=extra, view_of=view_of)
        return float((method.predict(queries) == np.array(task.query_labels)).mean())

    # No other task, and no bank, has the seed of this task's fresh views.
    bank, fresh = extractor.kept(views(seed)), extractor.fresh(views(seed + 1 + number))
    return {name: (accuracy(name, bank), accuracy(name, fresh)) for name in methods}


def line(name: str, pairs: Iterable[tuple[float, float]]) -> str:
    bank, fresh = 100 * np.array(list(pairs)).T
    half = 1.96 * (fresh - bank).std() / np.sqrt(len(bank))
    difference = f"{(fresh - bank).mean():+.2f} ± {half:.2f}"
    return f"| {name} | {len(bank)} | {bank.mean():.2f} | {fresh.mean():.2f} | {difference} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"), help="folder of data sets")
    parser.add_argument("--sets", required=True, help="names with commas between")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--methods", default="miv,miv-paper", help="with commas between")
    parser.add_argument("--protocol", default="5-way 1-shot")
    parser.add_argument("--views", type=int, default=4, help="at most so many of an image")
    parser.add_argument("--backbone", default=DEFAULT_BACKBONE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set MIV_DATA")
    torch.set_num_threads(1)  # as in the benchmark
    backbone = load_backbone(args.backbone)
    rule = ViewRule(backbone.preset.threshold, "ceil", args.views)
    methods = args.methods.split(",")
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in methods}
    print("| method, set | tasks | bank | fresh | fresh - bank |\n|---|" + "---:|" * 4, flush=True)
    for name in args.sets.split(","):
        images = open_set(name, args.data)
        tasks = sample_tasks(images, name, Protocol.parse(args.protocol), args.seed, args.tasks)
        if isinstance(tasks, LeftOut):
            print(f"{tasks.reason}", flush=True)
            continue
        extractor = Extractor(backbone, images)
        found = [
            compare(extractor, backbone, methods, task, number, rule, args.seed)
            for number, task in enumerate(tasks.tasks)
        ]
        for method in methods:
            pairs[method][name] = [own[method] for own in found]
            print(line(f"{method}, {name}", pairs[method][name]), flush=True)
    for method, sets in pairs.items():
        print(line(f"{method}, all", (pair for own in sets.values() for pair in own)))
    if args.json:
        args.json.write_text(json.dumps(pairs) + "\n")


if __name__ == "__main__":
    main()
