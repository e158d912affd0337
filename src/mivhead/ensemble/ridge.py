"""Ridge experts: ridge regressions of class memberships on fixed descriptors of an image.

A ridge regression has a closed form, and so have its leave-one-out predictions, which stacking
needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mivhead.ensemble.balance import left_out_predictions, one_has_several, shot_weights
from mivhead.ensemble.descriptors import COMPONENTS, SIDE, Kind, PatchPCA, compute_descriptors
from mivhead.features import Block, Features

Array = NDArray[np.float32]


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
    targets: Array,
    alpha: float,
    weights: NDArray[Any] | None = None,
    folds: NDArray[np.int64] | None = None,
) -> tuple[Ridge, Array]:
    """Fit a ridge regression with an intercept, in closed form.

    Written out because it also returns the leave-one-out predictions, which come for free with the
    inverse.

    Parameters
    ----------
    x : array
        Vectors (image, dimension).
    targets : array
        Memberships (image, class).
    alpha : float
        Strength of the penalty alpha |W|^2.
    weights : array or None, default=None
        Weights (image,); an image of weight 2 counts like two images. None: all are 1.
    folds : array or None, default=None
        The fold (image,) of each image, -1 for one that is left out on its own; None: all are.

    Returns
    -------
    ridge : Ridge
        The fitted map.
    left_out : array
        For every image, the prediction of a map fitted without it and the rest of its fold:
        (image, class).

    Examples
    --------
    >>> x = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge, left_out = fit_ridge(x, 2 * x + 1, alpha=1e-6)
    >>> ridge(np.array([[10.0]])).round(3).item(), left_out[3].round(3).item()
    (21.0, 7.0)
    """
    x64, targets64 = x.astype(np.float64), targets.astype(np.float64)
    counts = np.ones(len(x)) if weights is None else weights.astype(np.float64)
    shares, roots = counts / counts.sum(), np.sqrt(counts)[:, None]
    middle, rates = shares @ x64, shares @ targets64
    centred, wanted = x64 - middle, targets64 - rates
    coefficients, leverage = _solve(roots * centred, roots * wanted, alpha)
    fitted = centred @ coefficients
    if folds is None or (folds < 0).all():
        # Leaving an image out divides its residual by 1 - leverage, counting the intercept's.
        rest = np.maximum(1 - leverage - shares, 1e-9)
        left_out = targets64 - (wanted - fitted) / rest[:, None]
    else:
        without_mean = np.eye(len(x)) - shares
        maps, _ = _solve(roots * centred, roots * without_mean, alpha)
        hat = shares + centred @ maps  # predictions are hat @ targets
        left_out = left_out_predictions(hat, targets64, fitted + rates, folds)
    return _ridge(coefficients, rates - middle @ coefficients), left_out.astype(np.float32)


def _ridge(weights: NDArray[np.float64], intercepts: NDArray[np.float64]) -> Ridge:
    return Ridge(weights.astype(np.float32), intercepts.astype(np.float32))


def fit_one_of_each(
    x: Array, targets: Array, alpha: float, folds: NDArray[np.int64] | None = None
) -> tuple[Ridge, Array]:
    """Average ridge regressions on one shot of each class, if only one class has several shots.

    Nothing can be left out to find out how much a regression on all shots favours the large class,
    because leaving out the only shot of a class leaves nothing. Regressions on one shot of each
    class favour none.

    Parameters
    ----------
    x, targets, alpha, folds
        As for `fit_ridge`; each row of `targets` has a single 1.

    Returns
    -------
    ridge : Ridge
        The mean of a regression for each shot of the large class.
    left_out : array
        Predictions (image, class); for a shot of the large class, the mean of the regressions
        without any shot of its fold. Those of other shots are not left out.

    Examples
    --------
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
    mean = _ridge(
        np.mean([each.coefficients for each in ridges], axis=0, dtype=np.float64),
        np.mean([each.intercepts for each in ridges], axis=0, dtype=np.float64),
    )
    left_out = mean(x)
    fold = large if folds is None else np.where(folds[large] < 0, -1 - large, folds[large])
    predictions = np.stack([ridge(x[large]) for ridge in ridges])  # (ridge, image, class)
    for i, row in enumerate(large):
        left_out[row] = predictions[fold != fold[i], i].mean(axis=0)
    return mean, left_out


