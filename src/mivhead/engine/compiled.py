"""The functions of the engine, in C: `mivhead.engine.plain` defines what each of them computes.

Images are divided into parts, which several threads compute. The number of parts depends on the
task alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.engine.library import address, call, empty
from mivhead.engine.plain import NORM_EPS, BagComparison

PARTS = 8  # at most
PART_VALUES = 2**18  # that a part reads, at least: less is not worth another thread
LANES = 16  # queries per tile
KINDS = ("uniform", "l1", "dot")

Array = NDArray[np.float32]


def _parts(images: int, values: int) -> int:
    """Divide a task that reads so many values per image."""
    return max(1, min(PARTS, images, images * values // PART_VALUES))


# Candidates of an image: its map, max-pooled to several sizes (`derive.c`).


class _Derive(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "height", "width", "candidates", "half")),
        *((n, c_int64) for n in ("image_step", "channel_step", "pixel_step")),
        *((n, c_void_p) for n in ("maps", "sizes", "patches", "norms", "scratch")),
    )


def derive(
    given: Sequence[NDArray[Any]], sizes: Sequence[tuple[int, int]]
) -> tuple[list[NDArray[Any]], Array]:
    """Max-pool maps to several sizes."""
    images, channels = sum(map(len, given)), given[0].shape[1]
    patches = [empty(images, h * w, channels, dtype=given[0].dtype) for h, w in sizes]
    norms = empty(images, sum(h * w for h, w in sizes))
    start = 0
    for maps in given:
        rows = slice(start, start := start + len(maps))
        _derive(maps, sizes, [each[rows] for each in patches], norms[rows])
    return patches, norms


def _derive(
    maps: NDArray[Any],
    sizes: Sequence[tuple[int, int]],
    patches: Sequence[NDArray[Any]],
    norms: Array,
) -> None:
    images, channels, height, width = maps.shape
    rows = maps.strides[2] == width * maps.strides[3] or min(height, width) == 1
    if not rows or maps.strides[1] < 0 or maps.strides[3] < 0:
        maps = np.ascontiguousarray(maps)  # now rows follow each other
    image_step, channel_step, row_step, pixel_step = (s // maps.itemsize for s in maps.strides)
    parts = _parts(images, channels * height * width)
    scratch = empty(parts, height, width, channels)
    flat = (c_int64 * (2 * len(sizes)))(*(side for size in sizes for side in size))
    places = (c_void_p * len(sizes))(*map(address, patches))
    task = _Derive(
        images=images,
        channels=channels,
        height=height,
        width=width,
        candidates=len(sizes),
        half=maps.dtype == np.float16,
        image_step=image_step,
        channel_step=channel_step,
        pixel_step=pixel_step if width > 1 else row_step,  # a side of 1 may have any stride
        maps=maps.ctypes.data,
        sizes=ctypes.addressof(flat),
        patches=ctypes.addressof(places),
        norms=address(norms),
        scratch=address(scratch),
    )
    call("derive", task, parts)


# Pooling of patches by attention (`pooling.c`).


class _Pooling(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "candidates", "half")),
        *((n, c_void_p) for n in ("rows", "patches", "x", "scale", "vector", "weights", "pooled")),
        *((n, c_void_p) for n in ("sums", "scratch")),
    )


def pool_forward(
    theta: Array, maps: Sequence[NDArray[Any]], scale: Array, rows: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Pool the patches of each candidate."""
    pooled = empty(len(rows), len(maps), len(theta))
    weights = empty(len(rows), scale.shape[1])
    given = {"scale": scale, "vector": theta, "weights": weights, "pooled": pooled}
    _run_pooling("pool_forward", maps, rows, given)
    return pooled, weights


def pool_backward(
    d_pooled: Array,
    maps: Sequence[NDArray[Any]],
    scale: Array,
    rows: NDArray[np.int64],
    weights: Array,
    pooled: Array,
) -> Array:
    """Compute the gradient of theta."""
    sums = empty(len(rows), pooled.shape[2])
    given = {"scale": scale, "vector": np.ascontiguousarray(d_pooled), "weights": weights}
    _run_pooling("pool_backward", maps, rows, {**given, "pooled": pooled, "sums": sums})
    gradient: Array = sums.sum(axis=0)
    return gradient


def _run_pooling(
    name: str,
    maps: Sequence[NDArray[Any]],
    rows: NDArray[np.int64],
    arrays: dict[str, NDArray[Any]],
) -> None:
    channels = maps[0].shape[2]
    patches = (c_int64 * len(maps))(*(x.shape[1] for x in maps))
    places = (c_void_p * len(maps))(*map(address, maps))
    parts = _parts(len(rows), channels * sum(patches))
    scratch = empty(parts, 4, channels)
    task = _Pooling(
        images=len(rows),
        channels=channels,
        candidates=len(maps),
        half=maps[0].dtype == np.float16,
        rows=address(rows),
        patches=ctypes.addressof(patches),
        x=ctypes.addressof(places),
        scratch=address(scratch),
        **{key: address(array) for key, array in arrays.items()},
    )
    call(name, task, parts)


# Pooling of an image's candidates by attention (`candidates.c`).


