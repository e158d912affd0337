"""What a folder of other things, the class `other`, adds to the rejection of unknown images.

    python benchmarks/other_class.py --data DIR -o other-class.jsonl
    python benchmarks/other_class.py -o other-class.jsonl --report

Tasks of five classes with five shots each. Three more classes of the set give the ten images of the
class `other`; images of the remaining classes, which the model has never seen, must be rejected.
Every task is fitted without and with that class. Resumes when it is started again; a task takes
about 6 seconds on one core, if the features are in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _bench import SETS, names
from mivhead import FewShotClassifier
from mivhead.diagnostics.evaluation import Tradeoff
from mivhead.features import FeatureTable
from mivhead.images.sources import open_labelled
from mivhead.model.decision import NONE, Thresholds

WAYS, SHOTS, OTHERS, OTHER_IMAGES, QUERIES = 5, 5, 3, 10, 10
KEYS = ("auroc", "known_rejected", "unknown_rejected", "accuracy", "other_as_name")


def measure(folder: Path, number: int) -> dict[str, Any] | None:
    """Sample a task and fit it twice; None if the set has too few classes."""
    images = open_labelled(folder)
    labels = np.asarray(images.labels)
    rng = np.random.default_rng(number)
    large = [c for c in images.classes if (labels == c).sum() >= SHOTS + 2]
    if len(large) < WAYS + OTHERS + 1:
        return None
    order = [str(c) for c in rng.permutation(large)]
    known, others, unknown = order[:WAYS], order[WAYS : WAYS + OTHERS], order[WAYS + OTHERS :]
    shots, queries = [], []
    for name in known:
        rows = rng.permutation(np.flatnonzero(labels == name)).tolist()
        shots += rows[:SHOTS]
        queries += rows[SHOTS : SHOTS + QUERIES]
    of_others = rng.permutation(np.flatnonzero(np.isin(labels, others)))[:OTHER_IMAGES].tolist()
    foreign = rng.permutation(np.flatnonzero(np.isin(labels, unknown)))[: len(queries)].tolist()
    extracting = FewShotClassifier(threshold=0, verbose=False)
    rows = [*shots, *of_others, *queries, *foreign]
    table = extracting.extract(images.take(rows))
    ends = np.cumsum([len(shots), len(of_others), len(queries), len(foreign)])
    names_ = np.where(np.isin(labels[rows], others), "other", labels[rows])

    def part(first: int, last: int) -> FeatureTable:
        own = range(first, last)
        ids, given = (tuple(str(x[i]) for i in own) for x in (table.ids, names_))
        return FeatureTable(table.features[list(own)], ids, given, backbone=table.backbone)

    result: dict[str, Any] = {}
    for how, end in (("without", ends[0]), ("with", ends[1])):
        model = FewShotClassifier(threshold=0, verbose=False).fit_table(part(0, end))
        own = model.classify(part(ends[1], ends[2]))
        strange = model.classify(part(ends[2], ends[3]))
        truth = labels[rows][ends[1] : ends[2]]
        score = [np.array([p.unknown for p in each], float) for each in (own, strange)]
        result[how] = {
            "auroc": Tradeoff(score[0], score[0] > 0, *score, Thresholds()).auroc,
            "known_rejected": np.mean([p.decision == NONE for p in own]),
            "unknown_rejected": np.mean([p.decision == NONE for p in strange]),
            "accuracy": np.mean([p.label == t for p, t in zip(own, truth, strict=True)]),
            "other_as_name": np.mean([p.decision == "other" for p in [*own, *strange]]),
        }
    return result


def report(path: Path) -> None:
    """Print means over tasks, per set and over sets."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"| set | tasks | {' | '.join(KEYS)} |\n|---|---:|" + "---:|" * len(KEYS))
    means = []
    for name in sorted({row["set"] for row in rows}):
        own = [row for row in rows if row["set"] == name]
        means.append([[np.mean([r[h][k] for r in own]) for k in KEYS] for h in ("without", "with")])
        cells = [f"{a:.2f} -> {b:.2f}" for a, b in zip(*means[-1], strict=True)]
        print(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    cells = [f"{a:.3f} -> {b:.3f}" for a, b in zip(*np.mean(means, axis=0), strict=True)]
    print(f"| **mean** | {len(rows)} | {' | '.join(cells)} |")


def main() -> None:
    """Measure what is missing, or print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--sets", type=lambda text: SETS.get(text) or names(text), default=SETS["confirmation"]
    )
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        report(args.output)
        return
    torch.set_num_threads(1)
    lines = args.output.read_text().splitlines() if args.output.exists() else []
    done = {(row["set"], row["task"]) for row in map(json.loads, lines)}
    for number in range(args.tasks):
        for name in args.sets:
            if (name, number) in done or (found := measure(args.data / name, number)) is None:
                continue
            with args.output.open("a") as file:
                file.write(json.dumps({"set": name, "task": number, **found}) + "\n")
            print(name, number, found, flush=True)


if __name__ == "__main__":
    main()
