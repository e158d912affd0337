"""Which blocks of an unknown network to tap: the last ones, or blocks spread over the depth.

    python benchmarks/taps.py --data DIR -o FILE.jsonl --vit WEIGHTS --resnet50 WEIGHTS [--tasks 5]
    python benchmarks/taps.py -o FILE.jsonl --report

Extracts all blocks of a ViT-S/14 (224 pixels) and of ResNet-50 once, and fits the default recipe to
subsets of them on the same tasks. Resumes when it is started again. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student

from _backbones import keras_resnet50
from _bench import SETS, names
from _tasks import load_tasks
from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.features import Features
from mivhead.head.blocks import derive_presets
from mivhead.methods import make_method

VIT = "timm:vit_small_patch14_dinov2"
# Positions among the blocks of the network; the first variant is the reference of the report.
VARIANTS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "vit": {
        "last four": (8, 9, 10, 11),
        "last two": (10, 11),
        "last": (11,),
        "1/3, 1/2, 2/3, last": (3, 5, 7, 11),
        "1/2, 2/3, 5/6, last": (5, 7, 9, 11),
        "2/3, last": (7, 11),
    },
    "resnet50": {
        "last two": (2, 3),
        "last three": (1, 2, 3),
        "all four": (0, 1, 2, 3),
        "last": (3,),
    },
}


def load(network: str, args: argparse.Namespace) -> Backbone:
    """Load a network with every block tapped."""
    if network == "vit":
        taps = tuple(f"blocks.{i}" for i in tapped_blocks(network))
        usual = load_backbone(VIT, weights=args.vit, image_size=224).preset.preprocessing
        block = BlockPreset(form="vit", tau=200.0)
        return load_backbone(
            VIT, weights=args.vit, preset=Preset(taps, (block,) * len(taps), usual)
        )
    subject = keras_resnet50(args.resnet50)
    taps = tuple(f"layer{i}" for i in range(1, 5))
    return subject.load(Preset(taps, (BlockPreset(),) * 4, subject.preprocessing))


def tapped_blocks(network: str) -> list[int]:
    return sorted({i for wanted in VARIANTS[network].values() for i in wanted})


def run(args: argparse.Namespace) -> None:
    done = {key(row) for row in read(args.output)} if args.output.exists() else set()
    for network in args.networks:
        backbone = load(network, args)
        tapped = tapped_blocks(network)
        for task in load_tasks(backbone, args.data, args.sets, args.protocol, args.tasks):
            for variant, wanted in VARIANTS[network].items():
                row = {"network": network, "variant": variant, "protocol": args.protocol}
                row |= {"set": task.set, "task": task.number}
                if key(row) in done:
                    continue
                kept = [tapped.index(i) for i in wanted]
                X, queries = (
                    Features([each.blocks[i] for i in kept]) for each in (task.X, task.queries)
                )
                blocks = derive_presets(X)
                if network == "vit":
                    blocks = tuple(replace(block, form="vit", tau=200.0) for block in blocks)
                preset = replace(
                    backbone.preset,
                    taps=tuple(backbone.preset.taps[i] for i in kept),
                    blocks=blocks,
                )
                model = make_method("miv", preset=preset, random_state=0)
                start = time.process_time()
                model.fit(X, task.y)
                row["seconds"] = round(time.process_time() - start, 3)
                row["accuracy"] = float((model.predict(queries) == task.query_labels).mean())
                with args.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(network, task.set, task.number, flush=True)


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("network", "variant", "protocol", "set", "task"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(rows: list[dict[str, Any]]) -> None:
    """Print the mean of each variant, its paired difference from the first one, and its time."""
    for network, variants in VARIANTS.items():
        own = [row for row in rows if row["network"] == network]
        if not own:
            continue
        scores = {
            variant: {
                (r["set"], r["task"]): 100 * r["accuracy"] for r in own if r["variant"] == variant
            }
            for variant in variants
        }
        common = sorted(set.intersection(*(set(found) for found in scores.values())))
        first = np.array([scores[next(iter(variants))][each] for each in common])
        print(f"\n{network}, {own[0]['protocol']}, {len(common)} tasks\n")
        print("| taps | accuracy | difference | s per fit |\n|---|---:|---:|---:|")
        for variant in variants:
            found = np.array([scores[variant][each] for each in common])
            apart = found - first
            half = student.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / np.sqrt(len(apart))
            spent = np.median([r["seconds"] for r in own if r["variant"] == variant])
            difference = f"{apart.mean():+.1f} ± {half:.1f}" if apart.any() else ""
            print(f"| {variant} | {found.mean():.1f} | {difference} | {spent:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--tasks", type=int, default=5, help="per set")
    parser.add_argument("--networks", type=names, default="vit,resnet50")
    parser.add_argument("--resnet50", metavar="WEIGHTS", type=Path)
    parser.add_argument("--vit", metavar="WEIGHTS", type=Path)
    parser.add_argument("--report", action="store_true", help="of what the file holds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.report:
        report(read(args.output))
    else:
        run(args)


if __name__ == "__main__":
    main()
