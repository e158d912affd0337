"""Training with PyTorch: the path on a GPU, and the reference of the tests.

Pseudo-queries are the support images and their augmented views; bags hold the original images only.
Every image is pooled and projected once per step. Comparing needs memory for queries x shots x
channels, so queries pass in chunks; the gradients of the projections are summed over the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.features import Features, SupportSet
from mivhead.head.components import Head
from mivhead.head.recipe import BlockConfig, Recipe
from mivhead.head.train import Trained
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.cap import Projected
from mivhead_bench.head.head import MIVHead, rows
from mivhead_bench.head.logits import loss
from mivhead_bench.head.pooling import Candidates

LARGEST_VELOCITY = 1e3  # norm per parameter; below 20 on five real image sets
CHUNK_VALUES = {"cpu": 2**20}  # values of prototypes at once: 4 MB in float32
CHUNK_VALUES_GPU = 2**30  # values of everything at once: 4 GB; small chunks are a million calls
COPIES = 11  # of prototypes or weights that a step keeps per block, measured
PREDICT = 64  # query images pooled at once in prediction


class DeviceTrainer:
    """Trains heads on a support set with PyTorch, where `mivhead`'s own trainer uses NumPy."""

    def __init__(
        self,
        support: SupportSet,
        blocks: Sequence[BlockConfig],
        recipe: Recipe,
        seed: int,
        on_step: Callable[[float], object] = lambda _: None,
        *,
        device: str,
    ) -> None:
        self.support, self.blocks, self.recipe, self.seed = support, blocks, recipe, seed
        self.on_step, self.device = on_step, device
        self.taken = MIVHead(blocks, recipe, None).taken

    def fit(
        self, subsets: Sequence[NDArray[np.bool_] | None] = (None,), *, keep: bool = True
    ) -> list[Trained]:
        """Train one head per subset of the images; None takes all of them."""
        del keep  # heads are small beside the candidates on a device
        return [self._fit_one(kept) for kept in subsets]

    def _fit_one(self, kept: NDArray[np.bool_] | None) -> Trained:
        support = self.support if kept is None else self.support.take(kept)
        module, losses = fit_head(
            support, self.blocks, self.recipe, self.seed, self.device, self.on_step
        )
        cosines = np.zeros((len(self.taken), 0, len(support.shots)), np.float32)
        if kept is not None and not kept.all():
            left_out = self.support.features[np.flatnonzero(~kept)]
            cosines = compare(module, support.features, support.shots, left_out)
        return Trained(Head.from_params(self.blocks, self.recipe, module.arrays()), losses, cosines)


def compare(
    head: MIVHead, support: Features, shots: Sequence[int], queries: Features
) -> NDArray[np.float32]:
    """Cosines (block, query, class) of queries with a support set, computed where the head is."""
    bags = Bags.from_shots(shots, head.anchor.device)
    parts = []
    with torch.inference_mode():
        embedded = head.embed(head.prepare(support))
        for start in range(0, len(queries), PREDICT):
            batch = head.embed(head.prepare(queries[start : start + PREDICT]))
            parts += [
                head(rows(batch, chunk), embedded, bags).numpy(force=True)
                for chunk in chunks(head, len(batch[0].value), bags)
            ]
    return np.concatenate(parts, axis=1)


def fit_head(
    support: SupportSet,
    blocks: Sequence[BlockConfig],
    recipe: Recipe,
    seed: int,
    device: str = "cpu",
    on_step: Callable[[float], object] = lambda _: None,
) -> tuple[MIVHead, list[float]]:
    """Build a head and train it on a support set; it no longer requires gradients.

    `on_step` is called with 1.0 after every step. Returns the loss of every step, too, taken before
    its update.
    """
    head = MIVHead(blocks, recipe, torch.Generator().manual_seed(seed)).to(device)
    losses = train(
        head,
        head.prepare(support.everything),
        torch.as_tensor(support.labels[support.sources], device=device),
        Bags.from_shots(support.shots, torch.device(device)),
        sources=torch.as_tensor(support.sources, device=device) if recipe.self_mask else None,
        on_step=lambda: on_step(1.0),
    )
    return head.eval().requires_grad_(requires_grad=False), losses


def train(
    head: MIVHead,
    candidates: Sequence[Candidates],
    labels: Tensor,
    bags: Bags,
    *,
    sources: Tensor | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train a head in place; return the loss of every step, taken before its update.

    Candidates and labels are those of all pseudo-queries, the support first and in the order of
    `bags`. `sources` are the support rows that they were made from: that shot is masked, so that
    the prediction comes from the class's other shots.
    """
    recipe = head.recipe
    rates = {"pooling": recipe.pooling_learning_rate, "cap": recipe.learning_rate}
    losses = []
    for _ in range(recipe.steps):
        # New gradients are added to the decayed old ones: the sum is the velocity.
        for velocity in _velocities(head.parameters()):
            velocity.mul_(recipe.momentum)
        losses.append(loss_and_gradients(head, candidates, labels, bags, sources))
        for velocity in _velocities(head.parameters()):
            _limit(velocity)
        with torch.no_grad():
            for part, rate in rates.items():
                for layer in head.layers:
                    for parameter in getattr(layer, part).parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=rate)
        on_step()
    head.zero_grad()
    return losses


def _velocities(parameters: Iterator[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _limit(velocity: Tensor) -> None:
    """Scale down what is far too long, in place: images that look the same to the backbone.

    Their centred vectors are almost zero, and the gradient of a cosine explodes there.
    """
    norm = torch.linalg.vector_norm(velocity)
    if not norm.isfinite():
        velocity.zero_()
    elif norm > LARGEST_VELOCITY:
        velocity.mul_(LARGEST_VELOCITY / norm)


def loss_and_gradients(
    head: MIVHead,
    candidates: Sequence[Candidates],
    labels: Tensor,
    bags: Bags,
    sources: Tensor | None = None,
) -> float:
    """Mean cross-entropy over the pseudo-queries; adds its gradient to the parameters."""
    embedded = head.embed(candidates)
    # Cut the graph at the projections: every chunk adds its gradients to these leaves.
    leaves = [Projected(*(x.detach().requires_grad_(x.requires_grad) for x in e)) for e in embedded]
    shots = slice(len(bags))
    total = 0.0
    for chunk in chunks(head, len(labels), bags):
        hidden = None if sources is None else bags.hidden(sources[chunk])
        cosines = head(rows(leaves, chunk), rows(leaves, shots), bags, hidden)
        part = loss(cosines, labels[chunk], head.recipe) / len(labels)
        if part.requires_grad:
            part.backward()
        total += part.item()
    pairs = [
        (x, leaf.grad)
        for e, cut in zip(embedded, leaves, strict=True)
        for x, leaf in zip(e, cut, strict=True)
        if leaf.grad is not None
    ]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
    return total


def chunks(head: MIVHead, queries: int, bags: Bags) -> Iterator[slice]:
    """Slices of queries for which `forward` needs little memory."""
    classes, shots = bags.real.shape
    configs = [layer.config for layer in head.layers]
    # Per query in each block: attention weights or prototypes.
    values = [classes * max(block.heads * shots, block.channels) for block in configs]
    limit = CHUNK_VALUES.get(head.anchor.device.type)
    if limit is not None:
        size = limit // max(values)
    else:  # the gradient of L1 distances takes queries x shots x channels there, block by block
        distances = len(bags) * max(block.channels for block in configs)
        size = CHUNK_VALUES_GPU // (COPIES * sum(values) + distances)
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, queries, size))
