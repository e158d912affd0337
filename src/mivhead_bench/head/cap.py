"""Component 2: cross-attention pooling (CAP) of each class's bag of shots, given the query.

Equations 3 to 6 and 8 of the paper. The support is never repeated per query: pooling is linear in
the values, and the gate depends on the query alone, so that v^P = (A V) * gate + (A K), where A is
the attention of the query over the shots of a class.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mivhead.head.recipe import BlockConfig
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.pooling import LN_EPS
from mivhead_bench.head.recipe import Ablation

SPREAD = math.sqrt(0.72676)  # of |x - y| for standard normal x and y, so s = SPREAD * sqrt(d)


class Projected(NamedTuple):
    """What CAP needs of an image: its key, its value and, as a query, its gate."""

    key: Tensor  # (image, head, d)
    value: Tensor  # (image, head, d)
    gate: Tensor  # (image, head, d), or the scalar 1 without co-excitation

    def rows(self, index: Tensor | slice) -> Projected:
        """Select images."""
        return Projected(
            self.key[index],
            self.value[index],
            self.gate if self.gate.ndim == 0 else self.gate[index],
        )


class CrossAttentionPooling(nn.Module):
    """Queries and bags to prototypes v^P and query vectors v^Q.

    Works in two halves, because each image is compared with many others: `project` computes what
    is needed of an image, `forward` compares queries with bags.
    """

    def __init__(
        self, config: BlockConfig, recipe: Ablation, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.heads, self.recipe = config.heads, recipe
        channels = config.channels
        self.norm = nn.LayerNorm(channels, eps=LN_EPS)
        self.key = _linear(channels, generator) if recipe.cross_attention else nn.Identity()  # W^K
        self.value = _linear(channels, generator)  # W^V
        self.excitation = _linear(channels, generator) if recipe.co_excitation else None  # kappa
        if recipe.start == "identity" and generator is not None:
            self._start_as_identity()

    @torch.no_grad()
    def _start_as_identity(self) -> None:
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
        x = self.norm(vectors)  # v^query or v^target: (image, channel)
        key, value = self._split(self.key(x)), self._split(self.value(x))  # x W^K, x W^V
        if self.excitation is None:
            return Projected(key, value, value.new_ones(()))
        return Projected(key, value, self._split(torch.sigmoid(self.excitation(x))))  # equation 5

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)  # (image, head, d)

    def attention(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Weights of every shot of every class: (head, class, query, shot); 0 on padding.

        Shots that are `hidden` from a query, (class, shot, query), get no weight either. Without
        cross-attention the dimension of the heads, and that of the queries unless shots are hidden,
        has length 1.
        """
        if not self.recipe.cross_attention:
            real = bags.real[:, None, :]  # (class, 1, shot)
            if hidden is not None:
                real = real & ~hidden.transpose(1, 2)  # (class, query, shot)
            return (real / real.sum(-1, keepdim=True)).to(query.key.dtype)[None]
        y, z = query.key.transpose(0, 1), support.key.transpose(0, 1)  # (head, image, d)
        l1 = self.recipe.attention == "l1"
        scores = torch.cdist(z, y, p=1.0) if l1 else z @ y.transpose(1, 2)  # (head, shot, query)
        scores = scores * self.factor
        # The shots are not the last dimension, because a softmax over rows is faster.
        if bags.even:
            scores = scores.unflatten(1, bags.real.shape)  # (head, class, shot, query)
        else:
            scores = scores[:, bags.rows].masked_fill(~bags.real.unsqueeze(2), -math.inf)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, dim=2).transpose(2, 3)  # equation 4

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Equation 3: prototypes v^P (query, class, channel) and v^Q (query, channel)."""
        weights = self.attention(query, support, bags, hidden)  # A: (head, class, query, shot)
        vectors = query.value  # (query, head, d)
        prototypes = weights @ bags.collect(support.value)  # A V: (head, class, query, d)
        if self.excitation is not None:
            vectors = vectors * query.gate
            prototypes = prototypes * query.gate.transpose(0, 1).unsqueeze(1)
        if self.recipe.skip:  # equation 6; without cross-attention equation 8
            vectors = vectors + query.key
            prototypes = prototypes + weights @ bags.collect(support.key)
        v_q = vectors.flatten(1)  # concat(O^Q_1 .. O^Q_h): (query, channel)
        v_p = prototypes.permute(2, 1, 0, 3).flatten(2)  # concat(O^P_1 .. O^P_h)
        return v_p, v_q

    @property
    def factor(self) -> float:
        """Scale of distances or dot products in equation 4; its c cancels in the softmax."""
        scale = self.recipe.eta / math.sqrt(self.norm.normalized_shape[0] / self.heads)
        return -scale / SPREAD if self.recipe.attention == "l1" else scale


class MeanPooling(nn.Module):
    """The ablation of CAP: a prototype is the mean of its class's image vectors."""

    def __init__(self, recipe: Ablation) -> None:
        super().__init__()
        self.recipe = recipe

    def project(self, vectors: Tensor) -> Projected:
        """Image vectors as they are."""
        x = vectors.unsqueeze(1)  # (image, 1 head, channel)
        return Projected(x, x, x.new_ones(()))

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Means v^P (class, channel), the same for all queries, and v^Q (query, channel)."""
        assert hidden is None, "`Ablation` refuses self_mask with prototype='mean'"
        weights = (bags.real / bags.shots[:, None]).to(query.value.dtype)  # (class, shot)
        means = torch.einsum("ls,lshd->ld", weights, support.value[bags.rows])  # (class, channel)
        return means, query.value.flatten(1)


def _linear(channels: int, generator: torch.Generator | None) -> nn.Linear:
    """Make a square linear layer with PyTorch's default initialisation, drawn from a generator.

    Without a generator it has only a shape, and waits for values from a model file.
    """
    layer = nn.Linear(channels, channels, device="meta")  # draws nothing from the global generator
    if generator is None:
        return layer
    bound = 1 / math.sqrt(channels)
    for name, shape in (("weight", (channels, channels)), ("bias", (channels,))):
        values = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        setattr(layer, name, nn.Parameter(values))  # `to_empty` would import sympy
    return layer
