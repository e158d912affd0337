"""Ridge experts: ridge regressions of class memberships on fixed descriptors of an image.

A ridge regression has a closed form, and so have its leave-one-out predictions, which stacking
needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.ensemble.descriptors import COMPONENTS, SIDE, Kind, PatchPCA, compute_descriptors
from mivhead.features import Block, Features


@dataclass(frozen=True, eq=False)
class Ridge:
    """A linear map of vectors to class memberships: near 1 for the right class, else near 0."""

    coefficients: Tensor  # (dimension, class)
    intercepts: Tensor  # (class,)

    def __call__(self, x: Tensor) -> Tensor:
        """Memberships (image, class) of vectors (image, dimension)."""
        # In double precision, so that a prediction does not depend on an image's place in a batch.
        memberships = x.double() @ self.coefficients.double() + self.intercepts.double()
        return memberships.to(x.dtype)


def fit_ridge(x: Tensor, targets: Tensor, alpha: float) -> tuple[Ridge, Tensor]:
    """Fit a ridge regression with an intercept, in closed form.

    Written out because it also returns the leave-one-out predictions, which come for free with the
    inverse.

    Parameters
    ----------
    x : Tensor
        Vectors (image, dimension).
    targets : Tensor
        Memberships (image, class).
    alpha : float
        Strength of the penalty alpha |W|^2.

    Returns
    -------
    ridge : Ridge
        The fitted map.
    left_out : Tensor
        For every image, the leave-one-out prediction of a map fitted on all others: (image,
        class).

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge, left_out = fit_ridge(x, 2 * x + 1, alpha=1e-6)
    >>> ridge(torch.tensor([[10.0]])).round(decimals=3), left_out[3].round(decimals=3)
    (tensor([[21.]]), tensor([7.]))
    """
    x64, targets64 = x.double(), targets.double()
    middle, rates = x64.mean(dim=0), targets64.mean(dim=0)
    centred, wanted = x64 - middle, targets64 - rates
    weights, leverage = _solve(centred, wanted, alpha)
    n = len(x)
    # Leaving an image out divides its residual by 1 - leverage, counting that of the intercept.
    residuals = wanted - centred @ weights
    rest = (1 - leverage - 1 / n).clamp_min(1e-9)
    left_out = targets64 - residuals / rest.unsqueeze(1)
    ridge = Ridge(weights.to(x.dtype), (rates - middle @ weights).to(x.dtype))
    return ridge, left_out.to(x.dtype)


def fit_weighted_ridge(x: Tensor, targets: Tensor, weights: Tensor, alpha: float) -> Ridge:
    """Fit a ridge regression with an intercept and a weight for each image, in closed form.

    Parameters
    ----------
    x, targets, alpha
        As for `fit_ridge`.
    weights : Tensor
        Weights (image,); an image of weight 2 counts like two images.

    Returns
    -------
    Ridge
        The fitted map.
    """
    x64, targets64 = x.double(), targets.double()
    shares, roots = weights.double() / weights.sum(), weights.double().sqrt().unsqueeze(1)
    middle, rates = shares @ x64, shares @ targets64
    coefficients, _ = _solve(roots * (x64 - middle), roots * (targets64 - rates), alpha)
    return Ridge(coefficients.to(x.dtype), (rates - middle @ coefficients).to(x.dtype))


def _solve(x: Tensor, targets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return coefficients (dimension, class) without an intercept, and the leverages (image,)."""
    n, dimensions = x.shape
    if n <= dimensions:  # the dual system is the smaller one
        gram = x @ x.T  # (image, image)
        inverse = torch.linalg.inv(gram + alpha * _eye(gram))
        # The diagonal of gram (gram + alpha)^-1.
        return x.T @ (inverse @ targets), (gram * inverse).sum(dim=1)
    scatter = x.T @ x  # (dimension, dimension)
    inverse = torch.linalg.inv(scatter + alpha * _eye(scatter))
    return inverse @ (x.T @ targets), ((x @ inverse) * x).sum(dim=1)


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


ALPHA = 0.1  # penalty of the ridge regressions, for vectors of length 1
# Prior weights of the second-order experts, per block from three below the deepest; of the mean.
USUAL, ONE_SHOT = (1.0, 3.0), (2.5, 2.5)
LAYOUTS = 2  # how many of the deepest maps have an expert on their layout


class Expert(NamedTuple):
    """A ridge regression on one descriptor of one block."""

    kind: Kind
    block: int

    @property
    def name(self) -> str:
        """Prefix of its tensors in a model file."""
        return f"block{self.block}.{self.kind}"


def choose_experts(blocks: Sequence[Block], spans: Sequence[range] = ()) -> list[Expert]:
    """List the experts for features with these blocks.

    The second-order descriptors of every map and, of each backbone (`spans`, see
    `mivhead.head.blocks.spans_of`; usually there is one), the layouts of the deepest maps and the
    mean of the last block.

    >>> features = Features([torch.zeros(1, 4, 3, 3), torch.zeros(1, 8)])
    >>> [expert.name for expert in choose_experts(features.blocks)]
    ['block0.second_order', 'block0.layout', 'block1.mean']
    """
    spans = spans or [range(len(blocks))]
    maps = [[i for i in span if blocks[i].map is not None] for span in spans]
    return [
        *(Expert("second_order", i) for own in maps for i in own),
        *(Expert("layout", i) for own in maps for i in own[-LAYOUTS:]),
        *(Expert("mean", span[-1]) for span in spans),
    ]


