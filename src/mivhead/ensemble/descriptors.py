"""Fixed descriptors of an image, computed from the patches of a block: one vector each.

- `mean`: the mean patch, or the token: what is there.
- `layout`: all patches, concatenated: what is where.
- `second_order`: the covariances of channels over the patches: which textures and parts there are.

The last two see patches in the coordinates of a PCA of the support set's patches, so that the size
of a descriptor does not depend on the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mivhead._util.threads import run_parts
from mivhead.features import Block, mean_patches, to_single

Kind = Literal["second_order", "layout", "mean"]
Array = NDArray[np.float32]

COMPONENTS = 128  # principal components of patches, at most
SIDE = 7  # of a layout, at most
OVERSAMPLING = 8  # additional components during the subspace iteration, which make it converge
ITERATIONS = 3  # of the subspace iteration
NOISE = 1e-6  # variance along a component, relative to the largest, that may be rounding
IMAGES = 16  # whose patches are in memory in single precision at once
EPS = 1e-12  # smallest length
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
        for part in _patches(map_):
            x = (part - mean).reshape(-1, channels)
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
    """Return the first eigenvectors of a scatter matrix as columns, by subspace iteration.

    It is many times as fast as all eigenvectors. With few channels nothing is left out, and the
    result is the identity.

    >>> principal_components(np.eye(3, dtype=np.float32)).shape
    (3, 3)
    """
    channels = len(scatter)
    if channels <= COMPONENTS:
        return np.eye(channels, dtype=scatter.dtype)
    width = min(channels, COMPONENTS + OVERSAMPLING)
    basis = np.linalg.qr(_start(channels, width))[0]
    for _ in range(ITERATIONS):
        basis = np.linalg.qr(scatter @ basis)[0]
    variances, inside = np.linalg.eigh(basis.T @ scatter @ basis)  # ascending
    # Few patches span few dimensions; all other components would be made of rounding errors.
    varies = variances > NOISE * variances[-1]
    return np.ascontiguousarray((basis @ (inside * varies))[:, -COMPONENTS:], np.float32)


def _start(rows: int, columns: int) -> Array:
    """Draw normal numbers, the same every time: those that versions up to 0.2.0 started from.

    They came from PyTorch, which makes 16 of 16 uniform numbers by the Box-Muller transform.
    """
    count = rows * columns
    bits = np.random.RandomState(0).randint(0, 2**32, size=count, dtype=np.uint32)
    uniform = (bits & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
    whole = uniform[: count // 16 * 16].reshape(-1, 16)
    normal = np.empty(count, np.float32)
    normal[: whole.size] = _box_muller(whole).reshape(-1)
    if count % 16:  # the last 16 are drawn again
        more = np.random.RandomState(0)
        bits = more.randint(0, 2**32, size=count + 16, dtype=np.uint32)[count:]
        uniform = (bits & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
        normal[-16:] = _box_muller(uniform.reshape(1, 16))[0]
    return normal.reshape(rows, columns)


def _box_muller(uniform: Array) -> Array:
    radius = np.sqrt(-2 * np.log(1 - uniform[:, :8]))
    angle = np.float32(2 * np.pi) * uniform[:, 8:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def compute_descriptors(
    block: Block, pca: PatchPCA | None, kinds: Iterable[Kind]
) -> Iterator[tuple[Kind, Array]]:
    """Compute several descriptors, (image, dimension) each; patches are transformed only once.

    >>> block = Block(map=np.random.default_rng(0).normal(size=(2, 3, 4, 4)))
    >>> described = compute_descriptors(block, PatchPCA.fit(block.map), ["layout", "mean"])
    >>> {kind: x.shape for kind, x in described}
    {'layout': (2, 48), 'mean': (2, 3)}
    """
    kinds = list(kinds)
    of_patches = [kind for kind in kinds if kind != "mean"]
    found: dict[Kind, Array] = {}
    if "mean" in kinds:
        found["mean"] = mean_vectors(block)
    if of_patches:
        assert block.map is not None
        assert pca is not None
        map_, rotation = block.map, pca
        starts = range(0, len(map_), IMAGES)
        parts: list[dict[Kind, Array]] = [{} for _ in starts]

        def describe(number: int) -> None:
            patches = rotation(map_[starts[number] : starts[number] + IMAGES])
            for kind in of_patches:
                one = _layout if kind == "layout" else _second_order
                parts[number][kind] = one(patches)

        run_parts(describe, len(starts))
        for kind in of_patches:
            found[kind] = np.concatenate([part[kind] for part in parts])
    return ((kind, found[kind]) for kind in kinds)


def mean_vectors(block: Block) -> Array:
    """Return the token, or the mean patch, with mean 0 and length 1."""
    if block.token is not None:
        vectors = to_single(block.token)
    else:
        assert block.map is not None
        vectors = mean_patches(block.map)
    vectors = vectors - vectors.mean(axis=1, keepdims=True)
    variance = np.square(vectors).mean(axis=1, keepdims=True)
    return unit(vectors / np.sqrt(variance + np.float32(LN_EPS)))


def unit(x: Array) -> Array:
    """Scale vectors (image, dimension) to length 1.

    >>> unit(np.array([[3.0, 4.0]], np.float32))
    array([[0.6, 0.8]], dtype=float32)
    """
    length = np.sqrt(np.square(x).sum(axis=1, keepdims=True))
    scaled: Array = x / np.maximum(length, np.float32(EPS))
    return scaled


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


def window(i: int, length: int, count: int) -> range:
    """Rows of window i of adaptive pooling, as PyTorch cuts them.

    >>> [list(window(i, 7, 5)) for i in range(5)]
    [[0, 1], [1, 2], [2, 3, 4], [4, 5], [5, 6]]
    """
    return range(i * length // count, -(-(i + 1) * length // count))


def _second_order(patches: Array) -> Array:
    """Signed square roots of the covariances of all pairs of components."""
    x = patches.reshape(*patches.shape[:2], -1)  # (image, component, patch)
    x = x - x.mean(axis=2, keepdims=True)
    covariances = x @ x.transpose(0, 2, 1)
    pairs = covariances.reshape(len(x), -1).take(_pairs(x.shape[1]), axis=1)
    return unit(np.copysign(np.sqrt(np.abs(pairs)), pairs))


@cache
def _pairs(components: int) -> NDArray[np.int64]:
    """Return where the pairs of components are in a matrix of them, row by row."""
    return np.flatnonzero(np.tri(components, dtype=bool).T)
