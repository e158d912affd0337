"""Component 2: cross-attention pooling (CAP) of each class's bag of shots, given the query.

Equations 3 to 6 and 8 of the paper. The support is never repeated per query: pooling is linear in
the values, and the gate depends on the query alone, so that v^P = (A V) * gate + (A K), where A is
the attention of the query over the shots of a class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mivhead.head.blocks import BlockConfig
from mivhead.head.pooling import LN_EPS
from mivhead.head.recipe import Recipe
from mivhead.kernels.backend import Operations, sigmoid, softmax

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


@dataclass(frozen=True, eq=False)
class Bags:
    """The shots of each class, as a padded table of support rows."""

    rows: Tensor  # (class, shot): support rows, padded with row 0
    real: Tensor  # (class, shot): whether the entry is a shot rather than padding
    order: Tensor  # (shot,): support rows, class after class
    starts: Tensor  # (class + 1,): where each class starts in `order`
    even: bool  # whether all rows are in order and nothing is padded, as with equal shots

    @classmethod
    def from_labels(cls, labels: Tensor, classes: int) -> Bags:
        """Make bags from class numbers 0 .. classes - 1, each of which occurs at least once.

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).rows
        tensor([[0, 2],
                [1, 0]])
        """
        shots = torch.bincount(labels, minlength=classes)  # (class,)
        place = torch.arange(int(shots.max()), device=labels.device)  # (shot,)
        real = place < shots[:, None]  # (class, shot)
        rows = torch.zeros(real.shape, dtype=torch.long, device=labels.device)
        rows[real] = order = labels.argsort(stable=True)
        even = bool(real.all()) and torch.equal(order, torch.arange(len(labels)).to(order))
        starts = torch.cat([shots.new_zeros(1), shots.cumsum(0)])
        return cls(rows, real, order, starts, even)

    @classmethod
    def from_shots(cls, shots: Sequence[int], device: torch.device) -> Bags:
        """Make the bags of a support set that is ordered by class."""
        labels = torch.repeat_interleave(torch.as_tensor(shots, device=device))
        return cls.from_labels(labels, len(shots))

    def own(self, sources: Tensor) -> Tensor:
        """Find the shot that each query was made from, if its class has others.

        `sources` holds the support row of every query. The result is its position in `order`, or
        -1.

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

    def collect(self, values: Tensor) -> Tensor:
        """Sort the values of the support, (image, head, d), into bags: (head, class, shot, d)."""
        bagged = values.unflatten(0, self.real.shape) if self.even else values[self.rows]
        return bagged.permute(2, 0, 1, 3)


class CrossAttentionPooling(nn.Module):
    """Queries and bags to prototypes v^P and query vectors v^Q.

    Works in two halves, because each image is compared with many others: `project` computes what
    is needed of an image, `forward` compares queries with bags.
    """

    def __init__(
        self, config: BlockConfig, recipe: Recipe, generator: torch.Generator | None
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

    def project(self, vectors: Tensor, operations: Operations) -> Projected:
        """Image vectors (image, channel) to keys, values and gates."""
        layers = (self.key, self.value, self.excitation)
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        x, *projected = operations.project(self.norm, linear, vectors)  # LN(x), then each layer
        key = projected.pop(0) if isinstance(self.key, nn.Linear) else x  # x W^K: (image, channel)
        value = projected.pop(0)  # x W^V: (image, channel)
        if not projected:
            return Projected(self._split(key), self._split(value), value.new_ones(()))
        gate = sigmoid(projected.pop())  # MHCE, equation 5: (image, channel)
        return Projected(self._split(key), self._split(value), self._split(gate))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)  # (image, head, d)

    def attention(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Weights of every shot of every class: (head, class, query, shot); 0 on padding.

        The `hidden` shot of a query (`Bags.own`) gets no weight either. Without cross-attention
        the dimension of the heads, and that of the queries unless shots are hidden, has length 1.
        """
        masked = None if hidden is None else bags.table(hidden)  # (class, shot, query)
        if not self.recipe.cross_attention:
            real = bags.real[:, None, :]  # (class, 1, shot)
            if masked is not None:
                real = real & ~masked.transpose(1, 2)  # (class, query, shot)
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
        if masked is not None:
            scores = scores.masked_fill(masked, -math.inf)
        return softmax(scores, dim=2).transpose(2, 3)  # equation 4

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

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def project(self, vectors: Tensor, operations: Operations) -> Projected:
        """Image vectors as they are."""
        del operations  # nothing is computed
        x = vectors.unsqueeze(1)  # (image, 1 head, channel)
        return Projected(x, x, x.new_ones(()))

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Means v^P (class, channel), the same for all queries, and v^Q (query, channel)."""
        assert hidden is None, "Recipe refuses self_mask with prototype='mean'"
        weights = (bags.real / bags.shots[:, None]).to(query.value.dtype)  # (class, shot)
        means = torch.einsum("ls,lshd->ld", weights, support.value[bags.rows])  # (class, channel)
        return means, query.value.flatten(1)


def project(norm: nn.LayerNorm, layers: Sequence[nn.Linear], vectors: Tensor) -> list[Tensor]:
    """Normalise vectors and apply each layer to the result: (image, channel) each."""
    x = norm(vectors)  # v^query or v^target
    return [x, *(layer(x) for layer in layers)]


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
