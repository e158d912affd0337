"""Learning curves: labels chosen by `miv suggest`, at random, and by the smallest margin.

    python benchmarks/suggest.py --data DIR --repetitions 10 -o suggest.json

From no label at all, five rounds of ten labels on tasks of ten classes; the accuracy on other
images of all ten classes after each round. An image whose class has no label yet counts as an
error. The features are extracted once; `--method` is fitted to them after each round.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from mivhead import FewShotClassifier
from mivhead.diagnostics.suggestion import suggest
from mivhead.features import FeatureTable
from mivhead.images.sources import open_labelled

SETS = (
    "cub200_birds",
    "gtsrb_traffic_signs",
    "fgvc_aircraft",
    "dtd_textures10",
    "eurosat",
    "plantvillage_cropdisease",
)
WAYS, POOL, TEST, ROUNDS, LABELS = 10, 15, 5, 5, 10


def sample(folder: Path, rng: np.random.Generator) -> tuple[FeatureTable, np.ndarray]:
    """Features of a task, and which of them are the pool."""
    images = open_labelled(folder)
    labels = np.asarray(images.labels)
    large = [c for c in images.classes if (labels == c).sum() >= POOL + TEST]
    rows, in_pool = [], []
    for name in rng.choice(large, WAYS, replace=False):
        chosen = rng.permutation(np.flatnonzero(labels == name))[: POOL + TEST]
        rows += chosen.tolist()
        in_pool += [True] * POOL + [False] * TEST
    order = rng.permutation(len(rows))
    table = FewShotClassifier(threshold=0, verbose=False).extract(
        images.take([rows[i] for i in order])
    )
    return table, np.asarray(in_pool)[order]


def take(table: FeatureTable, rows: np.ndarray) -> FeatureTable:
    labels = table.labels or ()
    return FeatureTable(
        table.features[rows],
        tuple(table.ids[r] for r in rows),
        tuple(labels[r] for r in rows),
        backbone=table.backbone,
    )


def curve(table: FeatureTable, pool: np.ndarray, how: str, method: str, seed: int) -> list[float]:
    """Accuracies after each round."""
    rng = np.random.default_rng(seed)
    labels = np.asarray(table.labels)
    tests = np.flatnonzero(~pool)
    free = np.flatnonzero(pool).tolist()
    known: list[int] = []
    model, accuracies = None, []
    for _ in range(ROUNDS):
        unlabelled = take(table, np.array(free))
        if how == "suggest":
            names = {table.ids[row]: row for row in free}
            found = suggest(unlabelled, LABELS, model=model, seed=seed)
            chosen = [names[each.id] for each in found]
        elif how == "margin" and model is not None:
            p = np.sort(model.predict_proba(unlabelled), axis=1)
            chosen = [free[i] for i in np.argsort(p[:, -1] - p[:, -2], kind="stable")[:LABELS]]
        else:
            chosen = rng.choice(free, LABELS, replace=False).tolist()
        chosen += rng.choice(sorted(set(free) - set(chosen)), LABELS - len(chosen)).tolist()
        known += chosen
        free = [row for row in free if row not in set(chosen)]
        if len(set(labels[known])) > 1:
            model = FewShotClassifier(method=method, threshold=0, verbose=False)
            model.fit_table(take(table, np.array(known)))
            right = model.predict_proba(take(table, tests)).argmax(axis=1)
            accuracies.append(float((model.classes_[right] == labels[tests]).mean()))
        else:
            accuracies.append(float((labels[known[0]] == labels[tests]).mean()))
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--method", default="ridge")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, list[list[float]]]] = {}
    for name in args.sets.split(","):
        results[name] = {"random": [], "margin": [], "suggest": []}
        started = time.perf_counter()
        for repetition in range(args.repetitions):
            table, pool = sample(args.data / name, np.random.default_rng(repetition))
            for how, curves in results[name].items():
                curves.append(curve(table, pool, how, args.method, repetition))
        for how, curves in results[name].items():
            print(f"{name:28}{how:9}", np.round(100 * np.mean(curves, axis=0), 1), flush=True)
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)
        if args.output:
            args.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
