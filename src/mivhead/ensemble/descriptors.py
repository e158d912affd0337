"""Fixed descriptors of an image, computed from the patches of a block: one vector each.

- `mean`: the mean patch, or the token: what is there.
- `layout`: all patches, concatenated: what is where.
- `second_order`: the covariances of channels over the patches: which textures and parts there are.

The last two see patches in the coordinates of a PCA of the support set's patches, so that the size
of a descriptor does not depend on the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import unit
from mivhead._util.threads import run_parts
from mivhead.ensemble.constants import COMPONENTS, SIDE
from mivhead.features import Block, image_vectors, to_single
from mivhead.head.components import torch_uniform
from mivhead.head.formulas import window

Kind = Literal["second_order", "layout", "mean"]
Array = NDArray[np.float32]

OVERSAMPLING = 8  # additional components during the subspace iteration, which make it converge
ITERATIONS = 3  # of the subspace iteration
NOISE = 1e-6  # variance along a component, relative to the largest, that may be rounding
IMAGES = 16  # whose patches are in memory in single precision at once
LN_EPS = 1e-5  # of LayerNorm


@dataclass(frozen=True, eq=False)
class PatchPCA:
    """A PCA of the patches of a block."""

    mean: Array  # (channel,)
    components: Array  # (channel, component)

    @classmethod
    def fit(cls, map_: NDArray[Any]) -> PatchPCA:
        """Fit to the patches of maps (image, channel, H, W)."""
        channels = map_.shape[1]
        sums = [x.sum(axis=(0, 1), dtype=np.float64) for x in _patches(map_)]
        mean = (sum(sums) / (map_.size / channels)).astype(np.float32)
        if channels <= COMPONENTS:  # nothing would be left out
            return cls(mean, np.eye(channels, dtype=np.float32))
        scatter = np.zeros((channels, channels), np.float32)
        for patches in _patches(map_):
            x = (patches - mean).reshape(-1, channels)
            scatter += x.T @ x
        return cls(mean, principal_components(scatter))

    def __call__(self, map_: NDArray[Any]) -> Array:
        """Transform patches: (image, channel, H, W) to (image, component, H, W)."""
        channels, components = self.components.shape
        x = to_single(map_.reshape(len(map_), channels, -1))  # (image, channel, patch)
        x -= self.mean[:, None]
        if channels != components:
            x = self.components.T @ x  # (image, component, patch)
        return x.reshape(len(map_), components, *map_.shape[2:])


def _patches(map_: NDArray[Any]) -> Iterator[Array]:
    """Yield the patches (image, patch, channel) of some images at a time, in single precision."""
    for start in range(0, len(map_), IMAGES):
        part = map_[start : start + IMAGES]
        yield to_single(part.reshape(*part.shape[:2], -1).transpose(0, 2, 1))


def principal_components(scatter: Array) -> Array:
    """Return the first eigenvectors of a large scatter matrix as columns, by subspace iteration.

    It is many times as fast as all eigenvectors.
    """
    # The start is normal, and the same every time: PyTorch's numbers for seed 0, which are made of
    # 16 uniform ones each by the Box-Muller transform.
    shape = len(scatter), COMPONENTS + OVERSAMPLING
    count = shape[0] * shape[1]
    uniform = torch_uniform(np.random.RandomState(0), (-(-count // 16), 16))
    radius = np.sqrt(-2 * np.log(1 - uniform[:, :8]))
    angle = np.float32(2 * np.pi) * uniform[:, 8:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    basis = np.linalg.qr(normal.ravel()[:count].reshape(shape))[0]
    for _ in range(ITERATIONS):
        basis = np.linalg.qr(scatter @ basis)[0]
    variances, inside = np.linalg.eigh(basis.T @ scatter @ basis)  # ascending
    # Few patches span few dimensions; all other components would be made of rounding errors.
    varies = variances > NOISE * variances[-1]
    return np.ascontiguousarray((basis @ (inside * varies))[:, -COMPONENTS:], np.float32)


def compute_descriptors(
    block: Block, pca: PatchPCA | None, kinds: Sequence[Kind]
) -> dict[Kind, Array]:
    """Compute several descriptors, (image, dimension) each; patches are transformed only once.

    >>> block = Block(map=np.random.default_rng(0).normal(size=(2, 3, 4, 4)))
    >>> described = compute_descriptors(block, PatchPCA.fit(block.map), ["layout", "mean"])
    >>> {kind: x.shape for kind, x in described.items()}
    {'mean': (2, 3), 'layout': (2, 48)}
    """
    described: dict[Kind, Array] = {"mean": mean_vectors(block)} if "mean" in kinds else {}
    of_patches = [kind for kind in kinds if kind != "mean"]
    if of_patches:
        assert block.map is not None
        assert pca is not None
        map_, rotate = block.map, pca
        starts = range(0, len(map_), IMAGES)
        parts: list[dict[Kind, Array]] = [{} for _ in starts]

        def describe(number: int) -> None:
            patches = rotate(map_[starts[number] : starts[number] + IMAGES])
            for kind in of_patches:
                compute = _layout if kind == "layout" else _second_order
                parts[number][kind] = compute(patches)

        run_parts(describe, len(starts))
        described |= {kind: np.concatenate([part[kind] for part in parts]) for kind in of_patches}
    return described


def mean_vectors(block: Block) -> Array:
    """Return the token, or the mean patch, with mean 0 and length 1: (image, channel)."""
    vectors = image_vectors(block)
    vectors = vectors - vectors.mean(axis=1, keepdims=True)
    variance = np.square(vectors).mean(axis=1, keepdims=True)
    return unit(vectors / np.sqrt(variance + np.float32(LN_EPS)))


def _layout(patches: Array) -> Array:
    """Concatenate all patches, after average pooling to at most 7x7."""
    grid = patches.shape[2:]
    x = patches.reshape(*patches.shape[:2], -1)  # (image, component, patch)
    if max(grid) > SIDE:
        x = x @ average_pooling(grid)
    return unit(x.reshape(len(x), -1))


@cache
def average_pooling(grid: tuple[int, ...]) -> Array:
    """Adaptive average pooling to at most 7x7, as a matrix (patch, pooled patch)."""
    rows, columns = (
        np.stack([np.isin(np.arange(n), window(i, n, m)) / len(window(i, n, m)) for i in range(m)])
        for n, m in ((n, min(SIDE, n)) for n in grid)
    )
    return np.ascontiguousarray(np.kron(rows, columns).T, np.float32)


def _second_order(patches: Array) -> Array:
    """Signed square roots of the covariances of all pairs of components."""
    x = patches.reshape(*patches.shape[:2], -1)  # (image, component, patch)
    x = x - x.mean(axis=2, keepdims=True)
    covariances = x @ x.transpose(0, 2, 1)  # (image, component, component)
    pairs = covariances.reshape(len(x), -1).take(_pairs(x.shape[1]), axis=1)
    return unit(np.copysign(np.sqrt(np.abs(pairs)), pairs))


@cache
def _pairs(components: int) -> NDArray[np.int64]:
    """Return where the pairs of components are in a matrix of them, row by row."""
    return np.flatnonzero(np.tri(components, dtype=bool).T)
