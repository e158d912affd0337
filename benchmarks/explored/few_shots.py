"""One and two shots per class: which members and how many views are worth it.

    python benchmarks/explored/few_shots.py dump --data DIR -o FOLDER
        [--shots 1] [--sets tuning] [--tasks 8]
    python benchmarks/explored/few_shots.py report -o FOLDER [--shots 1] [--sets tuning]

`dump` stores, for each 5-way task, what each member of the ensemble and each candidate for a new
member predicts of the queries, for several numbers of augmented views; `report` compares weighted
sums of them in seconds. Resumes when it is started again. Figures: docs/research-log.md.

Candidates, all without another pass through the backbone:

- `mean0`..`mean2`: ridge regressions on the means of the other blocks.
- `crops`: the mean expert, trained on the means of windows of the map too (pseudo-shots).
- `mirror`: the layout experts, trained on mirrored maps too.
- `patches`: a ridge regression on all patches as if they were shots.
- `match0`..`match3`: image-to-class similarity: the mean over the patches of a query of the cosine
  with the most similar patch of the class (as in DN4, Li et al. 2019).
- `views`: all experts, trained on the augmented views too.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from _bench import SETS, names
from _tasks import LoadedTask, load_tasks
from mivhead import MIVClassifier
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.preset import Preset
from mivhead.ensemble.descriptors import PatchPCA, compute_descriptors, mean_vectors
from mivhead.ensemble.ridge import ALPHA, Experts, fit_ridge
from mivhead.ensemble.stacking import fit_weights, predict_cosines
from mivhead.features import Block, Features

HEADS = ("head 112", "head 192", "head 320")
EXPERTS = (
    *(f"second order {channels}" for channels in (112, 192, 320, 1280)),
    *("layout 320", "layout 1280", "mean 1280"),
)
# Prior weights of the members: the head's blocks, second order, layouts, mean.
BEFORE = [0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 1.0, 3.0]
NOW = [0.2, 0.2, 0.4, 1.0, 2.5, 5.0, 7.5, 1.0, 1.0, 2.5]
PRIORS = {
    "before": BEFORE,
    "now": NOW,
    "without the head": [0.0] * 3 + NOW[3:],
    "before, without the head": [0.0] * 3 + BEFORE[3:],
    "before, second order x 2": [*BEFORE[:3], *(2 * w for w in BEFORE[3:7]), *BEFORE[7:]],
    "without layouts": [*NOW[:7], 0.0, 0.0, NOW[9]],
    "without the mean": [*NOW[:9], 0.0],
}
COUNTS = {1: (0, 1, 2, 4, 8, 15), 2: (0, 1, 2, 4, 8), 3: (0, 1, 2, 5), 5: (0, 1, 3)}


def ridge(x: Tensor, y: Tensor, q: Tensor, alpha: float = ALPHA) -> Tensor:
    """Memberships of queries by a ridge regression."""
    return fit_ridge(x, F.one_hot(y).float(), alpha)[0](q)


def windows(map_: Tensor) -> list[Tensor]:
    """Four overlapping windows and the centre, each of five sevenths of the side."""
    side = map_.shape[2]
    w = round(side * 5 / 7)
    corners = [(0, 0), (0, side - w), (side - w, 0), (side - w, side - w)]
    corners.append(((side - w) // 2, (side - w) // 2))
    return [map_[:, :, i : i + w, j : j + w] for i, j in corners]


def match(shots: Tensor, y: Tensor, queries: Tensor) -> Tensor:
    """Similarity (query, class) of the patches of queries to the nearest patches of each class."""
    centre = shots.mean(dim=(0, 2, 3), keepdim=True, dtype=torch.float32)
    support, asked = (
        F.normalize((x.float() - centre).flatten(2).transpose(1, 2), dim=2)  # (image, patch, C)
        for x in (shots, queries)
    )
    columns = []
    for label in range(int(y.max()) + 1):
        own = support[y == label].flatten(0, 1)  # (patch, C)
        columns.append((asked @ own.T).amax(dim=2).mean(dim=1))
    return torch.stack(columns, dim=1)


def candidates(task: LoadedTask) -> dict[str, Tensor]:
    """Predictions (query, class) of candidates for new members."""
    y = torch.as_tensor(task.y)
    blocks, asked = task.X.blocks, task.queries.blocks
    found: dict[str, Tensor] = {}
    for i in range(3):
        found[f"mean{i}"] = ridge(mean_vectors(blocks[i]), y, mean_vectors(asked[i]))
    last = blocks[3].map
    parts = [last, *windows(last)]
    x = torch.cat([mean_vectors(Block(map=part)) for part in parts])
    found["crops"] = ridge(x, y.repeat(len(parts)), mean_vectors(asked[3]))
    for i in (2, 3):
        both = torch.cat([blocks[i].map, blocks[i].map.flip(3)])
        pca = PatchPCA.fit(blocks[i].map)
        (_, x), (_, q) = (
            next(iter(compute_descriptors(Block(map=m), pca, ["layout"])))
            for m in (both, asked[i].map)
        )
        found[f"mirror{i}"] = ridge(x, y.repeat(2), q)
        patches = blocks[i].map.flatten(2).transpose(1, 2).flatten(0, 1).float()
        patches = F.normalize(F.layer_norm(patches, patches.shape[1:]), dim=1)
        every = y.repeat_interleave(last.shape[2] * last.shape[3])
        found[f"patches{i}"] = ridge(patches, every, mean_vectors(asked[i]), alpha=1.0)
    for i in range(4):
        shots, queries = blocks[i].map, asked[i].map
        if i == 0:
            shots, queries = (F.avg_pool2d(x.float(), 2) for x in (shots, queries))
        found[f"match{i}"] = match(shots, y, queries)
    return found


def dump(preset: Preset, task: LoadedTask, counts: tuple[int, ...]) -> dict[str, Any]:
    """Predictions of all members and candidates."""
    own: dict[str, Any] = {"y": task.query_labels}
    labels = torch.as_tensor(task.y)
    model = MIVClassifier(preset=preset, random_state=0)
    for count in counts:
        start = time.process_time()
        model.fit(task.X, task.y, **task.views(count))
        own[f"seconds{count}"] = time.process_time() - start
        with torch.inference_mode():
            logits = model.logits(task.queries)
            cosines = predict_cosines(model.head_, model.support_, model.bags_, task.queries)
        own[f"head{count}"] = cosines.numpy()
        own[f"logits{count}"] = logits.numpy()
        if (left_out := model.ensemble_.left_out) is not None:
            own[f"left_out{count}"] = left_out.members.numpy()
            own["left_out_labels"] = left_out.labels.numpy()
    own["weights"] = model.ensemble_.weights.numpy()
    own["experts"] = model.ensemble_.experts(task.queries).numpy()
    if task.all_views is not None:
        some = task.views(4 if max(counts) >= 4 else max(counts))
        joined = Features.concat([task.X, some["views"]])
        y = torch.cat([labels, labels[some["view_of"]]])
        own["views"] = Experts.fit(joined, y, int(y.max()) + 1)[0](task.queries).numpy()
    for alpha in (0.01, 1.0):
        with mock.patch("mivhead.ensemble.ridge.ALPHA", alpha):
            experts, _ = Experts.fit(task.X, labels, int(labels.max()) + 1)
        own[f"alpha{alpha:g}"] = experts(task.queries).numpy()
    own |= {name: x.numpy() for name, x in candidates(task).items()}
    return own


def read(folder: Path, shots: int, sets: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Load what was stored."""
    paths = sorted(folder.glob(f"{shots}-*.npz"))
    chosen = [path for path in paths if path.stem.split("-")[1] in sets]
    return [(path.stem.split("-")[1], dict(np.load(path))) for path in chosen]


