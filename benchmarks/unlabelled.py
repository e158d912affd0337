"""What unlabelled images add to `miv`: accuracy with and without them, on the same tasks.

    python benchmarks/unlabelled.py --data DIR -o unlabelled.jsonl --sets confirmation
    python benchmarks/unlabelled.py -o unlabelled.jsonl --report

`miv bench run --methods miv,miv+unlabelled` measures the same and trains every head twice; here
each head is trained once, and only the experts are fitted without and with the unlabelled images.
Resumes when it is started again. `--mass` and `--tolerance` change constants of
`ensemble/unlabelled.py`. One core takes about 2 seconds for a task of 5-way 1-shot and 6 for one of
10-way 5-shot, if the features are in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from _bench import SETS, names
from mivhead import MIVClassifier
from mivhead.benchmark.config import BackboneConfig
from mivhead.benchmark.inputs import (
    FeatureKeys,
    Inputs,
    TaskFeatures,
    ViewLimit,
    count_views,
    find_missing,
)
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.benchmark.tasks import Task
from mivhead.ensemble import unlabelled
from mivhead.ensemble.ridge import Experts
from mivhead.extraction.cache import open_cache

PROTOCOLS = ("5-way 1-shot, unlabelled 60", "10-way 5-shot, unlabelled 60")


def measure(inputs: Inputs, task: Task, views: int, seed: int) -> dict[str, Any]:
    """Accuracies on one task."""
    backbone, images = inputs.open_backbone(), inputs.open_images()
    rule = ViewLimit(backbone.preset.threshold, "ceil", views)
    wanted = count_views([task], [rule])
    keys = FeatureKeys(backbone, images, wanted, inputs.set, inputs.seed)
    for extraction in find_missing(inputs, keys, wanted).extractions:
        extraction()
    counts = rule.count(task)
    features = TaskFeatures(inputs, task, keys.of_task(task, counts))
    classifier = MIVClassifier(preset=backbone.preset, random_state=seed)
    classifier.fit(
        features.support,
        list(task.support_labels),
        unlabelled=features.unlabelled,
        **features.take_views(counts),
    )
    assert classifier.ensemble_ is not None
    assert classifier.unlabelled_ is not None
    truth = list(task.query_labels)
    after = classifier.score(features.queries, truth)
    labels = torch.tensor(task.support_labels)
    plain, _ = Experts.fit(features.support, labels, len(task.classes))
    classifier.ensemble_ = replace(classifier.ensemble_, experts=plain)
    before = classifier.score(features.queries, truth)
    return {"before": before, "after": after, "used": classifier.unlabelled_.used}


def report(path: Path) -> None:
    """Print a table per protocol: means per set, their differences and paired tests."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        own = [row for row in rows if row["protocol"] == protocol]
        print(f"\n{protocol}\n\n| set | tasks | without | with | difference | p | used |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        means = []
        for name in sorted({row["set"] for row in own}):
            before, after, used = (
                np.array([row[k] for row in own if row["set"] == name], float)
                for k in ("before", "after", "used")
            )
            moved = 100 * (after - before)
            p = stats.ttest_1samp(moved, 0).pvalue if moved.any() else 1.0
            means.append([100 * before.mean(), 100 * after.mean(), moved.mean(), used.mean()])
            low, high, gain, share = means[-1]
            print(
                f"| {name} | {len(moved)} | {low:.1f} | {high:.1f} | {gain:+.1f} | {p:.2f} | "
                f"{share:.0%} |"
            )
        low, high, gain, share = np.mean(means, axis=0)
        change = f"**{gain:+.1f} ± {1.96 * _error(own):.1f}**"
        print(f"| **mean** | {len(own)} | {low:.1f} | {high:.1f} | {change} | | {share:.0%} |")


def _error(rows: list[dict[str, Any]]) -> float:
    """Return the standard error of the mean difference of sets, from the spread of their tasks."""
    moved = [
        [100 * (r["after"] - r["before"]) for r in rows if r["set"] == name]
        for name in {r["set"] for r in rows}
    ]
    return float(np.sqrt(sum(np.var(m, ddof=1) / len(m) for m in moved if len(m) > 1)) / len(moved))


def main() -> None:
    """Measure what is missing, or print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--sets", type=lambda text: SETS.get(text) or names(text), default=SETS["confirmation"]
    )
    parser.add_argument("--protocol", action="append", help="may be repeated")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--views", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mass", type=float)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        report(args.output)
        return
    torch.set_num_threads(1)
    unlabelled.MASS = args.mass or unlabelled.MASS
    unlabelled.TOLERANCE = args.tolerance or unlabelled.TOLERANCE
    done = set()
    if args.output.exists():
        lines = args.output.read_text().splitlines()
        done = {tuple(json.loads(line)[k] for k in ("set", "protocol", "task")) for line in lines}
    cache = open_cache()
    assert cache is not None, "the feature cache is switched off"
    for number in range(args.tasks):
        for protocol in args.protocol or PROTOCOLS:
            for name in args.sets:
                if (name, protocol, number) in done:
                    continue
                lite = BackboneConfig("efficientnet_lite0")
                inputs = Inputs(lite, name, args.data, cache.folder, cache.limit, args.seed)
                parsed = Protocol.parse(protocol)
                found = sample_tasks(inputs.open_images(), name, parsed, args.seed, number + 1)
                if isinstance(found, LeftOut):
                    print(found.reason)
                    continue
                result = measure(inputs, found.tasks[number], args.views, number)
                row = {"set": name, "protocol": protocol, "task": number, **result}
                with args.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
