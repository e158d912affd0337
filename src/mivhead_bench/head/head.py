"""The MIV-head: the three components in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mivhead.features import Block, Features
from mivhead.head.recipe import BlockConfig, Recipe, taken_blocks
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.cap import CrossAttentionPooling, MeanPooling, Projected
from mivhead_bench.head.logits import centred_cosines, combine
from mivhead_bench.head.pooling import Candidates, PoolingByAttention
from mivhead_bench.head.recipe import Ablation


class HeadBlock(nn.Module):
    """The three components for one block of the backbone, up to its cosines."""

    def __init__(
        self, config: BlockConfig, recipe: Ablation, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.config = config
        self.pooling = PoolingByAttention(config)
        self.cap: CrossAttentionPooling | MeanPooling = (
            MeanPooling(recipe)
            if recipe.prototype == "mean"
            else CrossAttentionPooling(config, recipe, generator)
        )

    def prepare(self, block: Block, like: Tensor) -> Candidates:
        """Derive the candidates, which do not change during training."""
        return self.pooling.prepare(block, like)

    def embed(self, candidates: Candidates) -> Projected:
        """Component 1 and the projections of Component 2."""
        return self.cap.project(self.pooling(candidates))

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Components 2 and 3: cosines (query, class) of v^Q with the prototypes v^P."""
        v_p, v_q = self.cap(query, support, bags, hidden)  # (query, class, channel), (query, ...)
        return centred_cosines(v_q, v_p, self.cap.recipe)


class MIVHead(nn.Module):
    """Compares queries with the bags of a support set.

    `logits` is the way from features to logits. Because a support set is compared with many
    queries, it consists of steps: `prepare` derives candidates, `embed` turns them into what CAP
    needs of each image, `forward` compares queries with bags.

    Parameters
    ----------
    blocks : sequence of BlockConfig
        The blocks of the features, shallow to deep; `taken_blocks` says which the head uses.
    recipe : Recipe
        How the head is built.
    generator : torch.Generator or None
        Source of the initial weights; with None they wait for values from `load_arrays`.
    """

    def __init__(
        self, blocks: Sequence[BlockConfig], recipe: Recipe, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.recipe = recipe = Ablation.of(recipe)
        self.taken = taken_blocks(blocks, recipe)
        self.blocks = nn.ModuleList(HeadBlock(blocks[i], recipe, generator) for i in self.taken)
        # Tells the device and the type, even of a head without parameters.
        self.register_buffer("anchor", torch.empty(0, dtype=torch.float32), persistent=False)
        self.anchor: Tensor

    def load_arrays(self, params: Mapping[str, NDArray[Any]]) -> None:
        """Set the parameters from arrays, named as in a model file."""
        tensors = {name: torch.tensor(value) for name, value in params.items()}
        self.load_state_dict(tensors, assign=True)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the parameters as arrays, named as in a model file."""
        return {name: value.numpy(force=True) for name, value in self.state_dict().items()}

    @property
    def layers(self) -> list[HeadBlock]:
        """The blocks, shallow to deep."""
        return cast("list[HeadBlock]", list(self.blocks))

    def prepare(self, features: Features) -> list[Candidates]:
        """Derive the candidates, which do not change during training."""
        blocks = [features.blocks[i] for i in self.taken]
        pairs = zip(self.layers, blocks, strict=True)
        return [layer.prepare(block, self.anchor) for layer, block in pairs]

    def embed(self, candidates: Sequence[Candidates]) -> list[Projected]:
        """Compute what CAP needs of each image, per block."""
        return [layer.embed(c) for layer, c in zip(self.layers, candidates, strict=True)]

    def forward(
        self,
        query: Sequence[Projected],
        support: Sequence[Projected],
        bags: Bags,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Cosines (block, query, class); a query does not see a shot that is `hidden` from it."""
        triples = zip(self.layers, query, support, strict=True)
        return torch.stack([layer(q, s, bags, hidden) for layer, q, s in triples])

    def logits(self, query: Features, support: Features, bags: Bags) -> Tensor:
        """From features to logits (query, class), as in the paper."""
        embedded = [self.embed(self.prepare(features)) for features in (query, support)]
        return combine(self(*embedded, bags), self.recipe)


def rows(embedded: Sequence[Projected], index: Tensor | slice) -> list[Projected]:
    """Select images in every block."""
    return [block.rows(index) for block in embedded]