def logits_of(own: dict[str, Any], prior: Any, views: int, *, stack: bool = True) -> Any:
    """Logits of the queries with weights that start from a prior; stacked, if there is a way."""
    weights = np.asarray(prior)
    left_out = own.get(f"left_out{views}")
    if left_out is not None and stack:
        given = (torch.as_tensor(left_out), torch.as_tensor(own["left_out_labels"]))
        weights = fit_weights(*given, torch.tensor(prior)).numpy()
    return np.tensordot(weights, np.concatenate([own[f"head{views}"], own["experts"]]), 1)


def report(found: list[tuple[str, dict[str, Any]]]) -> None:
    """Print accuracies by weights and views, of single members, and with one member added."""
    counts = sorted(int(k[6:]) for k in found[0][1] if k.startswith("logits"))
    most = counts[-1]
    base = accuracies(found, lambda own: logits_of(own, BEFORE, most))
    print(f"{len(found)} tasks\n\n| weights, views | accuracy | difference |\n|---|---:|---:|")
    for title, prior in PRIORS.items():
        for count in counts:
            scores = accuracies(found, lambda o, p=prior, c=count: logits_of(o, p, c))
            print(line(f"{title}, {count}", scores, base))
        if "left_out0" in found[0][1]:
            scores = accuracies(found, lambda o, p=prior: logits_of(o, p, most, stack=False))
            print(line(f"{title}, {most}, not stacked", scores, base))
    print("\nBy set: " + by_set(found, base, lambda own: logits_of(own, NOW, counts[0])))
    print("\n| member | alone |\n|---|---:|")
    for i, name in enumerate(HEADS):
        print(f"| {name} | {accuracies(found, lambda o, i=i: o[f'head{most}'][i]).mean():.1f} |")
    for i, name in enumerate(EXPERTS):
        print(f"| {name} | {accuracies(found, lambda o, i=i: o['experts'][i]).mean():.1f} |")
    for i, name in enumerate(EXPERTS if "views" in found[0][1] else ()):
        alone = accuracies(found, lambda o, i=i: o["views"][i]).mean()
        print(f"| {name}, on views too | {alone:.1f} |")
    base = accuracies(found, lambda own: logits_of(own, NOW, counts[0], stack=False))
    for name in [k for k in found[0][1] if k.startswith("alpha")]:
        scores = accuracies(
            found,
            lambda o, n=name: logits_of({**o, "experts": o[n]}, NOW, counts[0], stack=False),
        )
        print(line(f"experts with {name}, not stacked", scores, base))
    print("\n| candidate | alone | added with weight 3 |\n|---|---:|---:|")
    base = accuracies(found, lambda own: logits_of(own, NOW, counts[0]))
    for name in [k for k in found[0][1] if k[:4] in ("mean", "crop", "mirr", "patc", "matc")]:
        alone = accuracies(found, lambda o, n=name: o[n]).mean()
        scores = accuracies(
            found, lambda o, n=name: logits_of(o, NOW, counts[0]) + 3 * scaled(o, n)
        )
        print(f"| {name} | {alone:.1f} | {line('', scores, base).split('|')[3].strip()} |")


