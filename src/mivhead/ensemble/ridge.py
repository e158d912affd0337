"""Ridge experts: ridge regressions of class memberships on fixed descriptors of an image.

A ridge regression has a closed form, and so have its predictions of left-out images, which stacking
needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mivhead.ensemble.balance import left_out_predictions, only_one_has_several, shot_weights
from mivhead.ensemble.constants import ALPHA, COMPONENTS, LAYOUTS, SIDE
from mivhead.ensemble.descriptors import Kind, PatchPCA, compute_descriptors
from mivhead.features import Block, Features

Array = NDArray[np.float32]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ridge:
    """A linear map of vectors to class memberships: near 1 for the right class, else near 0."""

    coefficients: Array  # (dimension, class)
    intercepts: Array  # (class,)

    def __call__(self, x: Array) -> Array:
        """Memberships (image, class) of vectors (image, dimension)."""
        # In double precision, so that a prediction does not depend on an image's place in a batch.
        memberships: Array = (
            x.astype(np.float64) @ self.coefficients.astype(np.float64) + self.intercepts
        ).astype(np.float32)
        return memberships


def fit_ridge(
    x: Array,
    targets: NDArray[Any],
    alpha: float = ALPHA,
    weights: Floats | None = None,
    folds: NDArray[np.int64] | None = None,
) -> tuple[Ridge, Array]:
    """Fit a ridge regression with an intercept; also predict every image without its fold.

    Vectors are (image, dimension), targets (image, class). An image of weight 2 counts like two
    images. An image of fold -1 is left out on its own, and so are all without `folds`.

    >>> x = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge, left_out = fit_ridge(x, 2 * x + 1, alpha=1e-6)
    >>> ridge(np.array([[10.0]])).round(3).item(), left_out[3].round(3).item()
    (21.0, 7.0)
    """
    x64, y = x.astype(np.float64), targets.astype(np.float64)
    counts = np.ones(len(x)) if weights is None else weights
    parts, roots = counts / counts.sum(), np.sqrt(counts)[:, None]
    middle, rates = parts @ x64, parts @ y
    centred, wanted = x64 - middle, y - rates
    coefficients, leverage = _solve(roots * centred, roots * wanted, alpha)
    fitted = centred @ coefficients
    if folds is None or (folds < 0).all():
        # Leaving an image out divides its residual by 1 - leverage, counting the intercept's.
        rest = np.maximum(1 - leverage - parts, 1e-9)
        left_out = y - (wanted - fitted) / rest[:, None]
    else:
        maps, _ = _solve(roots * centred, roots * (np.eye(len(x)) - parts), alpha)
        hat = parts + centred @ maps  # predictions are hat @ targets
        left_out = left_out_predictions(hat, y, fitted + rates, folds)
    intercepts = rates - middle @ coefficients
    ridge = Ridge(coefficients.astype(np.float32), intercepts.astype(np.float32))
    return ridge, left_out.astype(np.float32)


def _solve(x: Floats, targets: Floats, alpha: float) -> tuple[Floats, Floats]:
    """Return coefficients (dimension, class) without an intercept, and the leverages (image,)."""
    n, dimensions = x.shape
    if n <= dimensions:  # the dual system is the smaller one
        gram = x @ x.T  # (image, image)
        inverse = np.linalg.inv(gram + alpha * np.eye(n))
        # The diagonal of gram (gram + alpha)^-1.
        return x.T @ (inverse @ targets), (gram * inverse).sum(axis=1)
    scatter = x.T @ x  # (dimension, dimension)
    inverse = np.linalg.inv(scatter + alpha * np.eye(dimensions))
    return inverse @ (x.T @ targets), ((x @ inverse) * x).sum(axis=1)


def fit_one_of_each(
    x: Array, targets: Array, alpha: float = ALPHA, folds: NDArray[np.int64] | None = None
) -> tuple[Ridge, Array]:
    """Average ridge regressions on one shot of each class, if only one class has several shots.

    Nothing can be left out to find out how much a regression on all shots favours the large class,
    because leaving out the only shot of a class leaves nothing. Regressions on one shot of each
    class favour none. A shot of the large class is predicted by the regressions without its fold;
    other shots are not left out.

    >>> x = np.array([[0.0, 0.0], [0.2, 0.0], [0.0, 0.2], [1.0, 1.0]])
    >>> ridge, _ = fit_one_of_each(x, np.eye(2)[[0, 0, 0, 1]], alpha=1e-6)
    >>> ridge(np.array([[0.4, 0.4], [0.7, 0.7]])).argmax(axis=1).tolist()
    [0, 1]
    """
    labels = targets.argmax(axis=1)
    large = np.flatnonzero(labels == np.bincount(labels).argmax())
    single = np.setdiff1d(np.arange(len(x)), large)
    chosen = [np.append(row, single) for row in large]
    ridges = [fit_ridge(x[rows], targets[rows], alpha)[0] for rows in chosen]
    coefficients = np.stack([ridge.coefficients for ridge in ridges]).mean(0, np.float64)
    intercepts = np.stack([ridge.intercepts for ridge in ridges]).mean(0, np.float64)
    mean = Ridge(coefficients.astype(np.float32), intercepts.astype(np.float32))
    left_out = mean(x)
    fold = large if folds is None else np.where(folds[large] < 0, -1 - large, folds[large])
    predictions = np.stack([ridge(x[large]) for ridge in ridges])  # (ridge, image, class)
    for i, row in enumerate(large):
        left_out[row] = predictions[fold != fold[i], i].mean(axis=0)
    return mean, left_out


class Expert(NamedTuple):
    """A ridge regression on one descriptor of one block."""

    kind: Kind
    block: int

    @property
    def name(self) -> str:
        """Prefix of its tensors in a model file."""
        return f"block{self.block}.{self.kind}"


def choose_experts(blocks: Sequence[Block]) -> list[Expert]:
    """List the experts: second order of every map, layout of the deepest maps, mean of the last.

    >>> features = Features([np.zeros((1, 4, 3, 3)), np.zeros((1, 8))])
    >>> [expert.name for expert in choose_experts(features.blocks)]
    ['block0.second_order', 'block0.layout', 'block1.mean']
    """
    maps = [i for i, block in enumerate(blocks) if block.map is not None]
    return [
        *(Expert("second_order", i) for i in maps),
        *(Expert("layout", i) for i in maps[-LAYOUTS:]),
        Expert("mean", len(blocks) - 1),
    ]


@dataclass(frozen=True, eq=False)
class Experts:
    """The fitted experts of a support set, and the PCA of the patches of each block."""

    pcas: Mapping[int, PatchPCA]
    ridges: Mapping[Expert, Ridge]

    @classmethod
    def fit(
        cls,
        features: Features,
        labels: NDArray[np.int64],
        classes: int,
        folds: NDArray[np.int64] | None = None,
    ) -> tuple[Self, Array]:
        """Fit all experts; also return predictions of left-out images (expert, image, class).

        Each image is left out on its own, or together with the others of its fold.
        """
        pcas = {
            i: PatchPCA.fit(block.map)
            for i, block in enumerate(features.blocks)
            if block.map is not None
        }
        targets = np.eye(classes, dtype=np.float32)[labels]
        lone = only_one_has_several(np.bincount(labels))
        experts = choose_experts(features.blocks)
        fitted = {
            expert: fit_one_of_each(x, targets, ALPHA, folds)
            if lone
            else fit_ridge(x, targets, ALPHA, shot_weights(labels), folds)
            for expert, x in _describe(experts, features, pcas)
        }
        ridges = {expert: fitted[expert][0] for expert in experts}
        return cls(pcas, ridges), np.stack([fitted[expert][1] for expert in experts])

    def __call__(self, features: Features) -> Array:
        """Predict memberships (expert, image, class)."""
        described = _describe(list(self.ridges), features, self.pcas)  # one block at a time
        memberships = {expert: self.ridges[expert](x) for expert, x in described}
        return np.stack([memberships[expert] for expert in self.ridges])

    def describe(self, features: Features) -> dict[Expert, Array]:
        """Compute the descriptor (image, dimension) that each expert looks at."""
        described = dict(_describe(list(self.ridges), features, self.pcas))
        return {expert: described[expert] for expert in self.ridges}

    def tensors(self) -> dict[str, Array]:
        """Tensors of a model file, by name."""
        tensors = {}
        for i, pca in self.pcas.items():
            tensors[f"block{i}.middle"] = pca.mean
            tensors[f"block{i}.directions"] = pca.components
        for expert, ridge in self.ridges.items():
            tensors[f"{expert.name}.coefficients"] = ridge.coefficients
            tensors[f"{expert.name}.intercepts"] = ridge.intercepts
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array], blocks: Sequence[Block]) -> Self:
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
            for expert in choose_experts(blocks)
        }
        return cls(pcas, ridges)


def _describe(
    experts: Sequence[Expert], features: Features, pcas: Mapping[int, PatchPCA]
) -> Iterator[tuple[Expert, Array]]:
    """Yield the descriptor (image, dimension) of each expert, those of one block at a time."""
    for i, block in enumerate(features.blocks):
        kinds = [expert.kind for expert in experts if expert.block == i]
        for kind, x in compute_descriptors(block, pcas.get(i), kinds).items():
            yield Expert(kind, i), x


def expected_shapes(blocks: Sequence[Block], classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `Experts.tensors` for such features."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, block in enumerate(blocks):
        if block.map is not None:
            shapes[f"block{i}.middle"] = (block.channels,)
            shapes[f"block{i}.directions"] = (block.channels, min(block.channels, COMPONENTS))
    for expert in choose_experts(blocks):
        block = blocks[expert.block]
        size, components = block.channels, min(block.channels, COMPONENTS)
        if expert.kind == "second_order":
            size = components * (components + 1) // 2
        elif expert.kind == "layout" and block.map is not None:
            height, width = block.map.shape[2:]
            size = components * min(SIDE, height) * min(SIDE, width)
        shapes[f"{expert.name}.coefficients"] = (size, classes)
        shapes[f"{expert.name}.intercepts"] = (classes,)
    return shapes
