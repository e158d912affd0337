"""Component 2: cross-attention pooling (CAP) of each class's bag of shots, given the query.

The support is never repeated per query: pooling of values is linear, and the gate depends on the
query alone, so v^P = (A V) * gate + (A K), with A the attention of the query over a class's shots.
The prototypes v^P, one per query, class and channel, are wanted for their cosines only: compiled
code (`mivhead.kernels.functions`) makes them a few at a time and never writes them to memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.head.pooling import LN_EPS, NORM_EPS
from mivhead.head.recipe import BlockConfig, Recipe
from mivhead.kernels import functions as cap_kernel
from mivhead.kernels.library import serves
from mivhead.kernels.projection import project

SPREAD = math.sqrt(0.72676)  # of |x - y| for standard normal x and y, so s = SPREAD * sqrt(d)


class Projected(NamedTuple):
    """What CAP needs of an image: its key, its value and, as a query, its gate."""

    key: Tensor  # (image, head, d)
    value: Tensor  # (image, head, d)
    gate: Tensor  # (image, head, d), or one 1 for all

    def rows(self, index: Tensor | slice) -> Projected:
        """Select images."""
        return Projected(
            self.key[index],
            self.value[index],
            self.gate if self.gate.ndim == 0 else self.gate[index],
        )


class CrossAttentionPooling(nn.Module):
    """Query and bags to prototypes v^P and query vectors v^Q (equations 3 to 5 of the paper)."""

    def __init__(
        self, config: BlockConfig, recipe: Recipe, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.heads, self.recipe = config.heads, recipe
        channels = config.channels
        self.norm = nn.LayerNorm(channels, eps=LN_EPS)
        self.key = linear(channels, generator) if recipe.cross_attention else nn.Identity()
        self.value = linear(channels, generator)
        self.excitation = linear(channels, generator) if recipe.co_excitation else None
        if recipe.start == "identity" and generator is not None:
            self._start_plain()

    @torch.no_grad()
    def _start_plain(self) -> None:
        """Start as a nearest centroid: keys and values are the vectors themselves, gates equal."""
        for layer in (self.key, self.value):
            if isinstance(layer, nn.Linear):
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)
        if self.excitation is not None:
            nn.init.zeros_(self.excitation.weight)
            nn.init.zeros_(self.excitation.bias)

    def project(self, vectors: Tensor) -> Projected:
        """Image vectors (image, channel) to keys, values and gates."""
        layers = (self.key, self.value, self.excitation)
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        x, *projected = project(self.norm, linear, vectors)
        key = projected.pop(0) if isinstance(self.key, nn.Linear) else x
        value = projected.pop(0)
        if not projected:
            return Projected(self._split(key), self._split(value), value.new_ones(()))
        gate = _exactly(torch.sigmoid, projected.pop())
        return Projected(self._split(key), self._split(value), self._split(gate))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)

    def attention(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Weights of every shot of every class: (head, class, query, shot); 0 on padding.

        The `hidden` shot of a query (`Bags.own`) gets no weight either.
        """
        masked = None if hidden is None else bags.table(hidden)  # (class, shot, query)
        if not self.recipe.cross_attention:
            real = bags.real[:, None, :]  # (class, 1, shot)
            if masked is not None:
                real = real & ~masked.transpose(1, 2)  # (class, query, shot)
            return (real / real.sum(-1, keepdim=True)).to(query.key.dtype)[None]
        y, z = query.key.transpose(0, 1), support.key.transpose(0, 1)  # (head, image, d)
        l1 = self.recipe.attention == "l1"
        scores = torch.cdist(z, y, p=1.0) if l1 else z @ y.transpose(1, 2)
        scores = scores * self._factor()
        # (head, class, shot, query): a softmax is faster over rows than within
        if bags.even:
            scores = scores.unflatten(1, bags.real.shape)
        else:
            scores = scores[:, bags.rows].masked_fill(~bags.real.unsqueeze(2), -math.inf)
        if masked is not None:
            scores = scores.masked_fill(masked, -math.inf)
        return _exactly(partial(torch.softmax, dim=2), scores).transpose(2, 3)

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Cosines of v^Q with the prototypes v^P of all classes: (query, class)."""
        if serves(query.key, query.value, query.gate, support.key, support.value):
            return self._compiled(query, support, bags, hidden)
        weights = self.attention(query, support, bags, hidden)  # (head, class, query, shot)
        vectors, prototypes = query.value, weights @ _bagged(support.value, bags)
        if self.excitation is not None:
            vectors = vectors * query.gate
            prototypes = prototypes * query.gate.transpose(0, 1).unsqueeze(1)
        if self.recipe.skip:
            vectors = vectors + query.key
            prototypes = prototypes + weights @ _bagged(support.key, bags)
        u = vectors.flatten(1).unsqueeze(1)  # v^Q: (query, 1, channel)
        p = prototypes.permute(2, 1, 0, 3).flatten(2)  # v^P: (query, class, channel)
        if self.recipe.centres:
            mean = p.mean(dim=1, keepdim=True)
            u, p = u - mean, p - mean
        p, u = (F.normalize(x, dim=2, eps=NORM_EPS) for x in (p, u))
        return (u @ p.mT).squeeze(1)

    def _compiled(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None
    ) -> Tensor:
        shots = support if bags.even else support.rows(bags.order)
        cosines: Tensor = cap_kernel.CapCosine.apply(
            query.key.flatten(1),
            query.value.flatten(1),
            None if self.excitation is None else query.gate.flatten(1),
            shots.key.flatten(1),
            shots.value.flatten(1),
            bags.starts,
            hidden,
            cap_kernel.Setting(
                heads=self.heads,
                attention=self.recipe.attention if self.recipe.cross_attention else "uniform",
                factor=self._factor(),
                skip=self.recipe.skip,
                centred=self.recipe.centres,
                eps=NORM_EPS,
            ),
        )
        return cosines

    def _factor(self) -> float:
        """Return the scale of distances or dot products; c of the paper cancels."""
        scale = self.recipe.eta / math.sqrt(self.norm.normalized_shape[0] / self.heads)
        return -scale / SPREAD if self.recipe.attention == "l1" else scale


class MeanPooling(nn.Module):
    """The ablation of CAP: a prototype is the mean of its class's image vectors."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.centred = recipe.centres

    def project(self, vectors: Tensor) -> Projected:
        """Image vectors as they are."""
        x = vectors.unsqueeze(1)  # (image, 1 head, channel)
        return Projected(x, x, x.new_ones(()))

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Cosines of the queries with the means of all classes: (query, class)."""
        assert hidden is None, "a recipe with plain means hides nothing"
        weights = (bags.real / bags.shots[:, None]).to(query.value.dtype)  # (class, shot)
        means = torch.einsum("ls,lshd->ld", weights, support.value[bags.rows])  # (class, channel)
        vectors = query.value.flatten(1)  # (query, channel)
        if self.centred:
            mean = means.mean(dim=0)
            means, vectors = means - mean, vectors - mean
        return F.normalize(vectors, eps=NORM_EPS) @ F.normalize(means, eps=NORM_EPS).T


def _exactly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function; in prediction by way of double precision.

    PyTorch rounds the last few numbers of a tensor differently from those before, so that an
    image's answer would depend on its place in a batch.
    """
    return function(x) if torch.is_grad_enabled() else function(x.double()).to(x.dtype)


