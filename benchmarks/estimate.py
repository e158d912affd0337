"""Can a user believe it? The estimate of `miv fit`, the names it gives, and mislabelled shots.

    python benchmarks/estimate.py --data DIR -o FILE.json [--sets tuning] [--tasks 4]

Fits the default model to tasks as a user would and compares what it says about itself with the
truth on other images: the expected accuracy and its interval, the names at the promised share of
errors, and the images that are called none of these. Then some shots get a wrong label, and the
check says which shots look mislabelled. About 10 s per task on one core; resumes when it is started
again.

Protocols: `unequal` (5 to 10 classes, shots drawn from 1, 1, 2, 3, 5, 8, 12), `10w5s`, `5w3s`,
`5w1s`, `alike` (a class and the nine that look most like it, 5 shots; sets of at least 20 classes),
`10w10s`; and `swap1`, `swap2`, `swap5` (that number of wrong labels in a 10w5s task) and `swap10`
(in a 10w10s task).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from _bench import SETS, names
from mivhead import FewShotClassifier
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.images.imageset import ImageSet, label_images
from mivhead.prediction import DecisionCounts
from mivhead_bench.datasets.sets import open_set

PROTOCOLS: dict[str, tuple[Sequence[int], tuple[int, int]]] = {  # shots to draw from, ways
    "unequal": ((1, 1, 2, 3, 5, 8, 12), (5, 10)),
    "10w5s": ((5,), (10, 10)),
    "5w3s": ((3,), (5, 5)),
    "5w1s": ((1,), (5, 5)),
    "alike": ((5,), (10, 10)),
    "10w10s": ((10,), (10, 10)),
}
SWAPS = {"swap1": "10w5s", "swap2": "10w5s", "swap5": "10w5s", "swap10": "10w10s"}
QUERIES, LEAST_QUERIES = 15, 3  # per class
LEAST_CLASSES = 20  # of a set for look-alikes


class Tasks:
    """Samples tasks; task i of a set does not depend on how many there are."""

    def __init__(self, data: str) -> None:
        self.data = data
        self.model = FewShotClassifier(verbose=False)
        self.centres: dict[str, NDArray[np.floating[Any]]] = {}

    def sample(
        self, name: str, protocol: str, number: int
    ) -> tuple[ImageSet, list[str], ImageSet, list[str], np.random.Generator] | None:
        """Return shots and queries with their labels, and a generator for what comes after."""
        images = open_set(name, self.data)
        labels = np.asarray(images.labels)
        classes = np.unique(labels)
        rng = np.random.default_rng(zlib.crc32(f"{name} {protocol} {number}".encode()))
        shots, ways = PROTOCOLS[protocol]
        count = min(int(rng.integers(ways[0], ways[1] + 1)), len(classes))
        if protocol == "alike":
            if len(classes) < LEAST_CLASSES:
                return None
            chosen = self._look_alikes(name, images, int(rng.integers(len(classes))), count)
        else:
            chosen = rng.choice(classes, count, replace=False)
        rows: tuple[list[int], list[int]] = [], []
        for wanted, label in zip(rng.choice(shots, count), chosen, strict=True):
            own = rng.permutation(np.flatnonzero(labels == label))
            split = min(int(wanted), len(own) - LEAST_QUERIES)
            rows[0].extend(own[:split])
            rows[1].extend(own[split : split + QUERIES])
        taken = [replace(images.take(part), labels=None) for part in rows]
        return taken[0], labels[rows[0]].tolist(), taken[1], labels[rows[1]].tolist(), rng

    def _look_alikes(self, name: str, images: ImageSet, first: int, count: int) -> NDArray[np.str_]:
        """Return a class and those whose first five images are most like its own."""
        labels = np.asarray(images.labels)
        classes = np.unique(labels)
        if name not in self.centres:
            rows = [row for label in classes for row in np.flatnonzero(labels == label)[:5]]
            table = self.model.extract(replace(images.take(rows), labels=None))
            vectors, own = mean_vectors(table.features.blocks[-1]), labels[rows]
            centres = np.stack([vectors[own == label].mean(axis=0) for label in classes])
            self.centres[name] = centres / np.linalg.norm(centres, axis=1, keepdims=True)
        similarity = self.centres[name] @ self.centres[name][first]
        chosen: NDArray[np.str_] = classes[np.argsort(-similarity)[:count]]
        return chosen


def measure(tasks: Tasks, name: str, protocol: str, number: int) -> dict[str, Any] | None:
    """Fit a task, and compare what the model says with what is true."""
    sampled = tasks.sample(name, SWAPS.get(protocol, protocol), number)
    if sampled is None:
        return None
    shots, labels, queries, truth, rng = sampled
    classes, given = sorted(set(labels)), list(labels)
    swapped = {}
    if protocol in SWAPS:
        for row in rng.choice(len(given), int(protocol[4:]), replace=False).tolist():
            step = 1 + int(rng.integers(len(classes) - 1))
            given[row] = classes[(classes.index(labels[row]) + step) % len(classes)]
            swapped[shots.ids[row]] = labels[row]
    model = FewShotClassifier(verbose=False).fit(label_images(shots, given))
    check = model.check()
    called = [each for each in check.suspects if each.mislabelled]
    found: dict[str, Any] = {
        "shots": len(given),
        "wrong labels": len(swapped),
        "called": len(called),
        "called rightly": sum(each.id in swapped for each in called),
    }
    if protocol in SWAPS:
        return found
    predictions = model.classify(queries)
    right = np.array([str(p.label) == t for p, t in zip(predictions, truth, strict=True)])
    own = np.asarray(truth)
    counts = DecisionCounts.count(predictions, truth)
    known = not math.isnan(check.accuracy)  # it is if fewer than two classes could be tested
    return found | {
        "truth": float(np.mean([right[own == label].mean() for label in np.unique(own)])),
        "estimate": check.accuracy if known else None,
        "interval": list(check.interval),
        **{key: getattr(counts, key) for key in ("images", "named", "wrong", "unsure", "none")},
    }


def report(found: Mapping[str, dict[str, Any]], sets: Sequence[str]) -> str:
    """Make the tables."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for key, each in found.items():
        protocol, name, _ = key.split()
        if name in sets:
            rows[protocol].append(each)
    lines = [
        "| protocol | tasks | truth | estimate minus truth | absolute | in the interval | width "
        "| named | wrong among named | none of these |",
        "|---|" + "---:|" * 9,
    ]
    for protocol in PROTOCOLS:
        if not (own := rows.get(protocol)):
            continue
        truth = 100 * np.mean([each["truth"] for each in own])
        known = [each for each in own if each["estimate"] is not None]
        parts = ["no estimate", "", "", ""]
        if known:
            error = 100 * np.array([each["estimate"] - each["truth"] for each in known])
            inside = [e["interval"][0] <= e["truth"] <= e["interval"][1] for e in known]
            width = 100 * np.mean([np.diff(each["interval"]) for each in known])
            parts = [f"{error.mean():+.1f}", f"{np.abs(error).mean():.1f}"]
            parts += [f"{100 * np.mean(inside):.0f}%", f"{width:.0f}"]
        total = {k: sum(each[k] for each in own) for k in ("images", "named", "wrong", "none")}
        parts += [
            f"{100 * total['named'] / total['images']:.0f}%",
            f"{100 * total['wrong'] / max(total['named'], 1):.1f}%",
            f"{100 * total['none'] / total['images']:.0f}%",
        ]
        lines.append(f"| {protocol} | {len(own)} | {truth:.1f} | {' | '.join(parts)} |")
    lines += ["", "| shots | wrong labels | called mislabelled | rightly |", "|---|---:|---:|---:|"]
    for protocol, own in rows.items():
        total = {
            k: sum(each[k] for each in own)
            for k in ("shots", "wrong labels", "called", "called rightly")
        }
        lines.append(
            f"| {protocol}: {total['shots']:,} | {total['wrong labels']} | {total['called']} "
            f"| {total['called rightly']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--protocols", type=names, default=(*PROTOCOLS, *SWAPS))
    parser.add_argument("--tasks", type=int, default=2, help="per set and protocol")
    args = parser.parse_args()
    tasks = Tasks(args.data)
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    for number in range(args.tasks):
        for name in args.sets:
            for protocol in args.protocols:
                key = f"{protocol} {name} {number}"
                if key in found or (own := measure(tasks, name, protocol, number)) is None:
                    continue
                found[key] = own
                args.output.write_text(json.dumps(found))
    print(report(found, args.sets))


if __name__ == "__main__":
    main()
