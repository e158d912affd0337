"""Why small images are hard: the effect of size and filter of upsampling, on the same tasks.

    python benchmarks/explored/low_resolution.py --data DIR [--sets cifar10,eurosat] [--tasks 4]

Images of 32 or 64 pixels are upsampled for the backbone. Here they are upsampled to several sizes
with several filters, and classified by the MIV-head and by ridge regression on the deepest block
(10-way 5-shot, no views). Takes about five minutes per set on one core. The figures are in
docs/explanation/the-recipe.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mivhead import Features
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.benchmark.tasks import Task
from mivhead.datasets.sets import open_set
from mivhead.images.imageset import ImageSet
from mivhead.methods import make_method

BATCH = 32
VARIANTS = [
    *((size, "BICUBIC") for size in (96, 128, 160, 192, 224, 288)),
    *((224, name) for name in ("BILINEAR", "LANCZOS", "NEAREST")),
]


def measure(images: ImageSet, tasks: Sequence[Task], size: int, name: str) -> dict[str, float]:
    """Mean accuracy of both methods, with images upsampled to a size by a filter."""
    usual = load_backbone(DEFAULT_BACKBONE).preset
    preset = replace(usual, preprocessing=replace(usual.preprocessing, size=size))
    backbone = load_backbone(DEFAULT_BACKBONE, preset=preset)
    rows = {id_: row for row, id_ in enumerate(images.ids)}
    kept: dict[str, Features] = {}

    def features(ids: Sequence[str]) -> Features:
        missing = [id_ for id_ in ids if id_ not in kept]
        for start in range(0, len(missing), BATCH):
            some = missing[start : start + BATCH]
            pictures = [images.load(rows[id_]).convert("RGB") for id_ in some]
            resized = [p.resize((size, size), Image.Resampling[name]) for p in pictures]
            kept.update(zip(some, backbone.extract(resized), strict=True))
        return Features.concat([kept[id_] for id_ in ids])

    found: dict[str, list[float]] = {"miv": [], "ridge": []}
    for task in tasks:
        support, queries = features(task.support), features(task.queries)
        for method, scores in found.items():
            classifier = make_method(method, preset=preset)
            classifier.fit(support, np.asarray(task.support_labels))
            scores.append(100 * classifier.score(queries, np.asarray(task.query_labels)))
    return {method: float(np.mean(scores)) for method, scores in found.items()}


def main() -> None:
    """Print a line for every set, size and filter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="cifar10,eurosat")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.sets.split(","):
        images = open_set(name, args.data)
        tasks = sample_tasks(images, name, Protocol.parse("10-way 5-shot"), args.seed, args.tasks)
        if isinstance(tasks, LeftOut):
            parser.error(f"{name}: {tasks.reason}")
        for size, filter_ in VARIANTS:
            means = measure(images, tasks.tasks, size, filter_)
            text = "  ".join(f"{method} {mean:.1f}" for method, mean in means.items())
            print(f"{name}  {size} px  {filter_.lower():8}  {text}", flush=True)


if __name__ == "__main__":
    main()
