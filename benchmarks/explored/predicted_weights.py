"""Weights of one-shot tasks, predicted from what can be measured without other labelled images.

    python benchmarks/explored/predicted_weights.py --data DIR [--tasks 20]

Four statistics describe each expert of a 5-way 1-shot task: its margin on augmented views of the
shots, the similarity of shots of different classes, the distance of a view from its shot relative
to that similarity, and its margin on windows of the maps. The weight of an expert is its prior
times exp(B . statistics), each statistic standardised over all tasks. B and the priors minimise the
cross-entropy of the queries of all sets but one, and are evaluated on that one. For comparison, the
last line chooses the best of 300 random weights on half of the tasks of a set and reports the gain
on the other half, which is what knowing the domain would be worth. Figures:
docs/research-log.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from _bench import SETS, names
from _tasks import LoadedTask, load_tasks
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.ensemble.ridge import Experts, prior_weights
from mivhead.features import Features

VIEWS = 4
STATISTICS = ("margin of views", "similarity of shots", "spread of views", "margin of windows")
TRIALS = ((), (0,), (1,), (2,), (3,), (0, 1, 2, 3))
STEPS, RATE, SHRINK = 60, 0.05, 0.02


class Measured(NamedTuple):
    """Predictions (expert, query, class), labels, and statistics (expert, statistic) of a task."""

    members: Tensor
    labels: Tensor
    statistics: Tensor


def margin(predictions: Tensor, labels: Tensor) -> float:
    """Return the mean lead of the right class."""
    own = predictions.gather(1, labels[:, None])[:, 0]
    others = predictions.scatter(1, labels[:, None], -9.0).amax(dim=1)
    return float((own - others).mean())


def windows(features: Features) -> Features:
    """Cut four overlapping windows of five sevenths of the side out of the maps."""
    parts = []
    for right, down in product((False, True), repeat=2):
        blocks = []
        for block in features.blocks:
            assert block.map is not None
            side = block.map.shape[2]
            w = round(side * 5 / 7)
            i, j = (side - w) * down, (side - w) * right
            # Layouts have a fixed size, so that windows are brought back to it.
            blocks.append(F.interpolate(block.map[:, :, i : i + w, j : j + w].float(), side))
        parts.append(Features(blocks))
    return Features.concat(parts)


def measure(task: LoadedTask) -> Measured:
    y = torch.as_tensor(task.y)
    experts, _ = Experts.fit(task.X, y, int(y.max()) + 1)
    given = task.views(VIEWS)
    views, of = given["views"], y[torch.as_tensor(given["view_of"])]
    parts = windows(task.X)
    described, seen = experts.describe(task.X), experts.describe(views)
    predicted, cut = experts(views), experts(parts)
    rows = []
    for i, expert in enumerate(experts.ridges):
        x, v = described[expert].double(), seen[expert].double()
        apart = (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)].mean()
        near = (v * x[torch.as_tensor(given["view_of"])]).sum(dim=1).mean()
        spread = float((1 - near) / (1 - apart))
        row = [margin(predicted[i], of), float(apart), spread, margin(cut[i], y.repeat(4))]
        rows.append(row)
    return Measured(experts(task.queries), torch.as_tensor(task.query_labels), torch.tensor(rows))


def learn(tasks: Sequence[Measured], prior: Tensor, columns: Sequence[int]) -> tuple[Tensor, ...]:
    """Return what `weigh` needs: log priors, coefficients, and the scale of the statistics."""
    every = torch.stack([task.statistics for task in tasks])  # (task, expert, statistic)
    chosen = list(columns)
    mean, spread = every.mean(dim=0)[:, chosen], every.std(dim=0).clamp_min(1e-6)[:, chosen]
    logs = prior.log().clone().requires_grad_()
    coefficients = torch.zeros(len(columns), requires_grad=True)
    optimiser = torch.optim.Adam([logs, coefficients], lr=RATE)
    for _ in range(STEPS):
        loss = SHRINK * coefficients.square().sum()
        loss = loss + SHRINK / 2 * (logs - prior.log()).square().sum()
        for task in tasks:
            weights = weigh(task, columns, logs, coefficients, mean, spread)
            logits = (weights[:, None, None] * task.members).sum(dim=0)
            loss = loss + F.cross_entropy(logits, task.labels) / len(tasks)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return logs.detach(), coefficients.detach(), mean, spread


def weigh(task: Measured, columns: Sequence[int], *learned: Tensor) -> Tensor:
    logs, coefficients, mean, spread = learned
    standard = (task.statistics[:, list(columns)] - mean) / spread
    return (logs + standard.float() @ coefficients).exp()


def accuracy(task: Measured, weights: Tensor) -> float:
    logits = (weights[:, None, None] * task.members).sum(dim=0)
    return 100 * float((logits.argmax(dim=1) == task.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--tasks", type=int, default=20, help="per set")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(DEFAULT_BACKBONE)
    found: dict[str, list[Measured]] = {name: [] for name in args.sets}
    what = (args.data, args.sets, "5-way 1-shot", args.tasks)
    for task in load_tasks(backbone, *what, views=VIEWS):
        found[task.set].append(measure(task))
    experts, _ = Experts.fit(task.X, torch.as_tensor(task.y), int(task.y.max()) + 1)
    prior = prior_weights(list(experts.ridges), one_shot=True)
    print("| statistics | difference on the set that was left out |\n|---|---:|")
    for columns in TRIALS:
        apart = []
        for name, own in found.items():
            others = [task for other, tasks in found.items() if other != name for task in tasks]
            learned = learn(others, prior, columns)
            apart += [accuracy(t, weigh(t, columns, *learned)) - accuracy(t, prior) for t in own]
        title = ", ".join(STATISTICS[i] for i in columns) or "none: priors only"
        half = 1.96 * np.std(apart, ddof=1) / np.sqrt(len(apart))
        print(f"| {title} | {np.mean(apart):+.1f} ± {half:.1f} |", flush=True)
    generator = torch.Generator().manual_seed(0)
    tries = prior * torch.randn(300, len(prior), generator=generator).exp()
    gains = []
    for own in found.values():
        scores = np.array([[accuracy(t, w) for t in own] for w in (prior, *tries)])
        gains.append(scores[scores[:, ::2].mean(axis=1).argmax(), 1::2] - scores[0, 1::2])
    print(f"Random weights, chosen on every second task of a set: {np.mean(gains):+.1f}")


if __name__ == "__main__":
    main()
