"""Other descriptors of the maps than those of the ridge experts, alone and in their place.

    python benchmarks/explored/descriptors.py --data DIR [--protocol "5-way 1-shot"] [--tasks 12]

Fits a ridge regression on each variant of the second-order descriptor and of the mean, and the
ensemble of all experts (without the head) with the variant in its place. Figures:
docs/research-log.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from _tasks import LoadedTask, load_tasks, trial_options
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.ensemble.descriptors import PatchPCA, compute_descriptors, mean_vectors
from mivhead.ensemble.ridge import ALPHA, choose_experts, fit_ridge, prior_weights
from mivhead.ensemble.stacking import fit_weights
from mivhead.features import Block

USUAL = "as it is"


def pairs(matrices: Tensor) -> Tensor:
    """Return the upper triangles of symmetric matrices, with the same scalar products."""
    size = matrices.shape[1]
    row, column = torch.triu_indices(size, size)
    return matrices[:, row, column] * torch.where(row == column, 1.0, 2**0.5)


def power(x: Tensor, exponent: float) -> Tensor:
    return x.abs().pow(exponent).copysign(x)


def second_order(pca: PatchPCA, spread: Tensor, map_: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Variants of the second-order descriptor; `spread` is the variance of each component."""
    plain = pca(map_).flatten(2)
    centred = plain - plain.mean(dim=2, keepdim=True)
    covariances = centred @ centred.transpose(1, 2)
    yield "square roots, all entries", power(pairs(covariances), 0.5)
    yield "power 0.3 of each entry", power(pairs(covariances), 0.3)
    yield "not centred", power(pairs(plain @ plain.transpose(1, 2)), 0.5)
    values, vectors = torch.linalg.eigh((centred.transpose(1, 2) @ centred).double())
    kept = values > 1e-6 * values.amax(dim=1, keepdim=True)
    inverse = torch.where(kept, values.clamp_min(1e-30).rsqrt(), 0.0)
    basis = (centred.double() @ vectors) * inverse.unsqueeze(1)
    for exponent in (0.5, 0.3):
        scaled = basis * values.clamp_min(0).pow(exponent).unsqueeze(1)
        root = pairs((scaled @ basis.transpose(1, 2)).float())
        yield f"matrix to the power {exponent}", root
        yield f"matrix to the power {exponent}, square roots", power(root, 0.5)
    for exponent in (0.25, 0.5):
        white = plain / spread.pow(exponent).unsqueeze(1)
        white = white - white.mean(dim=2, keepdim=True)
        yield f"whitened by {exponent}", power(pairs(white @ white.transpose(1, 2)), 0.5)


def means(block: Block) -> Iterator[tuple[str, Tensor]]:
    """Variants of the mean."""
    assert block.map is not None
    patches = block.map.float().flatten(2)
    for name, x in (
        ("square roots of the mean", power(patches.mean(dim=2), 0.5)),
        ("standard deviation", patches.std(dim=2)),
        ("maximum", patches.amax(dim=2)),
    ):
        yield name, F.layer_norm(x, x.shape[1:])


def fit_all(task: LoadedTask) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Predictions of queries and of left-out shots, by expert and variant."""
    y = F.one_hot(torch.as_tensor(task.y)).float()
    found = {}

    def fit(expert: str, variant: str, x: Tensor, queries: Tensor) -> None:
        ridge, left_out = fit_ridge(F.normalize(x, dim=1), y, ALPHA)
        found[expert, variant] = ridge(F.normalize(queries, dim=1)), left_out

    for i, (block, asked) in enumerate(zip(task.X.blocks, task.queries.blocks, strict=True)):
        pca = PatchPCA.fit(block.map)
        kinds = ["second_order", "layout"]
        usual = (compute_descriptors(each, pca, kinds) for each in (block, asked))
        for (kind, x), (_, queries) in zip(*usual, strict=True):
            fit(f"block{i}.{kind}", USUAL, x, queries)
        spread = pca(block.map).transpose(0, 1).flatten(1).var(dim=1)
        spread = spread.clamp_min(1e-3 * spread.max())
        others = (second_order(pca, spread, each.map) for each in (block, asked))
        for (name, x), (_, queries) in zip(*others, strict=True):
            fit(f"block{i}.second_order", name, x, queries)
    fit(f"block{i}.mean", USUAL, mean_vectors(block), mean_vectors(asked))
    for (name, x), (_, queries) in zip(means(block), means(asked), strict=True):
        fit(f"block{i}.mean", name, x, queries)
    return found


def main() -> None:
    args = trial_options(__doc__.splitlines()[0], tasks=12).parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(DEFAULT_BACKBONE)
    alone: dict[Any, list[float]] = defaultdict(list)
    together: dict[str, list[float]] = defaultdict(list)
    for task in load_tasks(backbone, args.data, args.sets, args.protocol, args.tasks):
        found = fit_all(task)
        experts = choose_experts(task.X.blocks)
        one_shot = int(np.bincount(task.y).max()) == 1
        prior = prior_weights(experts, one_shot=one_shot)

        def right(logits: Tensor, task: LoadedTask = task) -> float:
            return 100 * float((logits.argmax(dim=1).numpy() == task.query_labels).mean())

        for key, (queries, _) in found.items():
            alone[key].append(right(queries))
        for variant in dict.fromkeys(variant for _, variant in found):
            chosen = [found.get((e.name, variant)) or found[e.name, USUAL] for e in experts]
            members, left_out = (torch.stack(part) for part in zip(*chosen, strict=True))
            labels = torch.as_tensor(task.y)
            weights = prior if one_shot else fit_weights(left_out, labels, prior)
            together[variant].append(right((weights[:, None, None] * members).sum(dim=0)))
    blocks = len(backbone.preset.taps)
    print("| variant | second order or mean alone, by block | ensemble | difference |")
    print("|---|---|---:|---:|")
    base = np.array(together[USUAL])
    for variant, scores in together.items():
        keys = [(f"block{i}.second_order", variant) for i in range(blocks)]
        keys.append((f"block{blocks - 1}.mean", variant))
        cells = ", ".join(f"{np.mean(alone[key]):.1f}" for key in keys if key in alone)
        apart = np.array(scores) - base
        half = 1.96 * apart.std(ddof=1) / np.sqrt(len(apart))
        print(f"| {variant} | {cells} | {np.mean(scores):.1f} | {apart.mean():+.1f} ± {half:.1f} |")


if __name__ == "__main__":
    main()
