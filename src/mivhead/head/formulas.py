"""The formulas of the MIV-head on arrays, each followed by its gradient; read them with the paper.

Letters are the paper's: A_n are the candidates of image n, I_n the pooled ones, B_n those and the
token, M_n the image's vector; K and V are keys and values, v^P prototypes and v^Q a query. Lines
end in shapes. The five functions that take most of the time, those with FAST in their docstring,
have a second version in C: `mivhead.head.kernels` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import softmax
from mivhead.head.recipe import Recipe

NORM_EPS = 1e-12  # of L2 norms
LN_EPS = 1e-5  # of LayerNorms
SPREAD = math.sqrt(0.72676)  # of |x - y| for standard normal x and y, so s = SPREAD * sqrt(d)
CHUNK_VALUES = 2**20  # attention weights, or values of prototypes, at once: 4 MB

Array = NDArray[np.float32]
Ints = NDArray[np.int64]
Gradient = Array | tuple[Array, Array]  # two matrices stand for their product


def chunks(count: int, values: int, at_once: int | None = None) -> Iterator[slice]:
    """Split rows of so many values into slices that hold `at_once` of them, or CHUNK_VALUES."""
    size = max(1, (at_once or CHUNK_VALUES) // max(1, values))
    return (slice(start, start + size) for start in range(0, count, size))


def normalise(x: Array) -> tuple[Array, Array]:
    """LayerNorm without parameters along the last axis; also return 1 / deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    scale = np.reciprocal(np.sqrt(variance + np.float32(LN_EPS)))
    centred *= scale
    return centred, scale


def normalise_backward(d_normal: Array, normal: Array, scale: Array) -> Array:
    """Gradient of the input of `normalise`, given that of its output."""
    inner = (d_normal * normal).mean(axis=-1, keepdims=True)
    d_x: Array = scale * (d_normal - d_normal.mean(axis=-1, keepdims=True) - normal * inner)
    return d_x


# Component 1: candidates A_n of an image are its map, max-pooled to several sizes.


def derive_candidates(
    parts: Sequence[NDArray[Any]], sizes: Sequence[tuple[int, int]]
) -> tuple[list[NDArray[Any]], Array]:
    """FAST. Max-pool maps (image, channel, H, W), those of shots and of views, to several sizes.

    Returns the patches of each size, (image, patch, channel), of all images in turn, and the norms
    of all patches, (image, patches of all sizes). Here patches are in single precision, because
    NumPy computes with that; the version in C keeps half precision and so reads less memory.
    """
    patches = [
        np.concatenate([_max_pool(maps, size) for maps in parts]).astype(np.float32)
        for size in sizes
    ]  # (image, patch, channel) each
    norms = [np.sqrt(np.square(x).sum(axis=2)) for x in patches]
    return patches, np.concatenate(norms, axis=1)


