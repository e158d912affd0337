"""The functions of the engine, in NumPy: what runs where there is no compiled library.

Their names, arguments and results are those of `mivhead.engine.compiled`, which is many times as
fast. Each pair of functions is a formula of `mivhead.head` and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NORM_EPS = 1e-12  # of L2 norms
CHUNK_VALUES = 2**20  # attention weights, or values of prototypes, at once: 4 MB

Array = NDArray[np.float32]


def softmax(x: Array) -> Array:
    """Softmax along the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    share: Array = e / e.sum(axis=-1, keepdims=True)
    return share


def chunks(count: int, values: int) -> Iterator[slice]:
    """Split queries into slices; each query needs memory for this many values.

    >>> list(chunks(5, CHUNK_VALUES // 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    size = max(1, CHUNK_VALUES // max(1, values))
    return (slice(start, start + size) for start in range(0, count, size))


# Candidates of an image: its map, max-pooled to several sizes.


def derive(
    given: Sequence[NDArray[Any]], sizes: Sequence[tuple[int, int]]
) -> tuple[list[NDArray[Any]], Array]:
    """Max-pool maps (image, channel, H, W), such as those of shots and of views, to several sizes.

    Returns
    -------
    patches : list of array
        Of each size: (image, patch, channel), in the type of the maps; of all images in turn.
    norms : array
        Of the patches of all sizes: (image, patch).
    """
    patches = [np.concatenate([_max_pool(maps, size) for maps in given]) for size in sizes]
    norms = [np.sqrt(np.square(x, dtype=np.float32).sum(axis=2)) for x in patches]
    return patches, np.concatenate(norms, axis=1)


def _max_pool(maps: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Adaptive max pooling: windows that overlap if the sizes do not divide."""
    pooled = maps
    for axis, wanted in ((2, size[0]), (3, size[1])):
        side = maps.shape[axis]
        if side == wanted:
            continue
        windows = [
            np.take(pooled, range(i * side // wanted, -(-(i + 1) * side // wanted)), axis).max(axis)
            for i in range(wanted)
        ]
        pooled = np.stack(windows, axis)
    images, channels = maps.shape[:2]
    return np.ascontiguousarray(pooled.reshape(images, channels, -1).transpose(0, 2, 1))


# Pooling of patches by attention, equation 1.


def pool_forward(
    theta: Array, maps: Sequence[NDArray[Any]], scale: Array, rows: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Pool the patches of each candidate: softmax(theta . x scale) weighs the patches x.

    Of the images `rows` (n,), with maps (image, patch, channel) per candidate and scales (image,
    patches of all candidates). Returns I_n, (n, candidate, channel), and the attention, (n, patches
    of all candidates).
    """
    pooled = np.empty((len(rows), len(maps), len(theta)), np.float32)
    weights = np.empty((len(rows), scale.shape[1]), np.float32)
    for part in chunks(len(rows), max(x.shape[1] for x in maps) * len(theta)):
        start = 0
        for j, patches in enumerate(maps):
            x = patches[rows[part]].astype(np.float32)  # (image, patch, channel)
            here = slice(start, start := start + x.shape[1])
            weights[part, here] = w = softmax((x @ theta) * scale[rows[part], here])
            pooled[part, j] = (w[:, None] @ x)[:, 0]
    return pooled, weights


def pool_backward(
    d_pooled: Array,
    maps: Sequence[NDArray[Any]],
    scale: Array,
    rows: NDArray[np.int64],
    weights: Array,
    pooled: Array,
) -> Array:
    """Gradient of theta (channel,), given that of the pooled candidates; patches have none."""
    total = np.zeros(pooled.shape[2], np.float32)
    for part in chunks(len(rows), max(x.shape[1] for x in maps) * pooled.shape[2]):
        start = 0
        for j, patches in enumerate(maps):
            x = patches[rows[part]].astype(np.float32)  # (image, patch, channel)
            here = slice(start, start := start + x.shape[1])
            grad = d_pooled[part, j]  # (image, channel)
            inner = (grad * pooled[part, j]).sum(axis=1, keepdims=True)
            d_scores = weights[part, here] * ((x @ grad[:, :, None])[..., 0] - inner)
            total += ((d_scores * scale[rows[part], here])[:, None] @ x)[:, 0].sum(axis=0)
    return total


# Pooling of an image's candidates by attention, equation 2.


def candidates_forward(mu: Array, x: Array, factor: float, length: float | None) -> Array:
    """Image vectors M_n, (image, channel), from candidates x, (image, candidate, channel).

    The score of a candidate is factor mu . x / |x|; a `length` replaces |x|.
    """
    weights, _, _ = _weigh_candidates(mu, x, factor, length)
    pooled: Array = (weights[:, None] @ x)[:, 0]
    return pooled


def candidates_backward(
    mu: Array, x: Array, d_pooled: Array, factor: float, length: float | None
) -> tuple[Array, Array]:
    """Gradients of mu and of the candidates, which are in the sum, the scores and the norms."""
    weights, scores, norms = _weigh_candidates(mu, x, factor, length)
    d_weights = (x @ d_pooled[:, :, None])[..., 0]  # (image, candidate)
    d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    slopes = d_scores * np.float32(factor) / norms  # by mu . x
    d_x = weights[..., None] * d_pooled[:, None] + slopes[..., None] * mu
    if length is None:
        d_x -= (d_scores * scores / norms**2)[..., None] * x
    return (slopes[..., None] * x).sum(axis=(0, 1)), d_x


def _weigh_candidates(
    mu: Array, x: Array, factor: float, length: float | None
) -> tuple[Array, Array, Array]:
    if length is None:
        norms = np.maximum(np.sqrt(np.square(x).sum(axis=2)), np.float32(NORM_EPS))
    else:
        norms = np.full(x.shape[:2], length, np.float32)
    scores = (x @ mu) * (np.float32(factor) / norms)  # (image, candidate)
    return softmax(scores), scores, norms


# Cross-attention pooling and the cosines with its prototypes, equations 3 to 5 and Component 3.


@dataclass(frozen=True, eq=False)
class BagComparison:
    """Queries, the shots of all classes, and how they are compared."""

    y: Array  # keys of the queries: (query, channel)
    v: Array  # values of the queries
    gate: Array | None  # of the queries; None without co-excitation
    z: Array  # keys of the shots, class after class: (shot, channel)
    w: Array  # values of the shots
    starts: NDArray[np.int64]  # (class + 1,): where the shots of each class start
    hidden: NDArray[np.int64] | None  # (query,): the shot that a query does not see, or -1
    heads: int
    attention: str  # "uniform", "l1" or "dot"
    factor: float  # of the distance or the dot product
    skip: bool  # whether keys are added to the values
    centred: bool  # whether cosines are around the mean of the prototypes

    def split(self, x: Array) -> Array:
        """(image, channel) to (head, image, d)."""
        return x.reshape(len(x), self.heads, -1).transpose(1, 0, 2)

    def chunks(self) -> Iterator[tuple[slice, Array, Array | None, Array]]:
        """Yield slices of queries, with their keys, gates and A: (head, query, shot)."""
        shots, channels = self.z.shape
        for part in chunks(len(self.y), shots * channels):
            yield (
                part,
                self.y[part],
                None if self.gate is None else self.gate[part],
                self.weigh_shots(part),
            )

    def weigh_shots(self, part: slice) -> Array:
        """Weights of queries over the shots of each class, equation 4: (head, query, shot)."""
        y, z = self.split(self.y[part]), self.split(self.z)
        scores = np.zeros((self.heads, y.shape[1], z.shape[1]), np.float32)
        if self.attention == "l1":
            scores = np.abs(y[:, :, None] - z[:, None]).sum(axis=3)
        elif self.attention == "dot":
            scores = y @ z.transpose(0, 2, 1)
        scores *= np.float32(self.factor)
        if self.hidden is not None:
            queries = np.flatnonzero(self.hidden[part] >= 0)
            scores[:, queries, self.hidden[part][queries]] = -np.inf
        for first, last in zip(self.starts[:-1], self.starts[1:], strict=True):
            scores[:, :, first:last] = softmax(scores[:, :, first:last])
        return scores

    def pool(self, a: Array, x: Array) -> Array:
        """Prototypes A X (query, class, channel) of the shots' vectors x (shot, channel)."""
        parts = self.split(x)  # (head, shot, d)
        pooled = [
            (a[:, :, first:last] @ parts[:, first:last]).transpose(1, 0, 2).reshape(a.shape[1], -1)
            for first, last in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]
        return np.stack(pooled, axis=1)

    def vectors(
        self, part: slice, gate: Array | None, a: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Compute A V, then v^P and v^Q less the mean, and their norms."""
        av = self.pool(a, self.w)  # (query, class, channel)
        p, u = av, self.v[part]
        if gate is not None:
            p, u = av * gate[:, None], u * gate
        if self.skip:
            p, u = p + self.pool(a, self.z), u + self.y[part]
        if self.centred:
            mean = p.mean(axis=1)
            p, u = p - mean[:, None], u - mean
        norms = np.maximum(np.sqrt(np.square(p).sum(axis=2)), np.float32(NORM_EPS))
        length = np.maximum(np.sqrt(np.square(u).sum(axis=1)), np.float32(NORM_EPS))
        return av, p, u, norms, length


def cap_forward(how: BagComparison, *, keep: bool) -> tuple[Array, Array | None]:
    """Cosines (query, class) of v^Q with the prototypes v^P = (A V) gate + (A K) of all classes.

    With `keep`, what `cap_backward` needs is returned as well: here nothing, A is computed again.
    """
    del keep
    cosines = np.empty((len(how.y), len(how.starts) - 1), np.float32)
    for part, _, gate, a in how.chunks():
        _, p, u, norms, length = how.vectors(part, gate, a)
        cosines[part] = (p @ u[:, :, None])[..., 0] / (norms * length[:, None])
    return cosines, None


def cap_backward(
    how: BagComparison, weights: Array | None, cosines: Array, d_cosines: Array
) -> tuple[Array, Array, Array | None, Array, Array]:
    """Gradients of y, v and gate (query, channel), and of z and w (shot, channel)."""
    del weights
    d_y, d_v = np.zeros_like(how.y), np.empty_like(how.v)
    d_gate = None if how.gate is None else np.empty_like(how.gate)
    d_z, d_w = np.zeros_like(how.z), np.zeros_like(how.w)
    for part, y, gate, a in how.chunks():
        av, p, u, norms, length = how.vectors(part, gate, a)
        # cos = p.u / (|p| |u|), so by p: u / (|p| |u|) - p cos / |p|^2; by u likewise.
        by_both = d_cosines[part] / (norms * length[:, None])  # (query, class)
        by_p = d_cosines[part] * cosines[part] / norms**2
        by_u = (d_cosines[part] * cosines[part]).sum(axis=1, keepdims=True) / length[:, None] ** 2
        d_p = u[:, None] * by_both[..., None] - p * by_p[..., None]  # (query, class, channel)
        d_u = (by_both[:, None] @ p)[:, 0] - u * by_u
        if how.centred:  # the mean of the prototypes is in every p, and in u
            d_p -= (d_p.sum(axis=1, keepdims=True) + d_u[:, None]) / np.float32(p.shape[1])
        d_av = d_p if gate is None else d_p * gate[:, None]
        if d_gate is not None and gate is not None:
            d_gate[part] = (d_p * av).sum(axis=1) + d_u * how.v[part]
        d_v[part] = d_u if gate is None else d_u * gate
        if how.skip:
            d_y[part] += d_u
        _backward_attention(how, part, y, a, d_p, d_av, (d_y, d_z, d_w))
    return d_y, d_v, d_gate, d_z, d_w


def _backward_attention(
    how: BagComparison,
    part: slice,
    y: Array,
    a: Array,
    d_ak: Array,
    d_av: Array,
    gradients: tuple[Array, Array, Array],
) -> None:
    """Add to the gradients of y, z and w, class by class."""
    d_y, d_z, d_w = gradients
    for k, (first, last) in enumerate(zip(how.starts[:-1], how.starts[1:], strict=True)):
        here = slice(first, last)
        weights = a[:, :, here]  # (head, query, shot)
        of_values, of_keys = how.split(d_av[:, k]), how.split(d_ak[:, k])  # (head, query, d)
        d_weights = of_values @ how.split(how.w[here]).transpose(0, 2, 1)
        d_w[here] += _join(weights.transpose(0, 2, 1) @ of_values)
        if how.skip:
            d_weights += of_keys @ how.split(how.z[here]).transpose(0, 2, 1)
            d_z[here] += _join(weights.transpose(0, 2, 1) @ of_keys)
        if how.attention == "uniform":
            continue
        inner = (d_weights * weights).sum(axis=2, keepdims=True)
        d_scores = weights * (d_weights - inner) * np.float32(how.factor)  # (head, query, shot)
        keys, shots = how.split(y), how.split(how.z[here])
        if how.attention == "dot":
            d_y[part] += _join(d_scores @ shots)
            d_z[here] += _join(d_scores.transpose(0, 2, 1) @ keys)
        else:
            signs = np.sign(keys[:, :, None] - shots[:, None]) * d_scores[..., None]
            d_y[part] += _join(signs.sum(axis=2))
            d_z[here] -= _join(signs.sum(axis=1))


def _join(x: Array) -> Array:
    """(head, image, d) to (image, channel)."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)
