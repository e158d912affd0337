"""Whether it matters that tasks of a benchmark share the views of an image.

    python benchmarks/explored/shared_views.py --data DIR --sets eurosat,cifar10
        [--tasks 20] [--json FILE]

An image that is a shot in several tasks has the same augmented views in all of them. Here every
method is trained on every task twice, from the same initial weights: with these shared views, and
with fresh views that no other task has. Prints both accuracies and the paired difference (fresh -
shared) with its 95 % interval, by method and set and over all tasks. Each task costs two trainings
of each method and the pass of the fresh views through the backbone: some 5 s on one core for 5-way
1-shot tasks with the default backbone. Expect an interval that contains 0.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import Backbone
from mivhead.benchmark.inputs import ViewLimit
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.benchmark.tasks import Task
from mivhead.datasets.sets import open_set
from mivhead.extraction import FeatureCache, extract_table
from mivhead.features import FeatureTable
from mivhead.images.augmentation import number_views
from mivhead.images.imageset import ImageSet
from mivhead.methods import make_method


def compare(
    backbone: Backbone,
    images: ImageSet,
    cache: FeatureCache,
    methods: Sequence[str],
    task: Task,
    number: int,
    rule: ViewLimit,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Return the accuracies of each method with shared views and with fresh ones."""
    rows = {id_: row for row, id_ in enumerate(images.ids)}

    def extract(ids: Sequence[str], counts: Sequence[int], own_seed: int) -> FeatureTable:
        chosen = images.take(rows[id_] for id_ in ids)
        plan = number_views(counts, own_seed)
        return extract_table(backbone, chosen, plan, cache=cache, verbose=False)

    queries = extract(task.queries, [0] * len(task.queries), seed).features

    def accuracy(name: str, support: FeatureTable) -> float:
        method = make_method(name, preset=backbone.preset, random_state=number)
        method.fit(
            support.features, task.support_labels, views=support.views, view_of=support.view_of
        )
        return float((method.predict(queries) == np.array(task.query_labels)).mean())

    counts = rule.count(task)
    shared = extract(task.support, counts, seed)
    fresh = extract(task.support, counts, seed + 1 + number)  # the seed of no other task
    return {name: (accuracy(name, shared), accuracy(name, fresh)) for name in methods}


def line(name: str, pairs: Iterable[tuple[float, float]]) -> str:
    shared, fresh = 100 * np.array(list(pairs)).T
    half = 1.96 * (fresh - shared).std() / np.sqrt(len(shared))
    difference = f"{(fresh - shared).mean():+.2f} ± {half:.2f}"
    return f"| {name} | {len(shared)} | {shared.mean():.2f} | {fresh.mean():.2f} | {difference} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"), help="folder of data sets")
    parser.add_argument("--sets", required=True, help="names, separated by commas")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--methods", default="miv,miv-paper", help="names, separated by commas")
    parser.add_argument("--protocol", default="5-way 1-shot")
    parser.add_argument("--views", type=int, default=4, help="maximum number per image")
    parser.add_argument("--backbone", default=DEFAULT_BACKBONE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set MIV_DATA")
    torch.set_num_threads(1)  # as in the benchmark
    backbone = load_backbone(args.backbone)
    rule = ViewLimit(backbone.preset.threshold, "ceil", args.views)
    methods = args.methods.split(",")
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in methods}
    print(
        "| method, set | tasks | shared | fresh | fresh - shared |\n|---|" + "---:|" * 4, flush=True
    )
    for name in args.sets.split(","):
        images = open_set(name, args.data)
        tasks = sample_tasks(images, name, Protocol.parse(args.protocol), args.seed, args.tasks)
        if isinstance(tasks, LeftOut):
            print(f"{tasks.reason}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            cache = FeatureCache(folder)
            found = [
                compare(backbone, images, cache, methods, task, number, rule, args.seed)
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
