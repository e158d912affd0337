"""Component 2: cross-attention pooling (CAP) of each class's bag of shots, given the query.

The support is never repeated per query: pooling of values is linear, and the gate depends on the
query alone, so v^P = (A V) * gate + (A K), with A the attention of the query over a class's shots.
The prototypes v^P are wanted for their cosines only, which `BagCosine` computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.head.bags import Bags
from mivhead.head.comparison import BagCosine
from mivhead.head.config import BlockConfig, Recipe
from mivhead.head.pooling import LN_EPS, NORM_EPS

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
        x = self.norm(vectors)
        key, value = self.key(x), self.value(x)
        if self.excitation is None:
            return Projected(self._split(key), self._split(value), value.new_ones(()))
        gate = _exactly(torch.sigmoid, self.excitation(x))
        return Projected(self._split(key), self._split(value), self._split(gate))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)

    def attention(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Weights of every shot of every class: (head, class, query, shot); 0 on padding.

        What is `hidden` (class, shot, query) gets no weight either.
        """
        if not self.recipe.cross_attention:
            real = bags.real[:, None, :]  # (class, 1, shot)
            if hidden is not None:
                real = real & ~hidden.transpose(1, 2)  # (class, query, shot)
            return (real / real.sum(-1, keepdim=True)).to(query.key.dtype)[None]
        y, z = query.key.transpose(0, 1), support.key.transpose(0, 1)  # (head, image, d)
        d = y.shape[-1]
        if self.recipe.attention == "l1":
            # the constant c of the paper cancels in the softmax
            scores = torch.cdist(z, y, p=1.0) * (-self.recipe.eta / (SPREAD * math.sqrt(d)))
        else:
            scores = (z @ y.transpose(1, 2)) * (self.recipe.eta / math.sqrt(d))
        # (head, class, shot, query): a softmax is faster over rows than within
        if bags.even:
            scores = scores.unflatten(1, bags.real.shape)
        else:
            scores = scores[:, bags.rows].masked_fill(~bags.real.unsqueeze(2), -math.inf)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return _exactly(partial(torch.softmax, dim=2), scores).transpose(2, 3)

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Cosines of v^Q with the prototypes v^P of all classes: (query, class)."""
        weights = self.attention(query, support, bags, hidden)  # (head, class, query, shot)
        skip, gated = self.recipe.skip, self.excitation is not None
        vectors = query.value * query.gate + (query.key if skip else 0.0)  # v^Q: (query, head, d)
        values = _bagged(support.value, bags)
        cosines: Tensor = BagCosine.apply(
            weights.expand(self.heads, -1, len(vectors), -1),
            values,
            _bagged(support.key, bags) if skip else None,
            query.gate.transpose(0, 1) if gated else None,
            vectors.transpose(0, 1),
            self.recipe.centres,
        )
        return cosines


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
