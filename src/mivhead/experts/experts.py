"""All experts of a support set: which there are, and what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.blocks import Block
from mivhead.experts.descriptions import DIRECTIONS, SIDE, Kind, PatchSpace, describe
from mivhead.experts.ridge import Ridge, fit_ridge
from mivhead.features import Features

ALPHA = 0.1  # penalty of the ridge regressions, for vectors of length 1
LAYOUTS = 2  # how many of the deepest maps are described by their layout


class Expert(NamedTuple):
    """A ridge regression on one description of one block."""

    kind: Kind
    block: int

    @property
    def name(self) -> str:
        """What its tensors are called in a model file."""
        return f"block{self.block}.{self.kind}"


def choose_experts(blocks: Sequence[Block]) -> list[Expert]:
    """Choose the experts of features: of every map, of the deepest layouts, and of the last mean.

    >>> features = Features([torch.zeros(1, 4, 3, 3), torch.zeros(1, 8)])
    >>> [expert.name for expert in choose_experts(features.blocks)]
    ['block0.second_order', 'block0.layout', 'block1.mean']
    """
    maps = [i for i, block in enumerate(blocks) if block.map is not None]
    return [
        *(Expert("second_order", i) for i in maps),
        *(Expert("layout", i) for i in maps[-LAYOUTS:]),
        Expert("mean", len(blocks) - 1),
    ]


def expert_weights(experts: Sequence[Expert]) -> Tensor:
    """Tell how much each expert counts before any evidence: the deeper the block, the more.

    Chosen on tasks of one shot a class, where nothing can be held out (docs/explanation).

    >>> expert_weights([Expert("second_order", i) for i in range(4)] + [Expert("mean", 3)])
    tensor([1., 1., 2., 3., 3.])
    """
    deepest = max(expert.block for expert in experts)
    by_depth = [max(1.0, 3.0 - deepest + expert.block) for expert in experts]
    return torch.tensor(
        [1.0 if e.kind == "layout" else w for e, w in zip(experts, by_depth, strict=True)]
    )


def descriptions(
    experts: Iterable[Expert], features: Features, spaces: Mapping[int, PatchSpace]
) -> Iterator[tuple[Expert, Tensor]]:
    """Describe images as each expert sees them, (image, dimension), one block after the other."""
    for block, those in groupby(sorted(experts, key=_block), key=_block):
        kinds = [expert.kind for expert in those]
        for kind, x in describe(features.blocks[block], spaces.get(block), kinds):
            yield Expert(kind, block), x


def _block(expert: Expert) -> int:
    return expert.block


class Experts:
    """The fitted experts of a support set.

    Parameters
    ----------
    spaces
        How patches of a block are seen, by block.
    ridges
        The regressions.
    """

    def __init__(self, spaces: Mapping[int, PatchSpace], ridges: Mapping[Expert, Ridge]) -> None:
        self.spaces, self.ridges = dict(spaces), dict(ridges)

    @classmethod
    def fit(cls, features: Features, labels: Tensor, classes: int) -> tuple[Self, Tensor]:
        """Fit all experts; also return their held-out votes (expert, image, class)."""
        targets = F.one_hot(labels, classes).to(torch.float32)
        spaces = {
            i: PatchSpace.fit(block.map)
            for i, block in enumerate(features.blocks)
            if block.map is not None
        }
        experts = choose_experts(features.blocks)
        fitted = {
            expert: fit_ridge(x, targets, ALPHA)
            for expert, x in descriptions(experts, features, spaces)
        }
        ridges, held_out = zip(*(fitted[expert] for expert in experts), strict=True)
        return cls(spaces, dict(zip(experts, ridges, strict=True))), torch.stack(held_out)

    def __call__(self, features: Features) -> Tensor:
        """Votes (expert, image, class)."""
        described = descriptions(self.ridges, features, self.spaces)
        votes = {expert: self.ridges[expert](x) for expert, x in described}
        return torch.stack([votes[expert] for expert in self.ridges])

    def tensors(self) -> dict[str, Tensor]:
        """Return what a model file holds of them."""
        found = {}
        for i, space in self.spaces.items():
            found[f"block{i}.middle"] = space.middle
            found[f"block{i}.directions"] = space.directions
        for expert, ridge in self.ridges.items():
            found[f"{expert.name}.coefficients"] = ridge.coefficients
            found[f"{expert.name}.intercepts"] = ridge.intercepts
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], blocks: Sequence[Block]) -> Self:
        """Make experts from the tensors of a model file, which `expected_shapes` has checked."""
        spaces = {
            i: PatchSpace(tensors[f"block{i}.middle"], tensors[f"block{i}.directions"])
            for i, block in enumerate(blocks)
            if block.map is not None
        }
        ridges = {
            expert: Ridge(
                tensors[f"{expert.name}.coefficients"], tensors[f"{expert.name}.intercepts"]
            )
            for expert in choose_experts(blocks)
        }
        return cls(spaces, ridges)


def expected_shapes(blocks: Sequence[Block], classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `Experts.tensors` for such features."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, block in enumerate(blocks):
        if block.map is not None:
            channels = block.channels
            shapes[f"block{i}.middle"] = (channels,)
            shapes[f"block{i}.directions"] = (channels, min(channels, DIRECTIONS))
    for expert in choose_experts(blocks):
        size = _size(expert.kind, blocks[expert.block])
        shapes[f"{expert.name}.coefficients"] = (size, classes)
        shapes[f"{expert.name}.intercepts"] = (classes,)
    return shapes


def _size(kind: Kind, block: Block) -> int:
    """Length of a description."""
    if kind == "mean":
        return block.channels
    assert block.map is not None
    directions = min(block.channels, DIRECTIONS)
    if kind == "second_order":
        return directions * (directions + 1) // 2
    height, width = block.map.shape[2:]
    return directions * min(SIDE, height) * min(SIDE, width)