def prior_weights(
    experts: Sequence[Expert], spans: Sequence[range] = (), *, one_shot: bool = False
) -> Tensor:
    """Weights of the experts before stacking: the deeper the block, the larger.

    With one shot per class, when they are final, the second-order experts get most of the weight.
    Several backbones share the weights of one.

    Chosen on one-shot tasks, where there are no out-of-fold predictions (docs/explanation).

    >>> prior_weights([Expert("second_order", i) for i in range(4)] + [Expert("mean", 3)])
    tensor([1., 1., 2., 3., 3.])
    """
    spans = spans or [range(max(expert.block for expert in experts) + 1)]
    deepest = {block: span[-1] for span in spans for block in span}
    second_order, mean = ONE_SHOT if one_shot else USUAL
    by_kind = {"layout": 1.0, "mean": mean}
    weights = [
        by_kind.get(e.kind) or max(1.0, second_order * (3 - deepest[e.block] + e.block))
        for e in experts
    ]
    return torch.tensor(weights) / len(spans)


def _descriptors(
    experts: Iterable[Expert], features: Features, pcas: Mapping[int, PatchPCA]
) -> Iterator[tuple[Expert, Tensor]]:
    """Compute the descriptor of each expert, (image, dimension), block by block."""
    for block, group in groupby(sorted(experts, key=_block), key=_block):
        kinds = [expert.kind for expert in group]
        for kind, x in compute_descriptors(features.blocks[block], pcas.get(block), kinds):
            yield Expert(kind, block), x


def _block(expert: Expert) -> int:
    return expert.block


class Experts:
    """The fitted experts of a support set.

    Parameters
    ----------
    pcas : mapping of int to PatchPCA
        The PCA of the patches, by block.
    ridges : mapping of Expert to Ridge
        The regressions.
    """

    def __init__(self, pcas: Mapping[int, PatchPCA], ridges: Mapping[Expert, Ridge]) -> None:
        self.pcas, self.ridges = dict(pcas), dict(ridges)

    @classmethod
    def fit(
        cls, features: Features, labels: Tensor, classes: int, spans: Sequence[range] = ()
    ) -> tuple[Self, Tensor]:
        """Fit all experts; also return their leave-one-out predictions (expert, image, class)."""
        targets = F.one_hot(labels, classes).to(torch.float32)
        pcas = {
            i: PatchPCA.fit(block.map)
            for i, block in enumerate(features.blocks)
            if block.map is not None
        }
        experts = choose_experts(features.blocks, spans)
        fitted = {
            expert: fit_ridge(x, targets, ALPHA)
            for expert, x in _descriptors(experts, features, pcas)
        }
        ridges, left_out = zip(*(fitted[expert] for expert in experts), strict=True)
        return cls(pcas, dict(zip(experts, ridges, strict=True))), torch.stack(left_out)

    def __call__(self, features: Features) -> Tensor:
        """Predict memberships (expert, image, class)."""
        descriptors = _descriptors(self.ridges, features, self.pcas)
        memberships = {expert: self.ridges[expert](x) for expert, x in descriptors}
        return torch.stack([memberships[expert] for expert in self.ridges])

    def describe(self, features: Features) -> dict[Expert, Tensor]:
        """Compute the descriptor (image, dimension) that each expert looks at."""
        found = dict(_descriptors(self.ridges, features, self.pcas))
        return {expert: found[expert] for expert in self.ridges}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a model file, by name."""
        found = {}
        for i, pca in self.pcas.items():
            found[f"block{i}.middle"] = pca.mean
            found[f"block{i}.directions"] = pca.components
        for expert, ridge in self.ridges.items():
            found[f"{expert.name}.coefficients"] = ridge.coefficients
            found[f"{expert.name}.intercepts"] = ridge.intercepts
        return found

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], blocks: Sequence[Block], spans: Sequence[range] = ()
    ) -> Self:
        """Make experts from the tensors of a model file, checked against `expected_shapes`."""
        pcas = {
            i: PatchPCA(tensors[f"block{i}.middle"], tensors[f"block{i}.directions"])
            for i, block in enumerate(blocks)
            if block.map is not None
        }
        ridges = {
            expert: Ridge(
                tensors[f"{expert.name}.coefficients"], tensors[f"{expert.name}.intercepts"]
            )
            for expert in choose_experts(blocks, spans)
        }
        return cls(pcas, ridges)


def expected_shapes(
    blocks: Sequence[Block], classes: int, spans: Sequence[range] = ()
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `Experts.tensors` for such features."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, block in enumerate(blocks):
        if block.map is not None:
            channels = block.channels
            shapes[f"block{i}.middle"] = (channels,)
            shapes[f"block{i}.directions"] = (channels, min(channels, COMPONENTS))
    for expert in choose_experts(blocks, spans):
        size = _size(expert.kind, blocks[expert.block])
        shapes[f"{expert.name}.coefficients"] = (size, classes)
        shapes[f"{expert.name}.intercepts"] = (classes,)
    return shapes


def _size(kind: Kind, block: Block) -> int:
    """Length of a descriptor."""
    if kind == "mean":
        return block.channels
    assert block.map is not None
    components = min(block.channels, COMPONENTS)
    if kind == "second_order":
        return components * (components + 1) // 2
    height, width = block.map.shape[2:]
    return components * min(SIDE, height) * min(SIDE, width)
