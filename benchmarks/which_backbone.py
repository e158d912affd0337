"""Which backbone, or which two together: accuracy and speed on the same tasks.

    python benchmarks/which_backbone.py --data DIR -o FILE.json [--resnet50 WEIGHTS]
        [--protocol "10-way 5-shot"] [--backbones efficientnet_lite0,efficientnet_lite2] [--tasks 2]

Fits the default recipe, without augmented views, and ridge regression to the features of each
backbone and to those of each pair with the first one. Images per second are those of the backbone
alone on decoded images, with one thread. Resumes when it is started again. Figures:
docs/results/backbones.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _backbones import keras_resnet50
from _bench import SETS, names
from _tasks import load_tasks
from mivhead import MIVClassifier
from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.joint import JointBackbone
from mivhead.backbones.presets import PAPER
from mivhead.features import Features
from mivhead.methods import make_method

IMAGES = 48  # to measure the speed of a backbone


def images_per_second(backbone: Backbone) -> float:
    """Measure a backbone on photos of noise, which are as large as many."""
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 256, (IMAGES, 300, 400, 3), np.uint8))
    backbone.extract(images[:4])
    start = time.process_time()
    for first in range(0, IMAGES, 16):
        backbone.extract(images[first : first + 16])
    return IMAGES / (time.process_time() - start)


def measure(variants: dict[str, tuple[Any, Features, Features]], y: Any, truth: Any) -> Any:
    """Accuracy and seconds of the default recipe and of ridge regression, by backbone."""
    found = {}
    for name, (preset, X, queries) in variants.items():
        start = time.process_time()
        model = MIVClassifier(preset=preset, random_state=0).fit(X, y)
        spent = time.process_time() - start
        plain = make_method("ridge", random_state=0).fit(X, y)
        right = [float((each.predict(queries) == truth).mean()) for each in (model, plain)]
        found[name] = [*right, spent]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="all")
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--tasks", type=int, default=2, help="per set")
    parser.add_argument("--backbones", type=names, default="efficientnet_lite0,efficientnet_lite2")
    parser.add_argument("--resnet50", metavar="WEIGHTS", help="add the ResNet-50 of these weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbones: dict[str, Backbone] = {name: load_backbone(name) for name in args.backbones}
    if args.resnet50:
        subject = keras_resnet50(args.resnet50)
        preset = replace(PAPER["resnet50"].preset, preprocessing=subject.preprocessing)
        backbones["resnet50"] = subject.load(preset)
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    group = f"{args.protocol}, {' '.join(backbones)}"
    own = found.setdefault(group, {})
    for name in args.sets:
        keys = [f"{name} {number}" for number in range(args.tasks)]
        if all(key in own for key in keys):
            continue
        streams = {
            each: load_tasks(b, args.data, [name], args.protocol, args.tasks, seed=args.seed)
            for each, b in backbones.items()
        }
        for tasks in zip(*streams.values(), strict=True):
            task = tasks[0]
            variants = {
                each: (backbones[each].preset, loaded.X, loaded.queries)
                for each, loaded in zip(backbones, tasks, strict=True)
            }
            first = next(iter(backbones))
            for each in list(backbones)[1:]:
                preset = JointBackbone([backbones[first], backbones[each]]).preset
                both = [
                    Features([*variants[first][i].blocks, *variants[each][i].blocks])
                    for i in (1, 2)
                ]
                variants[f"{first}+{each}"] = (preset, *both)
            own[f"{name} {task.number}"] = measure(variants, task.y, task.query_labels)
            args.output.write_text(json.dumps(found))
    report(own, args.sets)
    for each, backbone in backbones.items():
        print(f"{each}: {images_per_second(backbone):.1f} images/s with one thread")


def report(own: dict[str, Any], sets: list[str]) -> None:
    """Print a table per group of sets."""
    for title, members in SETS.items():
        rows = [r for key, r in own.items() if key.split()[0] in members and key.split()[0] in sets]
        if not rows:
            continue
        base = 100 * np.array([next(iter(row.values()))[0] for row in rows])
        print(f"\n{title} sets, {len(rows)} tasks\n\n| backbone | miv | minus first | ridge | s |")
        print("|---|---:|---:|---:|---:|")
        for name in rows[0]:
            miv, ridge, spent = np.array([row[name] for row in rows]).T
            difference = 100 * miv - base
            half = 1.96 * difference.std(ddof=1) / np.sqrt(len(rows))
            print(
                f"| {name} | {100 * miv.mean():.1f} | {difference.mean():+.1f} ± {half:.1f} "
                f"| {100 * ridge.mean():.1f} | {np.median(spent):.2f} |"
            )


if __name__ == "__main__":
    main()
