"""The MIV-head: the three components in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from mivhead.features import Block, Features
from mivhead.head.blocks import BlockConfig
from mivhead.head.cap import Bags, CrossAttentionPooling, MeanPooling, Projected, project
from mivhead.head.logits import centred_cosines
from mivhead.head.pooling import (
    Candidates,
    PoolingByAttention,
    derive_candidates,
    pool_candidates,
    pool_patches,
)
from mivhead.head.recipe import Recipe
from mivhead.kernels.backend import Operations, choose, chunks


def compare(
    cap: CrossAttentionPooling | MeanPooling,
    query: Projected,
    support: Projected,
    bags: Bags,
    hidden: Tensor | None,
) -> Tensor:
    """Components 2 and 3 of one block: cosines (query, class) of v^Q with the prototypes v^P."""
    v_p, v_q = cap(query, support, bags, hidden)  # (query, class, channel), (query, channel)
    return centred_cosines(v_q, v_p, cap.recipe)


# What `mivhead.kernels.backend` may replace by something faster.
FORMULAS = Operations(
    derive_candidates, pool_patches, pool_candidates, project, compare, keeps_prototypes=True
)


class HeadBlock(nn.Module):
    """The three components for one block of the backbone, up to its cosines."""

    operations: Operations
    _compare: Callable[..., Tensor]

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

    def use(self, operations: Operations) -> None:
        """Compute with these operations from now on."""
        self.operations = operations
        fused = isinstance(
            self.cap, CrossAttentionPooling
        )  # there is no compiled version for class means
        self._compare = operations.compare if fused else compare

    def prepare(self, block: Block, dtype: torch.dtype) -> Candidates:
        """Derive the candidates, which do not change during training."""
        return self.pooling.prepare(block, self.operations, dtype)

    def pool(self, candidates: Candidates) -> Tensor:
        """Component 1: image vectors M_n, (image, channel)."""
        vectors: Tensor = self.pooling(candidates, self.operations)
        return vectors

    def embed(self, candidates: Candidates) -> Projected:
        """Component 1 and the projections of Component 2."""
        return self.cap.project(self.pool(candidates), self.operations)

    def forward(
        self, query: Projected, support: Projected, bags: Bags, hidden: Tensor | None = None
    ) -> Tensor:
        """Cosines (query, class)."""
        return self._compare(self.cap, query, support, bags, hidden)


class MIVHead(nn.Module):
    """Compares queries with the bags of a support set.

    Works in two halves, because a support set is compared with many queries: `embed` turns
    prepared features into what CAP needs of each image, `forward` compares queries with bags.
    Training and prediction both call `forward`.

    The head computes with compiled operations or with the formulas of this package. It chooses when
    it is built and when it is moved to another device or converted to another type; see
    `mivhead.kernels.backend`.

    Parameters
    ----------
    blocks : sequence of BlockConfig
        The blocks of the features, shallow to deep. A block that is marked `pooled` is left to
        other heads and, with ridge experts in the recipe, those that are marked `plain` to them,
        unless there are no others.
    recipe : Recipe
        How the head is built.
    generator : torch.Generator or None
        Source of the initial weights; with None they wait for values from a model file.
    """

    def __init__(
        self, blocks: Sequence[BlockConfig], recipe: Recipe, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.recipe = recipe
        own = [i for i, config in enumerate(blocks) if not config.pooled] or [*range(len(blocks))]
        spared = recipe.has_experts and not all(blocks[i].plain for i in own)
        self.taken = [i for i in own if not (spared and blocks[i].plain)]
        self.blocks = nn.ModuleList(HeadBlock(blocks[i], recipe, generator) for i in self.taken)
        # Tells the device and the type, even of a head without parameters.
        self.register_buffer("anchor", torch.empty(0, dtype=torch.float32), persistent=False)
        self.anchor: Tensor
        self._choose_operations()

    def _choose_operations(self) -> None:
        self.operations = choose(FORMULAS, self.anchor.device, self.anchor.dtype)
        for layer in self.layers:
            layer.use(self.operations)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the head; PyTorch calls this from `to`, `double` and the like."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of PyTorch
        self._choose_operations()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Choose again, because the machine that unpickles a head may have no kernels."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of PyTorch
        self._choose_operations()

    @property
    def layers(self) -> list[HeadBlock]:
        """The blocks, shallow to deep."""
        return cast("list[HeadBlock]", list(self.blocks))

    def prepare(self, features: Features) -> list[Candidates]:
        """Derive the candidates, which do not change during training."""
        blocks = [features.blocks[i] for i in self.taken]
        pairs = zip(self.layers, blocks, strict=True)
        return [layer.prepare(block, self.anchor.dtype) for layer, block in pairs]

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

    def compare(
        self, query: Sequence[Projected], support: Sequence[Projected], bags: Bags
    ) -> Tensor:
        """Cosines (block, query, class) like `forward`, in chunks that keep memory flat."""
        parts = self.chunks(len(query[0].value), bags)
        return torch.cat([self(rows(query, chunk), support, bags) for chunk in parts], dim=1)

    def chunks(self, queries: int, bags: Bags) -> Iterator[slice]:
        """Slices of queries for which `forward` needs little memory."""
        classes, shots = bags.real.shape
        values = max(  # per query in one block: attention weights, prototypes
            classes * max(c.heads * shots, c.channels if self.operations.keeps_prototypes else 0)
            for c in (layer.config for layer in self.layers)
        )
        return chunks(queries, values, self.anchor.device.type)


def rows(embedded: Sequence[Projected], index: Tensor | slice) -> list[Projected]:
    """Select images in every block."""
    return list(embedded) if index == slice(None) else [block.rows(index) for block in embedded]