def _max_pool(maps: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Adaptive max pooling: windows that overlap if the sizes do not divide."""
    pooled = maps
    for axis, wanted in ((2, size[0]), (3, size[1])):
        side = maps.shape[axis]
        if side == wanted:
            continue
        windows = [np.take(pooled, window(i, side, wanted), axis).max(axis) for i in range(wanted)]
        pooled = np.stack(windows, axis)
    images, channels = maps.shape[:2]
    return np.ascontiguousarray(pooled.reshape(images, channels, -1).transpose(0, 2, 1))


def window(i: int, length: int, count: int) -> range:
    """Rows of window i of adaptive pooling, as PyTorch cuts them.

    >>> [list(window(i, 7, 5)) for i in range(5)]
    [[0, 1], [1, 2], [2, 3, 4], [4, 5], [5, 6]]
    """
    return range(i * length // count, -(-(i + 1) * length // count))


# Equation 1: theta pools the patches of each candidate, to I_n.


def pool_patches(
    theta: Array, maps: Sequence[NDArray[Any]], scale: Array, rows: Ints
) -> tuple[Array, Array]:
    """FAST. Pool the patches x of each candidate with the weights softmax(theta . x scale).

    Of the images `rows`, with maps (image, patch, channel) per candidate and scales (image, patches
    of all candidates). Returns I_n, and the weights.
    """
    pooled = np.empty((len(rows), len(maps), len(theta)), np.float32)
    weights = np.empty((len(rows), scale.shape[1]), np.float32)
    for part, j, here in _pooling_steps(maps, rows):
        x = maps[j][rows[part]]  # (image, patch, channel)
        w = softmax((x @ theta) * scale[rows[part], here])  # (image, patch)
        pooled[part, j] = (w[:, None] @ x)[:, 0]  # (image, channel)
        weights[part, here] = w
    return pooled, weights


def pool_patches_backward(
    d_pooled: Array,
    maps: Sequence[NDArray[Any]],
    scale: Array,
    rows: Ints,
    weights: Array,
    pooled: Array,
) -> Array:
    """FAST. Gradient of theta (channel,), given that of I_n; patches have none."""
    d_theta = np.zeros(pooled.shape[2], np.float32)
    for part, j, here in _pooling_steps(maps, rows):
        x = maps[j][rows[part]]  # (image, patch, channel)
        d = d_pooled[part, j]  # (image, channel)
        inner = (d * pooled[part, j]).sum(axis=1, keepdims=True)
        d_scores = weights[part, here] * ((x @ d[:, :, None])[..., 0] - inner)  # (image, patch)
        d_theta += ((d_scores * scale[rows[part], here])[:, None] @ x)[:, 0].sum(axis=0)
    return d_theta


def _pooling_steps(maps: Sequence[NDArray[Any]], rows: Ints) -> Iterator[tuple[slice, int, slice]]:
    """Yield some images at a time, each candidate, and the columns of its patches."""
    ends = np.cumsum([x.shape[1] for x in maps]).tolist()
    for part in chunks(len(rows), max(x[0].size for x in maps)):
        for j, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            yield part, j, slice(start, end)


# Equation 2: mu pools the candidates B_n of an image, to M_n.


def pool_candidates(
    mu: Array, x: Array, factor: float, length: float | None
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Vectors M_n, (image, channel), from B_n, (image, candidate, channel).

    The score of a candidate is factor mu . x / |x|; a `length` replaces |x|. Also returns what the
    gradient needs.
    """
    if length is None:
        squares = np.einsum("ndc,ndc->nd", x, x)
        norms = np.maximum(np.sqrt(squares), np.float32(NORM_EPS))  # (image, candidate)
    else:
        norms = np.full(x.shape[:2], length, np.float32)
    scores = (x @ mu) * (np.float32(factor) / norms)  # (image, candidate)
    weights = softmax(scores)
    return (weights[:, None] @ x)[:, 0], (weights, scores, norms)


def pool_candidates_backward(
    mu: Array,
    x: Array,
    d_pooled: Array,
    kept: tuple[Array, Array, Array],
    factor: float,
    length: float | None,
) -> tuple[Array, Array]:
    """Gradients of mu and of the candidates, which are in the sum, the scores and the norms."""
    weights, scores, norms = kept
    d_weights = (x @ d_pooled[:, :, None])[..., 0]  # (image, candidate)
    d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    slopes = d_scores * np.float32(factor) / norms  # by mu . x
    d_x = weights[..., None] * d_pooled[:, None]  # (image, candidate, channel)
    term = slopes[..., None] * mu
    d_x += term
    if length is None:
        d_x -= np.multiply((d_scores * scores / norms**2)[..., None], x, out=term)
    return slopes.ravel() @ x.reshape(-1, x.shape[2]), d_x


# Components 2 and 3: cross-attention pooling, and cosines with the prototypes, equations 3 to 8.


class Projected(NamedTuple):
    """What Component 2 needs of images: keys, values and, as queries, gates: (image, channel)."""

    key: Array
    value: Array
    gate: Array

    def rows(self, index: slice) -> Projected:
        """Select images."""
        return Projected(*(x[index] for x in self))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Queries, the bags of shots of all classes, and how they are compared."""

    query: Projected  # (query, channel) each
    shots: Projected  # (shot, channel) each, class after class; their gates are not needed
    starts: Ints  # (class + 1,): where the shots of each class start
    hidden: Ints | None  # (query,): the shot that a query does not see, or -1
    heads: int
    eta: float

    @property
    def factor(self) -> float:
        """What equation 4 multiplies L1 distances by; its constant c cancels in the softmax."""
        d = self.query.key.shape[1] / self.heads
        return -self.eta / math.sqrt(d) / SPREAD

    def split(self, x: Array) -> Array:
        """(image, channel) to (head, image, d)."""
        return x.reshape(len(x), self.heads, -1).transpose(1, 0, 2)

    def bags(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each class, and its shots."""
        for k, (first, last) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            yield k, slice(first, last)

    def attention(self, part: slice = slice(None)) -> Array:
        """Equation 4: weights A of queries over the shots of each class, (head, query, shot)."""
        y, z = self.split(self.query.key[part]), self.split(self.shots.key)  # (head, image, d)
        a: Array = np.abs(y[:, :, None] - z[:, None]).sum(axis=3)  # (head, query, shot)
        a *= np.float32(self.factor)
        if self.hidden is not None:
            queries = np.flatnonzero(self.hidden[part] >= 0)
            a[:, queries, self.hidden[part][queries]] = -np.inf
        for _, bag in self.bags():
            a[:, :, bag] = softmax(a[:, :, bag])
        return a

    def pool(self, a: Array, x: Array) -> Array:
        """Equation 3: A X, (query, class, channel), of the shots' vectors x (shot, channel)."""
        parts = self.split(x)  # (head, shot, d)
        return np.stack([_join(a[:, :, bag] @ parts[:, bag]) for _, bag in self.bags()], axis=1)

    def steps(self) -> Iterator[tuple[slice, Array, Array, Array, Array, Array, Array]]:
        """Yield queries, A, A V, and v^P and v^Q less the mean prototype, with their norms."""
        for part in chunks(len(self.query.key), self.shots.key.size):
            y, v, gate = self.query.rows(part)  # (query, channel)
            a = self.attention(part)  # (head, query, shot)
            av = self.pool(a, self.shots.value)  # (query, class, channel)
            # Equation 5: the gate depends on the query alone, so that it can follow the sum.
            v_p = av * gate[:, None] + self.pool(a, self.shots.key)  # (query, class, channel)
            v_q = v * gate + y  # (query, channel)
            mean = v_p.mean(axis=1)
            v_p, v_q = v_p - mean[:, None], v_q - mean
            norms = np.maximum(np.sqrt(np.square(v_p).sum(axis=2)), np.float32(NORM_EPS))
            length = np.maximum(np.sqrt(np.square(v_q).sum(axis=1)), np.float32(NORM_EPS))
            yield part, a, av, v_p, v_q, norms, length[:, None]


def _join(x: Array) -> Array:
    """(head, image, d) to (image, channel)."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def cosines(how: Comparison, *, keep: bool) -> tuple[Array, Array | None]:
    """FAST. Cosines (query, class) of v^Q with the prototypes v^P = (A V) gate + A K.

    With `keep`, what `cosines_backward` needs is returned as well: here nothing, A is made again.
    """
    del keep
    out = np.empty((len(how.query.key), len(how.starts) - 1), np.float32)
    for part, _, _, v_p, v_q, norms, length in how.steps():
        out[part] = (v_p @ v_q[:, :, None])[..., 0] / (norms * length)
    return out, None


def cosines_backward(
    how: Comparison, kept: Array | None, cosine: Array, d_cosine: Array
) -> tuple[Projected, Array, Array]:
    """FAST. Gradients of the queries, and of the keys and values of the shots."""
    del kept
    d_query = Projected(*(np.empty_like(x) for x in how.query))
    d_z, d_w = np.zeros_like(how.shots.key), np.zeros_like(how.shots.value)
    for part, a, av, v_p, v_q, norms, length in how.steps():
        y, v, gate = how.query.rows(part)  # (query, channel)
        # cos = p.q / (|p| |q|), so by p: q / (|p| |q|) - p cos / |p|^2; by q likewise.
        d, pull = d_cosine[part], d_cosine[part] * cosine[part]  # (query, class)
        by_both = d / (norms * length)
        d_p = v_q[:, None] * by_both[..., None] - v_p * (pull / norms**2)[..., None]
        d_q = (by_both[:, None] @ v_p)[:, 0] - v_q * pull.sum(axis=1, keepdims=True) / length**2
        # The mean of the prototypes is in every v^P, and in v^Q.
        d_p -= (d_p.sum(axis=1, keepdims=True) + d_q[:, None]) / np.float32(v_p.shape[1])
        d_query.value[part] = d_q * gate
        d_query.gate[part] = (d_p * av).sum(axis=1) + d_q * v
        d_y = d_q  # (query, channel)
        for k, bag in how.bags():
            z, w = how.split(how.shots.key[bag]), how.split(how.shots.value[bag])  # (head, shot, d)
            weights = a[:, :, bag]  # (head, query, shot)
            d_ak, d_av = how.split(d_p[:, k]), how.split(d_p[:, k] * gate)  # (head, query, d)
            d_a = d_av @ w.transpose(0, 2, 1) + d_ak @ z.transpose(0, 2, 1)  # (head, query, shot)
            inner = (d_a * weights).sum(axis=2, keepdims=True)
            d_scores = weights * (d_a - inner) * np.float32(how.factor)
            signs = np.sign(how.split(y)[:, :, None] - z[:, None]) * d_scores[..., None]
            d_y = d_y + _join(signs.sum(axis=2))
            d_z[bag] += _join(weights.transpose(0, 2, 1) @ d_ak - signs.sum(axis=1))
            d_w[bag] += _join(weights.transpose(0, 2, 1) @ d_av)
        d_query.key[part] = d_y
    return d_query, d_z, d_w


def combine(cosine: Array, recipe: Recipe) -> Array:
    """Logits (query, class) from the cosines of all blocks, (block, query, class)."""
    t, inside = np.float32(recipe.temperature), recipe.temperature_order == "inside"
    x = cosine / t if inside else cosine
    top = x.max(axis=0)
    logits: Array = top + np.log(np.exp(x - top).sum(axis=0))
    return logits if inside else logits / t


def cross_entropy(cosines: Array, labels: Ints, recipe: Recipe) -> tuple[float, Array]:
    """Loss, summed over queries, and its gradient by the cosines (block, query, class).

    It is that of the combined logits (`objective="joint"`), or of each block on its own.
    """
    t, joint = np.float32(recipe.temperature), recipe.objective == "joint"
    logits = combine(cosines, recipe)[None] if joint else cosines / t  # (block, query, class)
    queries = np.arange(len(labels))
    shifted = logits - logits.max(axis=2, keepdims=True)
    p = np.exp(shifted)
    sums = p.sum(axis=2, keepdims=True)
    loss = float((np.log(sums[..., 0]) - shifted[:, queries, labels]).sum())
    d_logits = p / sums
    d_logits[:, queries, labels] -= 1
    if joint:  # by the part of each block in the logsumexp: (block, query, class)
        x = cosines / t if recipe.temperature_order == "inside" else cosines
        parts = np.exp(x - x.max(axis=0))
        d_logits = parts / parts.sum(axis=0) * d_logits
    return loss, d_logits / t  # wherever the temperature divides
