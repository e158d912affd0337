"""Which backbone, or which two together: accuracy and speed on the same tasks.

    python benchmarks/which_backbone.py --data DIR -o FILE.jsonl [--protocol "10-way 5-shot"]
        [--backbones efficientnet_lite0,efficientnet_lite0+efficientnet_lite2,resnet50,vit]
        [--resnet50 WEIGHTS] [--vit WEIGHTS] [--methods miv,miv-paper,ridge,logistic] [--tasks 10]
    python benchmarks/which_backbone.py -o FILE.jsonl --report
    python benchmarks/which_backbone.py --speed [--backbones ...]

Fits each method to the features of each backbone, or of several joined by `+`. `resnet50` and `vit`
(a ViT-S/14 at 224 pixels) have the weights of a file. The number of views of each shot is at most
that of the default recipe: four with one shot, none with five. Resumes when it is started again, so
backbones can be run one after another into one file. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from _backbones import keras_resnet50
from _bench import SETS, names
from _tasks import LoadedTask, load_tasks
from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.joint import JointBackbone
from mivhead.backbones.preset import Preset
from mivhead.backbones.presets import PAPER
from mivhead.benchmark.samplers import Protocol
from mivhead.features import Features
from mivhead.methods import make_method

IMAGES = 48  # to measure the speed of a backbone
VIT = "timm:vit_small_patch14_dinov2"
OURS = ("miv", "miv-paper")
COLUMNS = (
    *("backbone", "tasks", "miv", "paper's recipe", "minus it", "best plain head", "minus it"),
    *("s", "minus first backbone"),
)
VIEWS = 4  # of each shot at most, if there are fewer than five


def load(name: str, args: argparse.Namespace) -> list[Backbone]:
    """Load the backbones whose names are joined by `+`."""
    found = []
    for part in name.split("+"):
        if part == "resnet50":
            subject = keras_resnet50(args.resnet50)
            preset = replace(PAPER["resnet50"].preset, preprocessing=subject.preprocessing)
            found.append(subject.load(preset))
        elif part == "vit":
            found.append(load_backbone(VIT, weights=args.vit, image_size=224))
        else:
            found.append(load_backbone(part))
    return found


def joined_tasks(
    backbones: list[Backbone], *what: Any, **how: Any
) -> Iterator[tuple[LoadedTask, Preset]]:
    """Tasks with the blocks of all backbones, and the preset of these."""
    preset = backbones[0].preset if len(backbones) == 1 else JointBackbone(backbones).preset
    streams = [load_tasks(backbone, *what, **how) for backbone in backbones]
    for parts in zip(*streams, strict=True):

        def joined(pick: Callable[[LoadedTask], Any], parts: Any = parts) -> Features:
            return Features([block for part in parts for block in pick(part).blocks])

        views = joined(lambda p: p.all_views) if parts[0].all_views is not None else None
        X, queries = joined(lambda p: p.X), joined(lambda p: p.queries)
        yield replace(parts[0], X=X, queries=queries, all_views=views), preset


def measure(task: LoadedTask, preset: Preset, methods: tuple[str, ...]) -> dict[str, Any]:
    """Accuracy and seconds of processor time for a fit, by method."""
    found = {}
    for method in methods:
        ours = method in OURS
        model = make_method(method, preset=preset if ours else None, random_state=0)
        start = time.process_time()
        model.fit(task.X, task.y, **(task.views(VIEWS) if ours else {}))
        spent = time.process_time() - start
        right = float((model.predict(task.queries) == task.query_labels).mean())
        found[method] = [right, round(spent, 3)]
    return found


def run(args: argparse.Namespace) -> None:
    done = {key(row): row for row in read(args.output)} if args.output.exists() else {}
    shots = Protocol.parse(args.protocol).shots
    views = VIEWS if shots is not None and shots < 5 else 0
    for name in args.backbones:
        backbones = load(name, args)
        for set_ in args.sets:
            wanted = [(args.protocol, name, set_, number) for number in range(args.tasks)]
            if all(set(args.methods) <= set(done.get(w, {}).get("methods", {})) for w in wanted):
                continue
            what = (args.data, [set_], args.protocol, args.tasks)
            for task, preset in joined_tasks(backbones, *what, views=views, seed=args.seed):
                row = done.get((args.protocol, name, set_, task.number)) or {
                    "protocol": args.protocol,
                    "backbone": name,
                    "set": set_,
                    "task": task.number,
                    "methods": {},
                }
                left = tuple(m for m in args.methods if m not in row["methods"])
                if not left:
                    continue
                row["methods"] |= measure(task, preset, left)
                with args.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(name, args.protocol, set_, flush=True)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["protocol"], row["backbone"], row["set"], row["task"]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file; a later row of the same task replaces an earlier one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return list({key(row): row for row in rows}.values())


def report(rows: list[dict[str, Any]]) -> None:
    """Print, for each protocol and group of sets, methods by backbone and paired differences."""
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        for title, members in SETS.items():
            own = [r for r in rows if r["protocol"] == protocol and r["set"] in members]
            if not own:
                continue
            print(f"\n## {protocol}, {title} sets\n")
            print("| " + " | ".join(COLUMNS) + " |")
            print("|---|---:|---:|---:|---:|---|---:|---:|---:|")
            first = next(iter(own))["backbone"]
            reference = {(r["set"], r["task"]): r for r in own if r["backbone"] == first}
            for name in dict.fromkeys(row["backbone"] for row in own):
                print(line(name, [r for r in own if r["backbone"] == name], reference))
        sets_table([r for r in rows if r["protocol"] == protocol])


def line(name: str, rows: list[dict[str, Any]], reference: dict[Any, Any]) -> str:
    """Return a row of the table."""
    scores = {
        method: 100 * np.array([r["methods"][method][0] for r in rows])
        for method in rows[0]["methods"]
        if all(method in r["methods"] for r in rows)
    }
    ours = scores["miv"]
    plain = [m for m in scores if m not in OURS]
    best = max(plain, key=lambda m: scores[m].mean()) if plain else None
    paper = scores.get("miv-paper")
    pairs = [
        (r["methods"]["miv"][0], reference[r["set"], r["task"]]["methods"]["miv"][0])
        for r in rows
        if (r["set"], r["task"]) in reference
    ]
    apart = 100 * (np.array(pairs)[:, 0] - np.array(pairs)[:, 1]) if pairs else np.zeros(0)
    seconds = np.median([r["methods"]["miv"][1] for r in rows])
    cells = [
        name,
        str(len(rows)),
        f"{ours.mean():.1f}",
        "" if paper is None else f"{paper.mean():.1f}",
        "" if paper is None else interval(ours - paper),
        "" if best is None else f"{best} {scores[best].mean():.1f}",
        "" if best is None else interval(ours - scores[best]),
        f"{seconds:.2f}",
        interval(apart) if len(apart) and apart.any() else "",
    ]
    return "| " + " | ".join(cells) + " |"


def interval(differences: Any) -> str:
    """Return the mean, its 95 % interval and the p-value of the paired t-test."""
    n = len(differences)
    if n < 2 or not differences.std():
        return f"{differences.mean():+.1f}"
    half = student.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n)
    return f"{differences.mean():+.1f} ± {half:.1f} (p {ttest_1samp(differences, 0).pvalue:.1g})"


def sets_table(rows: list[dict[str, Any]]) -> None:
    """Print `miv` and its lead over the best plain head on each set, by backbone."""
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["set"]][row["backbone"]].append(row["methods"])
    backbones = list(dict.fromkeys(row["backbone"] for row in rows))
    print("\n| set | " + " | ".join(backbones) + " |\n|---" + "|---:" * len(backbones) + "|")
    for set_, by_backbone in found.items():
        cells = []
        for name in backbones:
            scores = by_backbone.get(name)
            if not scores:
                cells.append("")
                continue
            mean = {m: 100 * np.mean([s[m][0] for s in scores if m in s]) for m in scores[0]}
            best = max((v for m, v in mean.items() if m not in OURS), default=mean["miv"])
            cells.append(f"{mean['miv']:.1f} ({mean['miv'] - best:+.1f})")
        print(f"| {set_} | " + " | ".join(cells) + " |")


def images_per_second(backbone: Backbone) -> float:
    """Measure a backbone on photos of noise, which are as large as many."""
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 256, (IMAGES, 300, 400, 3), np.uint8))
    backbone.extract(images[:4])
    start = time.process_time()
    for first in range(0, IMAGES, 16):
        backbone.extract(images[first : first + 16])
    return IMAGES / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="all")
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--tasks", type=int, default=10, help="per set")
    parser.add_argument("--backbones", type=names, default="efficientnet_lite0,efficientnet_lite2")
    parser.add_argument("--methods", type=names, default="miv,miv-paper,ridge,logistic")
    parser.add_argument("--resnet50", metavar="WEIGHTS", type=Path)
    parser.add_argument("--vit", metavar="WEIGHTS", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="of what the file holds")
    parser.add_argument("--speed", action="store_true", help="images per second instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.speed:
        for name in args.backbones:
            for backbone in load(name, args):
                print(f"{name}: {images_per_second(backbone):.1f} images/s with one thread")
    elif args.output is None:
        parser.error("-o is required, except with --speed")
    elif args.report:
        report(read(args.output))
    else:
        run(args)


if __name__ == "__main__":
    main()