def _bagged(values: Tensor, bags: Bags) -> Tensor:
    """(image, head, d) to (head, class, shot, d)."""
    bagged = values.unflatten(0, bags.real.shape) if bags.even else values[bags.rows]
    return bagged.permute(2, 0, 1, 3)


def linear(channels: int, generator: torch.Generator | None) -> nn.Linear:
    """Make a square linear layer with PyTorch's default initialisation, drawn from a generator.

    Without a generator it has a shape only, and waits for values from a model file.
    """
    layer = nn.Linear(channels, channels, device="meta")  # draws nothing from the global generator
    if generator is None:
        return layer
    bound = 1 / math.sqrt(channels)
    for name, shape in (("weight", (channels, channels)), ("bias", (channels,))):
        values = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        setattr(layer, name, nn.Parameter(values))  # `to_empty` would import sympy
    return layer


# Bags: the shots of each class, as a padded table of support rows.


@dataclass(frozen=True, eq=False)
class Bags:
    """Which support rows belong to which class."""

    rows: Tensor  # (class, shot): support rows, padded with row 0
    real: Tensor  # (class, shot): whether the entry is a shot, not padding
    order: Tensor  # (shot,): support rows, class after class
    starts: Tensor  # (class + 1,): where each class starts in `order`
    even: bool  # whether all rows come in order and nothing is padded, as with equal shots

    @classmethod
    def from_labels(cls, labels: Tensor, classes: int) -> Bags:
        """Make bags from class numbers 0 .. classes - 1, each of which occurs at least once.

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).rows
        tensor([[0, 2],
                [1, 0]])
        """
        shots = torch.bincount(labels, minlength=classes)  # (class,)
        place = torch.arange(int(shots.max()), device=labels.device)  # (shot,)
        real = place < shots[:, None]
        rows = torch.zeros(real.shape, dtype=torch.long, device=labels.device)
        rows[real] = order = labels.argsort(stable=True)
        even = bool(real.all()) and torch.equal(order, torch.arange(len(labels)).to(order))
        starts = torch.cat([shots.new_zeros(1), shots.cumsum(0)])
        return cls(rows, real, order, starts, even)

    def own(self, sources: Tensor) -> Tensor:
        """Find the shot that each query was made from, if its class has others.

        `sources` holds the support row of every query; the answer is its place in `order`, or -1.

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).own(torch.tensor([2, 1]))
        tensor([ 1, -1])
        """
        place = self.order.argsort()  # (support row,)
        alone = torch.repeat_interleave(self.shots == 1, self.shots)  # (shot,)
        return torch.where(alone, -1, torch.arange(len(alone)).to(place))[place[sources]]

    def table(self, hidden: Tensor) -> Tensor:
        """Mark the shots that `own` found: (class, shot, query).

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).table(torch.tensor([1, -1])).nonzero()
        tensor([[0, 1, 0]])
        """
        place = self.starts[:-1, None] + torch.arange(self.real.shape[1]).to(self.starts)
        return (place[:, :, None] == hidden) & self.real[:, :, None]

    @property
    def shots(self) -> Tensor:
        """Number of shots per class."""
        return self.real.sum(dim=1)