def by_set(found: list[tuple[str, dict[str, Any]]], base: Any, logits: Any) -> str:
    """List the mean difference of each set."""
    difference = accuracies(found, logits) - base
    names_ = [name for name, _ in found]
    means = {n: difference[[each == n for each in names_]].mean() for n in dict.fromkeys(names_)}
    return ", ".join(f"{name} {mean:+.1f}" for name, mean in means.items())


def scaled(own: dict[str, Any], name: str) -> Any:
    """Bring a candidate to the spread of the mean expert."""
    x = own[name] - own[name].mean(axis=1, keepdims=True)
    reference = own["experts"][-1]
    spread = (reference - reference.mean(axis=1, keepdims=True)).std()
    return x * (spread / max(float(x.std()), 1e-9))


def accuracies(found: list[tuple[str, dict[str, Any]]], logits: Any) -> np.ndarray[Any, Any]:
    """Accuracy of each task, in percent."""
    return np.array([100 * (logits(own).argmax(axis=1) == own["y"]).mean() for _, own in found])


def line(name: str, scores: Any, base: Any) -> str:
    """Return a row of a table: the mean, the paired difference and its 95 % interval."""
    difference = scores - base
    half = 1.96 * difference.std(ddof=1) / np.sqrt(len(difference))
    return f"| {name} | {scores.mean():.2f} | {difference.mean():+.2f} ± {half:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("dump", "report"))
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="tuning")
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=8, help="per set")
    parser.add_argument("--views", type=int, help="per shot at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.action == "report":
        report(read(args.output, args.shots, args.sets))
        return
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(DEFAULT_BACKBONE)
    most = max(COUNTS[args.shots]) if args.views is None else args.views
    counts = tuple(count for count in COUNTS[args.shots] if count <= most)
    for name in args.sets:
        paths = [args.output / f"{args.shots}-{name}-{n}.npz" for n in range(args.tasks)]
        if all(path.exists() for path in paths):
            continue
        what = (backbone, args.data, [name], f"5-way {args.shots}-shot", args.tasks)
        for task in load_tasks(*what, views=most, seed=args.seed):
            if not paths[task.number].exists():
                np.savez_compressed(paths[task.number], **dump(backbone.preset, task, counts))


if __name__ == "__main__":
    main()
