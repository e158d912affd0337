"""Component 2: cross-attention pooling (CAP) of each class's bag of shots, given the query.

The support is never repeated per query: pooling of values is linear, and the gate depends on the
query alone, so v^P = (A V) * gate + (A K), with A the attention of the query over a class's shots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mivhead.head.bags import Bags
from mivhead.head.config import BlockConfig, Recipe
from mivhead.head.pooling import LN_EPS

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

    def project(self, vectors: Tensor) -> Projected:
        """Image vectors (image, channel) to keys, values and gates."""
        x = self.norm(vectors)
        key, value = self.key(x), self.value(x)
        if self.excitation is None:
            return Projected(self._split(key), self._split(value), value.new_ones(()))
        gate = torch.sigmoid(self.excitation(x))
        return Projected(self._split(key), self._split(value), self._split(gate))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)

    def attention(self, query: Projected, support: Projected, bags: Bags) -> Tensor:
        """Weights of every shot of every class: (head, class, query, shot); 0 on padding."""
        real = bags.real[:, None, :]  # (class, 1, shot)
        if not self.recipe.cross_attention:
            return (real / real.sum(-1, keepdim=True)).to(query.key.dtype)[None]
        y, z = query.key.transpose(0, 1), support.key.transpose(0, 1)  # (head, image, d)
        d = y.shape[-1]
        if self.recipe.attention == "l1":
            # the constant c of the paper cancels in the softmax
            scores = torch.cdist(y, z, p=1.0) * (-self.recipe.eta / (SPREAD * math.sqrt(d)))
        else:
            scores = (y @ z.transpose(1, 2)) * (self.recipe.eta / math.sqrt(d))
        scores = scores[:, :, bags.rows].transpose(1, 2)  # (head, class, query, shot)
        return torch.softmax(scores.masked_fill(~real, -math.inf), dim=-1)

    def forward(self, query: Projected, support: Projected, bags: Bags) -> tuple[Tensor, Tensor]:
        """Prototypes v^P (query, class, head, d) and query vectors v^Q (query, head, d)."""
        weights = self.attention(query, support, bags)  # (head, class, query, shot)
        prototypes = _pool_shots(weights, support.value, bags) * _per_class(query.gate)
        vectors = query.value * query.gate
        if self.recipe.skip:
            prototypes = prototypes + _pool_shots(weights, support.key, bags)
            vectors = vectors + query.key
        return prototypes, vectors


class MeanPooling(nn.Module):
    """The ablation of CAP: a prototype is the mean of its class's image vectors."""

    def project(self, vectors: Tensor) -> Projected:
        """Image vectors as they are."""
        x = vectors.unsqueeze(1)  # (image, 1 head, channel)
        return Projected(x, x, x.new_ones(()))

    def forward(self, query: Projected, support: Projected, bags: Bags) -> tuple[Tensor, Tensor]:
        """Prototypes (query, class, 1, channel), alike for all queries, and query vectors."""
        weights = (bags.real / bags.shots[:, None]).to(query.value.dtype)  # (class, shot)
        means = torch.einsum("ls,lshd->lhd", weights, support.value[bags.rows])
        return means.expand(len(query.value), -1, -1, -1), query.value


def _pool_shots(weights: Tensor, values: Tensor, bags: Bags) -> Tensor:
    """(head, class, query, shot) and (image, head, d) to (query, class, head, d)."""
    bagged = values[bags.rows].permute(2, 0, 1, 3)  # (head, class, shot, d)
    return (weights @ bagged).permute(2, 1, 0, 3)


def _per_class(gate: Tensor) -> Tensor:
    return gate if gate.ndim == 0 else gate.unsqueeze(1)  # (query, 1, head, d)


def linear(channels: int, generator: torch.Generator | None) -> nn.Linear:
    """Make a square linear layer with PyTorch's default initialisation, drawn from a generator.

    Without a generator it has a shape only, and waits for values from a model file.
    """
    layer = nn.Linear(channels, channels, device="meta")  # draws nothing from the global generator
    if generator is None:
        return layer
    layer.to_empty(device="cpu")
    bound = 1 / math.sqrt(channels)
    with torch.no_grad():
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer
