"""Training: full-batch SGD on pseudo-queries, memory flat in their number.

Pseudo-queries are the support images and their augmented views; bags hold the originals only.
Every image is pooled and projected once per step. The comparison with the bags, whose attention
grows with queries x shots, runs in chunks: each chunk's gradient is added to the projections,
which then pass it on to the parameters in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.head.bags import Bags
from mivhead.head.cap import Projected
from mivhead.head.head import MIVHead, rows
from mivhead.head.pooling import Candidates


def train(
    head: MIVHead,
    candidates: Sequence[Candidates],
    labels: Tensor,
    bags: Bags,
    *,
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
        losses.append(loss_and_gradients(head, candidates, labels, bags))
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
    head: MIVHead, candidates: Sequence[Candidates], labels: Tensor, bags: Bags
) -> float:
    """Mean cross-entropy over the pseudo-queries; adds its gradient to the parameters."""
    embedded = head.embed(candidates)
    # Cut the graph here: chunks add their gradients to the leaves.
    leaves = [Projected(*(_leaf(part) for part in block)) for block in embedded]
    total = 0.0
    shots = int(bags.real.sum())
    for chunk in head.chunks(len(labels), bags):
        support = rows(leaves, slice(shots))
        logits = head(rows(leaves, chunk), support, bags)  # (query, class)
        loss = F.cross_entropy(logits, labels[chunk], reduction="sum") / len(labels)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    parts = [part for block in embedded for part in block]
    grads = [leaf.grad for block in leaves for leaf in block]
    used = [i for i, grad in enumerate(grads) if grad is not None]
    if used:
        torch.autograd.backward([parts[i] for i in used], [grads[i] for i in used])
    return total


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
