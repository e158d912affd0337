"""Training: full-batch SGD on pseudo-queries, memory flat in their number.

Pseudo-queries are the support images and their augmented views; bags hold the originals only.
Every image is pooled and projected once per step. The comparison with the bags, whose attention
grows with queries x shots, runs in chunks: each chunk's gradient is added to the projections,
which then pass it on to the parameters in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.features import Features, SupportSet
from mivhead.head.cap import Bags, Projected
from mivhead.head.head import MIVHead, rows
from mivhead.head.logits import loss as summed_loss
from mivhead.head.pooling import Candidates
from mivhead.head.recipe import BlockConfig, Recipe
from mivhead.kernels.projection import in_place


def train(
    head: MIVHead,
    candidates: Sequence[Candidates],
    labels: Tensor,
    bags: Bags,
    *,
    sources: Tensor | None = None,
    on_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train the head in place and return the loss of every step, taken before its update.

    Parameters
    ----------
    head
        What to train.
    candidates
        Prepared features of all pseudo-queries, the support first and in the order of `bags`.
    labels
        Class numbers of all pseudo-queries.
    bags
        The support rows of each class.
    sources
        The support row that every pseudo-query was made from. It is hidden from it, so that the
        loss asks what the class's other shots say; None: nothing is hidden.
    on_step
        Called with the number of finished steps, for a progress display.
    """
    recipe = head.recipe
    parameters = list(head.parameters())
    rates = {"pooling": recipe.pooling_learning_rate, "cap": recipe.learning_rate}
    losses = []
    for step in range(recipe.steps):
        # SGD with momentum, written out, because torch.optim costs two seconds of imports on its
        # first use. Gradients are added to what is left of the last ones: that is the velocity.
        if velocity := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_mul_(velocity, recipe.momentum)
        losses.append(loss_and_gradients(head, candidates, labels, bags, sources))
        for part, rate in rates.items():
            descend([p for layer in head.layers for p in getattr(layer, part).parameters()], rate)
        if on_step is not None:
            on_step(step + 1)
    head.zero_grad()
    return losses


@torch.no_grad()
def descend(parameters: Iterable[Tensor], rate: float) -> None:
    """Move parameters against their gradients, in place."""
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    if pairs:
        moved, gradients = zip(*pairs, strict=True)
        torch._foreach_add_(moved, gradients, alpha=-rate)


def loss_and_gradients(
    head: MIVHead,
    candidates: Sequence[Candidates],
    labels: Tensor,
    bags: Bags,
    sources: Tensor | None = None,
) -> float:
    """Mean cross-entropy over the pseudo-queries; adds its gradient to the parameters."""
    embedded = head.embed(candidates)
    shots = int(bags.real.sum())
    # Cut the graph here: chunks add their gradients to the leaves.
    queries, support = _leaves(embedded), _leaves(rows(embedded, slice(shots)))
    total = 0.0
    for chunk in head.chunks(len(labels), bags):
        hidden = None if sources is None else bags.own(sources[chunk])
        cosines = head.cosines(rows(queries, chunk), support, bags, hidden)
        loss = summed_loss(cosines, labels[chunk], head.recipe) / len(labels)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    outputs, grads = [], []
    for block, as_query, as_shot in zip(embedded, queries, support, strict=True):
        for output, leaf, shot in zip(block, as_query, as_shot, strict=True):
            if leaf.grad is not None:
                if shot.grad is not None:
                    leaf.grad[:shots] += shot.grad
                outputs.append(output)
                grads.append(leaf.grad)
    if outputs:
        with in_place():
            _Continue.apply(grads, *outputs).backward()
    return total


class _Continue(torch.autograd.Function):
    """Sends gradients that are known already on from the tensors they belong to.

    `torch.autograd.backward(outputs, grads)` does that as well, but imports sympy: half a second.
    """

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        """Something to call `backward` of."""
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the known gradients."""
        return None, *ctx.grads


def _leaves(embedded: Sequence[Projected]) -> list[Projected]:
    return [
        Projected(*(part.detach().requires_grad_(part.requires_grad) for part in block))
        for block in embedded
    ]


# What the head says of support images it has not seen: the evidence for the weights of its
# blocks.
#
# The images of every class are dealt into two halves. A head that is trained on one half, and
# on the views of these images only, judges the other. A class of one image stays in both:
# nothing could stand for it.


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