class _Candidates(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "candidates")),
        *((n, c_float) for n in ("factor", "eps", "length")),
        *((n, c_void_p) for n in ("mu", "x", "pooled", "d_pooled", "d_mu", "d_x", "scratch")),
    )


def candidates_forward(mu: Array, x: Array, factor: float, length: float | None) -> Array:
    """Pool the candidates of each image."""
    pooled = empty(len(x), x.shape[2])
    _run_candidates("candidates_forward", factor, length, {"mu": mu, "x": x, "pooled": pooled})
    return pooled


def candidates_backward(
    mu: Array, x: Array, d_pooled: Array, factor: float, length: float | None
) -> tuple[Array, Array]:
    """Compute the gradients of mu and of the candidates."""
    d_mu, d_x = empty(*d_pooled.shape), empty(*x.shape)
    given = {"mu": mu, "x": x, "d_pooled": np.ascontiguousarray(d_pooled)}
    _run_candidates("candidates_backward", factor, length, {**given, "d_mu": d_mu, "d_x": d_x})
    return d_mu.sum(axis=0), d_x


def _run_candidates(
    name: str, factor: float, length: float | None, arrays: dict[str, NDArray[Any]]
) -> None:
    images, candidates, channels = arrays["x"].shape
    parts = _parts(images, candidates * channels)
    scratch = empty(parts, 4, candidates)
    task = _Candidates(
        images=images,
        channels=channels,
        candidates=candidates,
        factor=factor,
        eps=NORM_EPS,
        length=length or 0.0,
        scratch=address(scratch),
        **{key: address(array) for key, array in arrays.items()},
    )
    call(name, task, parts)


# Cross-attention pooling and the cosines with its prototypes (`cap_forward.c`, `cap_backward.c`).

ARRAYS = (  # gate, hidden and weights may be None
    *("y", "v", "gate", "z", "w", "starts", "hidden", "weights", "cosines"),
    *("d_cosines", "d_y", "d_v", "d_gate", "d_shots"),
)


class _Cap(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("queries", "channels", "heads", "classes", "support")),
        *((n, c_int64) for n in ("attention", "skip", "centred")),
        *((n, c_float) for n in ("factor", "eps")),
        *((n, c_void_p) for n in ARRAYS),
        ("scratch", c_void_p),
        ("scratch_size", c_int64),
    )


def cap_forward(how: BagComparison, *, keep: bool) -> tuple[Array, Array | None]:
    """Compute cosines of queries with the prototypes of all classes."""
    queries, classes = len(how.y), len(how.starts) - 1
    cosines = empty(queries, classes)
    tiles = -(-queries // LANES)
    weights = empty(tiles, how.heads, len(how.z), LANES) if keep else None
    _run_cap("cap_forward", how, weights, cosines, ())
    return cosines, weights


def cap_backward(
    how: BagComparison, weights: Array | None, cosines: Array, d_cosines: Array
) -> tuple[Array, Array, Array | None, Array, Array]:
    """Compute the gradients of queries and shots."""
    (queries, channels), shots = how.y.shape, len(how.z)
    parts = _cap_parts(how)
    d_y, d_v = empty(queries, channels), empty(queries, channels)
    d_gate = None if how.gate is None else empty(queries, channels)
    d_shots = empty(parts, channels, shots, 2)  # keys and values side by side
    gradients = np.ascontiguousarray(d_cosines), d_y, d_v, d_gate, d_shots
    _run_cap("cap_backward", how, weights, cosines, gradients)
    d_z, d_w = d_shots.sum(axis=0).transpose(2, 1, 0)  # (shot, channel) each
    return d_y, d_v, d_gate, d_z, d_w


def _cap_parts(how: BagComparison) -> int:
    tiles = -(-len(how.y) // LANES)
    return min(tiles, _parts(len(how.y), how.y.shape[1] * len(how.z)))


def _run_cap(
    name: str,
    how: BagComparison,
    weights: Array | None,
    cosines: Array,
    gradients: Sequence[NDArray[Any] | None],
) -> None:
    (queries, channels), shots, classes = how.y.shape, len(how.z), len(how.starts) - 1
    # Per part: prototypes, vectors over channels and classes, shots, weights, classes of the
    # shots, and room for alignment.
    kept = channels if gradients else 1  # channels whose prototypes are kept
    vectors = 2 * kept * classes + 7 * channels + 4 * classes
    vectors += shots + how.heads * shots + -(-shots // 8) + 1
    parts = _cap_parts(how)
    scratch = empty(parts, LANES * vectors)
    z, w = (np.ascontiguousarray(x.T) for x in (how.z, how.w))  # (channel, shot)
    arrays = how.y, how.v, how.gate, z, w, how.starts, how.hidden, weights, cosines, *gradients
    task = _Cap(
        queries=queries,
        channels=channels,
        heads=how.heads,
        classes=classes,
        support=shots,
        attention=KINDS.index(how.attention),
        skip=how.skip,
        centred=how.centred,
        factor=how.factor,
        eps=NORM_EPS,
        scratch=address(scratch),
        scratch_size=scratch.shape[1],
        **dict(zip(ARRAYS[: len(arrays)], map(address, arrays), strict=True)),
    )
    call(name, task, parts)
