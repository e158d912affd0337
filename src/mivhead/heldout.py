"""What the head says of support images it has not seen: the evidence for the weights of its blocks.

The images of every class are dealt into two halves. A head that is trained on one half, and on the
views of these images only, judges the other. A class of one image stays in both: nothing could
stand for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.estimator import SupportSet
from mivhead.features import Features
from mivhead.head.bags import Bags
from mivhead.head.config import BlockConfig, Recipe
from mivhead.head.head import MIVHead
from mivhead.head.training import train

FOLDS = 2
BATCH = 64  # query images pooled at once


def fit_head(
    support: SupportSet,
    blocks: Sequence[BlockConfig],
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> tuple[MIVHead, list[float]]:
    """Train a head on a support set; also return the loss of every step."""
    device = support.features.device
    head = MIVHead(blocks, recipe, torch.Generator().manual_seed(seed)).to(device)
    losses = train(
        head,
        head.prepare(support.everything),
        torch.as_tensor(support.all_labels, device=device),
        make_bags(support.shots, device),
        sources=torch.as_tensor(support.sources, device=device) if recipe.self_mask else None,
        on_step=on_step,
    )
    return head.eval().requires_grad_(requires_grad=False), losses


@torch.inference_mode()
def judge(head: MIVHead, shots: Features, bags: Bags, queries: Features) -> Tensor:
    """Cosines (block, query, class) of queries with the bags of a support set."""
    support = head.embed(head.prepare(shots))
    parts = []
    for start in range(0, len(queries), BATCH):
        some = head.embed(head.prepare(queries[start : start + BATCH]))
        parts.append(head.compare(some, support, bags))
    return torch.cat(parts, dim=1)


def judge_unseen(
    support: SupportSet,
    blocks: Sequence[BlockConfig],
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Cosines (block, image, class) of support images by heads that were trained without them.

    The second answer tells which images could be held out; the cosines of others are 0.
    """
    fold = deal(support)
    found: Tensor | None = None
    for number in range(FOLDS):
        if not (fold == number).any():
            continue
        kept = support.take(fold != number)
        head, _ = fit_head(kept, blocks, recipe, seed, on_step)
        rows = np.flatnonzero(fold == number)
        bags = make_bags(kept.shots, support.features.device)
        cosines = judge(head, kept.features, bags, support.features[rows])
        if found is None:
            found = cosines.new_zeros(len(cosines), len(fold), cosines.shape[2])
        found[:, rows] = cosines
    if found is None:
        found = torch.zeros(0, len(fold), len(support.shots))
    return found, fold >= 0


def deal(support: SupportSet) -> NDArray[np.int64]:
    """Deal the images of each class into halves; -1 for the only image of a class.

    Images are ranked by what is in them, so that the order in which they come does not matter.
    """
    block = support.features.blocks[-1]
    values = block.token if block.token is not None else block.map
    assert values is not None
    key = values.flatten(1).float().square().sum(dim=1).numpy(force=True)  # (image,)
    shots = np.asarray(support.shots)
    rank = np.empty(len(key), np.int64)
    rank[np.lexsort((key, support.labels))] = np.concatenate([np.arange(s) for s in shots])
    return np.where(shots[support.labels] > 1, rank % FOLDS, -1)


def make_bags(shots: Sequence[int], device: torch.device) -> Bags:
    """Bags of a support set that is ordered by class."""
    labels = torch.repeat_interleave(torch.as_tensor(shots, device=device))
    return Bags.from_labels(labels, len(shots))
