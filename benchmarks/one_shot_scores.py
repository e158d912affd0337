"""Scores of new images of known classes with one shot per class, which thresholds come from.

    python benchmarks/one_shot_scores.py --data DIR [--sets tuning] [--tasks 15]

With one shot per class, no shot can be left out, so `mivhead.model.decision` has the quantiles of
scores that were measured on other tasks (`PRIOR_SCORES`, with energy; `PRIOR_DISTANCES`, without),
relative to how similar the shots are to the background, and to each other with a weight
(`SLOPE_SCORES`, `SLOPE_DISTANCES`). This prints which share of the known images of each set the
present constants reject, and new constants: the weight is the one for which the sets, each left out
in turn, differ least in the share that is rejected. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from _bench import SETS, names
from _tasks import load_tasks
from mivhead import MIVClassifier
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.background import background_vectors
from mivhead.model.decision import FAR

QUANTILES = np.arange(0.05, 0.951, 0.05)
SLOPES = np.arange(0.3, 1.21, 0.05)


class Scores(NamedTuple):
    """The scores of a task's queries, relative to the background, and how alike its shots are."""

    similarity: float
    with_energy: Any
    distances: Any


def rejected_share(tasks: list[Any], slope: float, others: list[Any]) -> float:
    """Share of the scores above the 90 % quantile of other tasks."""
    limit = np.quantile(np.concatenate([x + slope * similarity for similarity, x in others]), 0.9)
    return float(np.mean([(x + slope * similarity > limit).mean() for similarity, x in tasks]))


def constants(found: dict[str, list[Any]]) -> tuple[float, Any]:
    """Choose the slope; return it with the quantiles."""
    spreads = []
    for slope in SLOPES:
        shares = []
        for name, own in found.items():
            others = [task for other, tasks in found.items() if other != name for task in tasks]
            shares.append(rejected_share(own, slope, others))
        spreads.append(np.std(shares))
        print(f"{slope:.2f}: {', '.join(f'{share:.0%}' for share in shares)}")
    slope = float(SLOPES[np.argmin(spreads)])
    every = [x + slope * similarity for tasks in found.values() for similarity, x in tasks]
    return slope, np.quantile(np.concatenate(every), QUANTILES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--tasks", type=int, default=15, help="per set")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(DEFAULT_BACKBONE)
    background = background_vectors(backbone.identity)
    found: dict[str, list[Scores]] = defaultdict(list)
    rejected: dict[str, list[float]] = defaultdict(list)
    for task in load_tasks(
        backbone, args.data, args.sets, "5-way 1-shot", args.tasks, seed=args.seed
    ):
        model = MIVClassifier(preset=backbone.preset, random_state=0).fit(task.X, task.y)
        rule = model.decision_.with_background(background)
        model.decision_ = rule
        scores = model.score_unknown(task.queries)[1]
        model.decision_ = replace(rule, weight=0.0)
        distances = model.score_unknown(task.queries)[1]
        similarity = rule.shots @ rule.shots.T
        np.fill_diagonal(similarity, -1.0)
        far = FAR * float((rule.shots @ rule.background.T).max(axis=1).mean())
        near = float(similarity.max(axis=1).mean())
        found[task.set].append(Scores(near, scores - far, distances - far))
        rejected[task.set].append(float((scores > rule.thresholds().unknown).mean()))
    for set_, shares in rejected.items():
        print(f"{set_}: {np.mean(shares):.1%} of the known images rejected")
    print(f"mean: {np.mean([np.mean(shares) for shares in rejected.values()]):.1%}")
    for kind, title in (("with_energy", "SCORES"), ("distances", "DISTANCES")):
        tasks = {n: [(t.similarity, getattr(t, kind)) for t in own] for n, own in found.items()}
        slope, quantiles = constants(tasks)
        print(f"SLOPE_{title} = {slope:.2f}")
        print(f"PRIOR_{title} = ({', '.join(f'{q:.2f}' for q in quantiles)})")


if __name__ == "__main__":
    main()
