"""Ridge regression onto class memberships, with what it would say of images it had not seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.ensemble.descriptors import DIRECTIONS, SIDE, Kind, PatchSpace, describe
from mivhead.features import Block, Features


@dataclass(frozen=True, eq=False)
class Ridge:
    """A linear map of vectors to class memberships: near 1 for the right class, near 0 else."""

    coefficients: Tensor  # (dimension, class)
    intercepts: Tensor  # (class,)

    def __call__(self, x: Tensor) -> Tensor:
        """Memberships (image, class) of vectors (image, dimension)."""
        # In double precision, so that an image's answer does not depend on its place in a batch.
        votes = x.double() @ self.coefficients.double() + self.intercepts.double()
        return votes.to(x.dtype)


def fit_ridge(x: Tensor, targets: Tensor, alpha: float) -> tuple[Ridge, Tensor]:
    """Least squares with a penalty alpha |W|^2 and a free intercept, in closed form.

    Parameters
    ----------
    x
        Vectors (image, dimension).
    targets
        Memberships (image, class).
    alpha
        Weight of the penalty.

    Returns
    -------
    ridge, held_out
        The fitted map, and for every image what a map fitted on all others says: (image, class).

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge, held_out = fit_ridge(x, 2 * x + 1, alpha=1e-6)
    >>> ridge(torch.tensor([[10.0]])).round(decimals=3), held_out[3].round(decimals=3)
    (tensor([[21.]]), tensor([7.]))
    """
    x64, targets64 = x.double(), targets.double()
    middle, rates = x64.mean(dim=0), targets64.mean(dim=0)
    centred, wanted = x64 - middle, targets64 - rates
    n, dimensions = x.shape
    if n <= dimensions:  # the dual system is the smaller one
        gram = centred @ centred.T  # (image, image)
        inverse = torch.linalg.inv(gram + alpha * _eye(gram))
        weights = centred.T @ (inverse @ wanted)  # (dimension, class)
        leverage = (gram * inverse).sum(dim=1)  # diagonal of gram (gram + alpha)^-1
    else:
        scatter = centred.T @ centred  # (dimension, dimension)
        inverse = torch.linalg.inv(scatter + alpha * _eye(scatter))
        weights = inverse @ (centred.T @ wanted)
        leverage = ((centred @ inverse) * centred).sum(dim=1)
    # Leaving an image out multiplies its residual by 1 / (1 - its leverage), that of the mean too.
    residuals = wanted - centred @ weights
    rest = (1 - leverage - 1 / n).clamp_min(1e-9)
    held_out = targets64 - residuals / rest.unsqueeze(1)
    ridge = Ridge(weights.to(x.dtype), (rates - middle @ weights).to(x.dtype))
    return ridge, held_out.to(x.dtype)


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


# All experts of a support set: which there are, and what they say.


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