def fit_weighted_ridge(
    x: Array, targets: NDArray[Any], weights: NDArray[Any], alpha: float
) -> Ridge:
    """Fit a ridge regression with an intercept and a weight for each image, in closed form.

    Parameters
    ----------
    x, targets, alpha
        As for `fit_ridge`.
    weights : array
        Weights (image,); an image of weight 2 counts like two images.

    Returns
    -------
    Ridge
        The fitted map.
    """
    return fit_ridge(x, targets, alpha, weights)[0]


def _solve(
    x: NDArray[np.float64], targets: NDArray[np.float64], alpha: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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

    >>> features = Features([np.zeros((1, 4, 3, 3)), np.zeros((1, 8))])
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
) -> Array:
    """Weights of the experts before stacking: the deeper the block, the larger.

    With one shot per class, when they are final, the second-order experts get most of the weight.
    Several backbones share the weights of one.

    Chosen on one-shot tasks, where there are no out-of-fold predictions (docs/explanation).

    >>> prior_weights([Expert("second_order", i) for i in range(4)] + [Expert("mean", 3)])
    array([1., 1., 2., 3., 3.], dtype=float32)
    """
    spans = spans or [range(max(expert.block for expert in experts) + 1)]
    deepest = {block: span[-1] for span in spans for block in span}
    second_order, mean = ONE_SHOT if one_shot else USUAL
    by_kind = {"layout": 1.0, "mean": mean}
    weights = [
        by_kind.get(e.kind) or max(1.0, second_order * (3 - deepest[e.block] + e.block))
        for e in experts
    ]
    return np.array(weights, np.float32) / np.float32(len(spans))


def _descriptors(
    experts: Iterable[Expert], features: Features, pcas: Mapping[int, PatchPCA]
) -> Iterator[tuple[Expert, Array]]:
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
        cls,
        features: Features,
        labels: NDArray[np.int64],
        classes: int,
        spans: Sequence[range] = (),
        folds: NDArray[np.int64] | None = None,
    ) -> tuple[Self, Array]:
        """Fit all experts; also return predictions of left-out images (expert, image, class).

        Each image is left out on its own, or together with the others of its fold.
        """
        targets = np.eye(classes, dtype=np.float32)[labels]
        weights = shot_weights(labels)  # every class counts the same
        lone = one_has_several(np.bincount(labels))
        pcas = {
            i: PatchPCA.fit(block.map)
            for i, block in enumerate(features.blocks)
            if block.map is not None
        }
        experts = choose_experts(features.blocks, spans)
        fitted = {
            expert: fit_one_of_each(x, targets, ALPHA, folds)
            if lone
            else fit_ridge(x, targets, ALPHA, weights, folds)
            for expert, x in _descriptors(experts, features, pcas)
        }
        ridges, left_out = zip(*(fitted[expert] for expert in experts), strict=True)
        return cls(pcas, dict(zip(experts, ridges, strict=True))), np.stack(left_out)

    def __call__(self, features: Features) -> Array:
        """Predict memberships (expert, image, class)."""
        descriptors = _descriptors(self.ridges, features, self.pcas)
        memberships = {expert: self.ridges[expert](x) for expert, x in descriptors}
        return np.stack([memberships[expert] for expert in self.ridges])

    def describe(self, features: Features) -> dict[Expert, Array]:
        """Compute the descriptor (image, dimension) that each expert looks at."""
        found = dict(_descriptors(self.ridges, features, self.pcas))
        return {expert: found[expert] for expert in self.ridges}

    def tensors(self) -> dict[str, Array]:
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
        cls, tensors: Mapping[str, Array], blocks: Sequence[Block], spans: Sequence[range] = ()
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
    return int(components * min(SIDE, height) * min(SIDE, width))
