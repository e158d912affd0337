"""Training: a head is fitted to a support set by full-batch gradient descent on pseudo-queries.

Pseudo-queries are the support images and their augmented views; bags hold the original images only.
Every image is pooled and projected once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mivhead.features import SupportSet
from mivhead.head.blocks import BlockConfig
from mivhead.head.cap import Bags, Projected
from mivhead.head.head import MIVHead, rows
from mivhead.head.logits import loss
from mivhead.head.pooling import Candidates
from mivhead.head.recipe import Recipe
from mivhead.kernels.gradients import backward_in_chunks

LARGEST_VELOCITY = 1e3  # norm per parameter; below 20 on five real image sets


def fit_head(
    support: SupportSet,
    blocks: Sequence[BlockConfig],
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> tuple[MIVHead, list[float]]:
    """Build a head and train it on a support set.

    Parameters
    ----------
    support : SupportSet
        Images and their views.
    blocks : sequence of BlockConfig
        The blocks of the features.
    recipe : Recipe
        How to train.
    seed : int
        Seed of the initial weights.
    on_step : callable, optional
        Called with the number of finished steps.

    Returns
    -------
    head : MIVHead
        The trained head; its parameters no longer require gradients.
    losses : list of float
        The loss of every step, taken before its update.
    """
    device = support.features.device
    head = MIVHead(blocks, recipe, torch.Generator().manual_seed(seed)).to(device)
    losses = train(
        head,
        head.prepare(support.everything),
        torch.as_tensor(support.all_labels, device=device),
        Bags.from_shots(support.shots, device),
        sources=torch.as_tensor(support.sources, device=device) if recipe.self_mask else None,
        on_step=on_step,
    )
    return head.eval().requires_grad_(requires_grad=False), losses


def train(
    head: MIVHead,
    candidates: Sequence[Candidates],
    labels: Tensor,
    bags: Bags,
    *,
    sources: Tensor | None = None,
    on_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train a head in place.

    Parameters
    ----------
    head : MIVHead
        What to train.
    candidates : sequence of Candidates
        Prepared features of all pseudo-queries, the support first and in the order of `bags`.
    labels : Tensor
        Class numbers of all pseudo-queries.
    bags : Bags
        The support rows of each class.
    sources : Tensor, optional
        The support row that every pseudo-query was made from. That shot is masked, so that the
        prediction comes from the class's other shots. By default nothing is masked.
    on_step : callable, optional
        Called with the number of finished steps.

    Returns
    -------
    list of float
        The loss of every step, taken before its update.
    """
    recipe = head.recipe
    parameters = list(head.parameters())
    rates = {"pooling": recipe.pooling_learning_rate, "cap": recipe.learning_rate}
    losses = []
    for step in range(recipe.steps):
        # SGD with momentum, written out because the first use of torch.optim imports for two
        # seconds. New gradients are added to the decayed old ones: the sum is the velocity.
        if velocity := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_mul_(velocity, recipe.momentum)
        losses.append(loss_and_gradients(head, candidates, labels, bags, sources))
        _limit([p.grad for p in parameters if p.grad is not None])
        for part, rate in rates.items():
            _descend([p for layer in head.layers for p in getattr(layer, part).parameters()], rate)
        if on_step is not None:
            on_step(step + 1)
    head.zero_grad()
    return losses


@torch.no_grad()
def _limit(velocity: list[Tensor]) -> None:
    """Scale down what is far too long, in place: images that look the same to the backbone.

    Their centred vectors are almost zero, and the gradient of a cosine explodes there.
    """
    if not velocity:  # a part without parameters
        return
    norms: tuple[Tensor, ...] = torch._foreach_norm(velocity)
    if bool(torch.stack(norms).max() < LARGEST_VELOCITY):  # False for NaN
        return
    for tensor, norm in zip(velocity, norms, strict=True):
        if norm.isfinite():
            tensor.mul_(torch.clamp(LARGEST_VELOCITY / norm, max=1.0))
        else:
            tensor.zero_()


@torch.no_grad()
def _descend(parameters: Iterable[Tensor], rate: float) -> None:
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

    def chunk_loss(queries: list[Projected], support: list[Projected], chunk: slice) -> Tensor:
        hidden = None if sources is None else bags.own(sources[chunk])  # (query,)
        cosines = head(rows(queries, chunk), support, bags, hidden)  # (block, query, class)
        return loss(cosines, labels[chunk], head.recipe) / len(labels)

    shots = int(bags.real.sum())
    chunks = head.chunks(len(labels), bags)
    return backward_in_chunks(head.embed(candidates), shots, chunks, chunk_loss)
