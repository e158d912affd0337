"""The MIV-head: the three components in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mivhead.features import Features
from mivhead.head.cap import Bags, CrossAttentionPooling, MeanPooling, Projected
from mivhead.head.logits import combine
from mivhead.head.pooling import Candidates, PoolingByAttention, prepare
from mivhead.head.recipe import BlockConfig, Recipe
from mivhead.kernels.library import serves

CHUNK_VALUES = 2**20  # attention weights, or numbers in prototypes, at once: 4 MB in float32


class HeadBlock(nn.Module):
    """Components 1 and 2 of one block of the backbone."""

    def __init__(
        self, config: BlockConfig, recipe: Recipe, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.config = config
        self.pooling = PoolingByAttention(config)
        self.cap: CrossAttentionPooling | MeanPooling = (
            MeanPooling(recipe)
            if recipe.prototype == "mean"
            else CrossAttentionPooling(config, recipe, generator)
        )

    def embed(self, candidates: Candidates) -> Projected:
        """Component 1 and the projections of Component 2."""
        return self.cap.project(self.pooling(candidates))

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Cosines (query, class)."""
        cosines: Tensor = self.cap(query, support, bags, hidden)
        return cosines


class MIVHead(nn.Module):
    """Scores queries against the bags of a support set.

    Works in two halves, because a support set is compared with many queries: `embed` turns
    prepared features into what CAP needs of each image, `forward` compares queries with bags.
    Initial weights come from `generator`; with None they wait for values from a model file.
    """

    def __init__(
        self, blocks: Sequence[BlockConfig], recipe: Recipe, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.recipe = recipe
        # With experts, blocks that are only for them are left out, unless there are no others.
        spared = recipe.vote != "logsumexp" and not all(config.plain for config in blocks)
        self.taken = [i for i, config in enumerate(blocks) if not (spared and config.plain)]
        self.blocks = nn.ModuleList(HeadBlock(blocks[i], recipe, generator) for i in self.taken)

    @property
    def layers(self) -> list[HeadBlock]:
        """The blocks, shallow to deep."""
        return cast("list[HeadBlock]", list(self.blocks))

    def prepare(self, features: Features) -> list[Candidates]:
        """Derive the candidates, which do not change in training."""
        blocks = [features.blocks[i] for i in self.taken]
        pairs = zip(blocks, self.layers, strict=True)
        return [prepare(block, layer.config) for block, layer in pairs]

    def embed(self, candidates: Sequence[Candidates]) -> list[Projected]:
        """Compute what CAP needs of each image, per block."""
        return [layer.embed(c) for layer, c in zip(self.layers, candidates, strict=True)]

    def forward(
        self, query: Sequence[Projected], support: Sequence[Projected], bags: Bags
    ) -> Tensor:
        """Logits (query, class)."""
        return combine(self.cosines(query, support, bags), self.recipe)

    def cosines(
        self,
        query: Sequence[Projected],
        support: Sequence[Projected],
        bags: Bags,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Cosines (block, query, class); a query does not see shots that are `hidden` from it."""
        triples = zip(self.layers, query, support, strict=True)
        return torch.stack([layer(q, s, bags, hidden) for layer, q, s in triples])

    def compare(
        self, query: Sequence[Projected], support: Sequence[Projected], bags: Bags
    ) -> Tensor:
        """Cosines (block, query, class) in chunks of queries, so that memory stays flat."""
        chunks = self.chunks(len(query[0].value), bags)
        parts = [self.cosines(rows(query, chunk), support, bags) for chunk in chunks]
        return torch.cat(parts, dim=1)

    def chunks(self, queries: int, bags: Bags) -> Iterator[slice]:
        """Slices of queries that keep the memory of `forward` flat."""
        classes, shots = bags.real.shape
        # The compiled functions make few prototypes at once.
        compiled = serves(next(self.parameters(), torch.empty(0)))
        numbers = max(  # of one query in one block: attention weights, prototypes
            classes * max(layer.config.heads * shots, 0 if compiled else layer.config.channels)
            for layer in self.layers
        )
        size = max(1, CHUNK_VALUES // numbers)
        if size >= queries:
            return iter([slice(None)])
        return (slice(start, start + size) for start in range(0, queries, size))


def rows(embedded: Sequence[Projected], index: Tensor | slice) -> list[Projected]:
    """Select images in every block."""
    return list(embedded) if index == slice(None) else [block.rows(index) for block in embedded]
