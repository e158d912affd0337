"""How good the estimates of a model's accuracy are, and what they cost.

    python benchmarks/estimate.py --data DIR -o FILE.json [--sets tuning] [--tasks 4]

Fits the default recipe to tasks and compares its accuracy on the queries with estimates that see
the shots alone: 5-fold cross-validation of everything, which fits five more ensembles; the cheaper
one of `miv fit`, which trains five more heads; and the out-of-fold predictions that stacking made
anyway, with weights that were fitted on them, and with weights that were fitted without the image.
Then two shots get a wrong label, and the estimates say which shots look mislabelled. Resumes when
it is started again. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from _bench import SETS, names
from _tasks import LoadedTask, load_tasks, seed_of
from mivhead import MIVClassifier
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.preset import Preset
from mivhead.diagnostics import cross_validate
from mivhead.features import FeatureTable
from mivhead.model.decision import softmax

WRONG = 2  # shots with another class's label
KINDS = ("everything", "heads", "stacking", "stacking without the image")


def estimates(preset: Preset, task: LoadedTask, y: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Probabilities of the shots and seconds by each estimate; and the accuracy on the queries."""
    views = task.views(task.views_per_shot)
    model = MIVClassifier(preset=preset, random_state=0)
    start = time.process_time()
    model.fit(task.X, y, **views)
    fitted = time.process_time()
    accuracy = float((model.predict(task.queries) == task.query_labels).mean())
    table = FeatureTable(task.X, tuple(map(str, range(len(y)))), tuple(map(str, y)), **views)
    seconds = {"fit": fitted - start}
    found = {}
    for kind, stacks in (("everything", False), ("heads", True)):
        before = time.process_time()
        with mock.patch.object(MIVClassifier, "stacks", stacks):
            result = cross_validate(MIVClassifier(preset=preset), table, verbose=False)
        seconds[kind] = time.process_time() - before
        found[kind] = result.probabilities[:, np.argsort(result.classes.astype(int))]
    left_out = model.ensemble_.left_out
    order = np.argsort(y, kind="stable")[left_out.rows]
    logits = (left_out.logits, left_out.cross_fitted())
    for kind, each in zip(KINDS[2:], logits, strict=True):
        found[kind] = np.full((len(y), each.shape[1]), np.nan)
        found[kind][order] = softmax(each)
    return {"accuracy": accuracy, "seconds": seconds, "probabilities": found}


def measure(preset: Preset, task: LoadedTask) -> dict[str, Any]:
    """Estimate with right labels, then with some wrong ones."""
    y = task.y
    result = estimates(preset, task, y)
    rng = np.random.default_rng(seed_of(task))
    wrong = rng.choice(len(y), WRONG, replace=False)
    spoilt = y.copy()
    spoilt[wrong] = (y[wrong] + rng.integers(1, y.max() + 1, WRONG)) % (y.max() + 1)
    found = estimates(preset, task, spoilt)["probabilities"]
    own = {}
    for kind in KINDS:
        probabilities = result["probabilities"][kind]
        best = found[kind].argmax(axis=1)
        suspects = best != spoilt
        confident = suspects & (found[kind].max(axis=1) > 0.5)
        is_wrong = np.isin(np.arange(len(y)), wrong)
        own[kind] = {
            "estimate": float((probabilities.argmax(axis=1) == y).mean()),
            "nll": float(-np.log(probabilities[np.arange(len(y)), y]).mean()),
            "found": int((confident & is_wrong).sum()),
            "false": int((confident & ~is_wrong).sum()),
            "suspected": int((suspects & is_wrong).sum()),
        }
    return {"accuracy": result["accuracy"], "seconds": result["seconds"], "shots": len(y), **own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--views", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=4, help="per set")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(DEFAULT_BACKBONE)
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name in args.sets:
        keys = [f"{args.protocol} {name} {number}" for number in range(args.tasks)]
        if all(key in found for key in keys):
            continue
        what = (backbone, args.data, [name], args.protocol, args.tasks)
        for task in load_tasks(*what, views=args.views, seed=args.seed):
            if keys[task.number] not in found:
                found[keys[task.number]] = measure(backbone.preset, task)
                args.output.write_text(json.dumps(found))
    chosen = [own for key, own in found.items() if key.startswith(args.protocol)]
    chosen = [found[key] for key in found if key.split()[2] in args.sets and found[key] in chosen]
    truth = 100 * np.array([own["accuracy"] for own in chosen])
    print(f"{len(chosen)} tasks, accuracy on the queries {truth.mean():.1f} %\n")
    print("| estimate | mean | error | absolute error | nll | wrong labels found | false | s |")
    print("|---|" + "---:|" * 7)
    spent = {k: np.median([own["seconds"].get(k, 0.0) for own in chosen]) for k in KINDS}
    for kind in KINDS:
        own = [each[kind] for each in chosen]
        guess = 100 * np.array([each["estimate"] for each in own])
        total = {k: sum(each[k] for each in own) for k in ("found", "false")}
        error = guess - truth
        print(
            f"| {kind} | {guess.mean():.1f} | {error.mean():+.1f} | {np.abs(error).mean():.1f} "
            f"| {np.mean([each['nll'] for each in own]):.3f} "
            f"| {total['found']} of {WRONG * len(own)} | {total['false']} | {spent[kind]:.2f} |"
        )
    print(f"\nOne fit takes {np.median([own['seconds']['fit'] for own in chosen]):.2f} s.")


if __name__ == "__main__":
    main()
