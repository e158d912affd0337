"""Scores of new images of known classes with one shot per class, which thresholds come from.

    python benchmarks/one_shot_scores.py --data DIR [--sets tuning] [--tasks 20]

With one shot per class, no shot can be left out, so `mivhead.decision` has the quantiles of scores
that were measured on other tasks (`PRIOR_SCORES`, with energy; `PRIOR_DISTANCES`, without), after
subtracting a multiple of how similar the shots of different classes are (`SLOPE_SCORES`,
`SLOPE_DISTANCES`). This prints all four, and which share of the known images of each set the
present constants reject. Figures: docs/results/open-set.md.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from _bench import SETS, names
from _tasks import load_tasks
from mivhead import MIVClassifier
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.background import background_vectors

QUANTILES = np.arange(0.05, 0.951, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--tasks", type=int, default=20, help="per set")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(DEFAULT_BACKBONE)
    background = background_vectors(backbone.identity)
    found: dict[str, list[Any]] = defaultdict(list)  # of each set: similarity, scores, distances
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
        found[task.set].append((float(similarity.max(axis=1).mean()), scores, distances))
        rejected[task.set].append(float((scores > rule.thresholds().unknown).mean()))
    for set_, shares in rejected.items():
        print(f"{set_}: {np.mean(shares):.1%} of the known images rejected")
    print(f"mean: {np.mean([np.mean(shares) for shares in rejected.values()]):.1%}")
    for kind, title in ((1, "SCORES"), (2, "DISTANCES")):
        x = np.concatenate([[t[0]] * len(t[kind]) for tasks in found.values() for t in tasks])
        y = np.concatenate([t[kind] for tasks in found.values() for t in tasks])
        slope = -np.polyfit(x, y, 1)[0]
        print(f"SLOPE_{title} = {slope:.2f}")
        quantiles = np.quantile(y + slope * x, QUANTILES)
        print(f"PRIOR_{title} = ({', '.join(f'{q:.2f}' for q in quantiles)})")


if __name__ == "__main__":
    main()
