"""How strongly the weights of the ensemble should be held to their prior, by the number of shots.

    python benchmarks/explored/stacking_strength.py dump -o FOLDER --data DIR
        --protocol "5-way 2-shot" [--sets tuning] [--tasks 12] [--views 4]
    python benchmarks/explored/stacking_strength.py report -o FOLDER [--sets tuning]

`dump` stores what the members of the ensemble predict of the queries and, out of fold, of the
shots; `report` fits the weights with several strengths in seconds. Resumes when it is started
again. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import ttest_1samp

from _bench import SETS, names
from _tasks import LoadedTask, load_tasks
from mivhead import MIVClassifier
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.preset import Preset
from mivhead.benchmark.compare import calibration_error
from mivhead.benchmark.measuring import score
from mivhead.ensemble.stacking import fit_weights, predict_cosines
from mivhead.model.decision import softmax

Rule = Callable[[int], float | None]
RULES: dict[str, Rule] = {
    "0.1": lambda _: 0.1,
    "0.3": lambda _: 0.3,
    "1": lambda _: 1.0,
    "3": lambda _: 3.0,
    "10": lambda _: 10.0,
    "prior weights": lambda _: 1e6,
    "10 / m": lambda m: max(0.1, 10 / m - 0.1),
    "(20 / m)^2": lambda m: max(0.1, (20 / m) ** 2),
    "as it is, (15 / m)^2": lambda _: None,
}


class Scores(NamedTuple):
    """Accuracies (percent) and cross-entropies of tasks; mean calibration error of the sets."""

    accuracy: Any
    loss: Any
    calibration: float


def dump(preset: Preset, task: LoadedTask, views: int) -> dict[str, Any]:
    """Predictions of the members, of queries and of left-out shots."""
    model = MIVClassifier(preset=preset, random_state=0).fit(task.X, task.y, **task.views(views))
    left_out = model.ensemble_.left_out
    with torch.inference_mode():
        cosines = predict_cosines(model.head_, model.support_, model.bags_, task.queries)
    return {
        "labels": task.query_labels,
        "members": np.concatenate([cosines.numpy(), model.ensemble_.experts(task.queries).numpy()]),
        "left_out": left_out.members.numpy(),
        "left_out_labels": left_out.labels.numpy(),
        "prior": left_out.prior.numpy(),
    }


def judge(found: list[tuple[str, dict[str, Any]]], rule: Rule) -> Scores:
    """Fit the weights of each task and judge its predictions."""
    accuracies, losses, bins = [], [], defaultdict(list)
    for name, own in found:
        given = [torch.as_tensor(own[key]) for key in ("left_out", "left_out_labels", "prior")]
        weights = fit_weights(*given, rule(len(given[1]))).numpy()
        p = softmax(np.tensordot(weights, own["members"], 1))
        y = own["labels"]
        accuracies.append(100 * float((p.argmax(axis=1) == y).mean()))
        losses.append(-float(np.log(p[np.arange(len(y)), y] + 1e-12).mean()))
        bins[name].append(score(p, y)[1])
    error = float(np.mean([calibration_error(own) for own in bins.values()]))
    return Scores(np.array(accuracies), np.array(losses), 100 * error)


def report(found: list[tuple[str, dict[str, Any]]]) -> None:
    base = judge(found, RULES["0.1"])
    print(f"{len(found)} tasks\n\n| strength | accuracy | minus 0.1 | p | cross-entropy | error |")
    print("|---|---:|---:|---:|---:|---:|")
    for title, rule in RULES.items():
        own = judge(found, rule)
        apart = own.accuracy - base.accuracy
        half = 1.96 * apart.std(ddof=1) / np.sqrt(len(apart))
        p = ttest_1samp(apart, 0).pvalue if apart.any() else 1.0
        print(
            f"| {title} | {own.accuracy.mean():.1f} | {apart.mean():+.1f} ± {half:.1f} | {p:.1g} "
            f"| {own.loss.mean():.3f} | {own.calibration:.1f} % |"
        )
        if rule(1) is None:
            by_set: dict[str, list[float]] = defaultdict(list)
            for (name, _), each in zip(found, apart, strict=True):
                by_set[name].append(each)
            print("\nBy set: " + ", ".join(f"{n} {np.mean(x):+.1f}" for n, x in by_set.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("dump", "report"))
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--protocol", default="5-way 2-shot")
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--tasks", type=int, default=12, help="per set")
    parser.add_argument("--views", type=int, default=4, help="per shot")
    args = parser.parse_args()
    if args.action == "report":
        paths = [p for p in sorted(args.output.glob("*.npz")) if p.stem.split("-")[0] in args.sets]
        report([(path.stem.split("-")[0], dict(np.load(path))) for path in paths])
        return
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(DEFAULT_BACKBONE)
    what = (args.data, args.sets, args.protocol, args.tasks)
    for task in load_tasks(backbone, *what, views=args.views):
        path = args.output / f"{task.set}-{task.number}.npz"
        if not path.exists():
            np.savez_compressed(path, **dump(backbone.preset, task, args.views))


if __name__ == "__main__":
    main()
