"""The five slow functions of `mivhead.head.formulas` in C, and the choice between the two.

Names, arguments and results are those of `formulas`. The library is built from the C files in this
folder when the package is installed (`hatch_build.py`). Images are divided into parts, which
several threads compute. The number of parts depends on the task alone, so that results do not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_float, c_int64, c_void_p
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy._core._multiarray_umath import __cpu_features__  # type: ignore[import-not-found]
from numpy.typing import DTypeLike, NDArray

from mivhead._util.threads import run_parts
from mivhead.head import formulas
from mivhead.head.formulas import NORM_EPS, Array, Comparison, Ints, Projected

PATH = Path(__file__).with_name("libkernels.so")
SWITCH = "MIVHEAD_KERNELS"  # environment variable; "off" computes as on machines without kernels
NEEDED = {"AVX2", "FMA3", "F16C"}  # of an x86 processor: since 2013
ALIGNMENT = 64  # bytes: the kernels read vectors of 16 numbers
PARTS = 8  # at most
PART_VALUES = 2**18  # that a part reads, at least: less is not worth another thread
LANES = 16  # queries per tile


def fast() -> ModuleType:
    """Return the module whose functions compute: this one, if there is a library for it."""
    return formulas if library() is None else sys.modules[__name__]


def fingerprint(folder: Path) -> str:
    """Hash the C files, which tells whether a library belongs to them (see `hatch_build.py`)."""
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled functions; None if there are none for this machine, or they are off."""
    if os.environ.get(SWITCH, "").lower() == "off" or not PATH.is_file():
        return None
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if is_x86 and not all(__cpu_features__.get(name, False) for name in NEEDED):
        return None
    try:
        compiled = ctypes.CDLL(str(PATH))
        compiled.fingerprint.restype = c_char_p
        if compiled.fingerprint().decode() == fingerprint(PATH.parent):
            return compiled
    except (OSError, AttributeError):
        pass
    warnings.warn(
        "The compiled kernels of mivhead belong to another version, so training runs without "
        "them and is slower. Install mivhead again (`pip install -e .` in a clone).",
        stacklevel=2,
    )
    return None


def _run(
    name: str, kind: Any, parts: int, arrays: Mapping[str, NDArray[Any] | None], **values: Any
) -> None:
    """Run a function on all parts of its task: a structure of addresses and other values."""
    known = {key: array for key, array in arrays.items() if array is not None}
    assert all(array.flags.c_contiguous for array in known.values())
    task = kind(**values, **{key: array.ctypes.data for key, array in known.items()})
    function, address = getattr(library(), name), ctypes.byref(task)
    run_parts(lambda part: function(address, c_int64(part), c_int64(parts)), parts)


def empty(*shape: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Allocate an array that starts at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def _parts(images: int, values: int) -> int:
    """Divide a task that reads so many values per image."""
    return max(1, min(PARTS, images, images * values // PART_VALUES))


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Derive(ctypes.Structure):
    """See `derive.c`."""

    _fields_ = (
        *_fields(c_int64, "images channels height width candidates half"),
        *_fields(c_int64, "image_step channel_step pixel_step"),
        *_fields(c_void_p, "maps sizes patches norms scratch"),
    )


def derive_candidates(
    parts: Sequence[NDArray[Any]], sizes: Sequence[tuple[int, int]]
) -> tuple[list[NDArray[Any]], Array]:
    """Max-pool maps to several sizes; patches have the type of the maps."""
    images, channels = sum(map(len, parts)), parts[0].shape[1]
    patches = [empty(images, h * w, channels, dtype=parts[0].dtype) for h, w in sizes]
    norms = empty(images, sum(h * w for h, w in sizes))
    flat_sizes = (c_int64 * (2 * len(sizes)))(*(side for size in sizes for side in size))
    start = 0
    for maps in parts:
        rows = slice(start, start := start + len(maps))
        count, _, height, width = maps.shape
        follow = maps.strides[2] == width * maps.strides[3] or min(height, width) == 1
        if not follow or maps.strides[1] < 0 or maps.strides[3] < 0:
            maps = np.ascontiguousarray(maps)  # now rows follow each other
        image_step, channel_step, row_step, pixel_step = (s // maps.itemsize for s in maps.strides)
        threads = _parts(count, channels * height * width)
        places = (c_void_p * len(sizes))(*(x[rows].ctypes.data for x in patches))
        _run(
            "derive",
            _Derive,
            threads,
            {"norms": norms[rows], "scratch": empty(threads, height, width, channels)},
            images=count,
            channels=channels,
            height=height,
            width=width,
            candidates=len(sizes),
            half=maps.dtype == np.float16,
            image_step=image_step,
            channel_step=channel_step,
            pixel_step=pixel_step if width > 1 else row_step,  # a side of 1 may have any stride
            maps=maps.ctypes.data,
            sizes=ctypes.addressof(flat_sizes),
            patches=ctypes.addressof(places),
        )
    return patches, norms


class _Pooling(ctypes.Structure):
    """See `pooling.c`."""

    _fields_ = (
        *_fields(c_int64, "images channels candidates half"),
        *_fields(c_void_p, "rows patches x scale vector weights pooled sums scratch"),
    )


def pool_patches(
    theta: Array, maps: Sequence[NDArray[Any]], scale: Array, rows: Ints
) -> tuple[Array, Array]:
    """Pool the patches of each candidate."""
    pooled = empty(len(rows), len(maps), len(theta))
    weights = empty(len(rows), scale.shape[1])
    arrays = {"scale": scale, "vector": theta, "weights": weights, "pooled": pooled}
    _run_pooling("pool_forward", maps, rows, arrays)
    return pooled, weights


def pool_patches_backward(
    d_pooled: Array,
    maps: Sequence[NDArray[Any]],
    scale: Array,
    rows: Ints,
    weights: Array,
    pooled: Array,
) -> Array:
    """Compute the gradient of theta."""
    sums = empty(len(rows), pooled.shape[2])
    arrays = {"scale": scale, "vector": np.ascontiguousarray(d_pooled), "weights": weights}
    _run_pooling("pool_backward", maps, rows, {**arrays, "pooled": pooled, "sums": sums})
    d_theta: Array = sums.sum(axis=0)
    return d_theta


def _run_pooling(
    name: str, maps: Sequence[NDArray[Any]], rows: Ints, arrays: dict[str, NDArray[Any]]
) -> None:
    channels = maps[0].shape[2]
    patches = (c_int64 * len(maps))(*(x.shape[1] for x in maps))
    places = (c_void_p * len(maps))(*(x.ctypes.data for x in maps))
    parts = _parts(len(rows), channels * sum(patches))
    _run(
        name,
        _Pooling,
        parts,
        {**arrays, "rows": rows, "scratch": empty(parts, 4, channels)},
        images=len(rows),
        channels=channels,
        candidates=len(maps),
        half=maps[0].dtype == np.float16,
        patches=ctypes.addressof(patches),
        x=ctypes.addressof(places),
    )


class _Cap(ctypes.Structure):
    """See `tile.h`."""

    _fields_ = (
        *_fields(c_int64, "queries channels heads classes support"),
        *_fields(c_float, "factor eps"),
        *_fields(c_void_p, "y v gate z w starts hidden weights cosines"),
        *_fields(c_void_p, "d_cosines d_y d_v d_gate d_shots scratch"),
        ("scratch_size", c_int64),
    )


def cosines(how: Comparison, *, keep: bool) -> tuple[Array, Array | None]:
    """Compute cosines of queries with the prototypes of all classes; with `keep`, A as well."""
    queries = len(how.query.key)
    out = empty(queries, len(how.starts) - 1)
    tiles = -(-queries // LANES)
    weights = empty(tiles, how.heads, len(how.shots.key), LANES) if keep else None
    _run_cap("cap_forward", how, {"weights": weights, "cosines": out})
    return out, weights


def cosines_backward(
    how: Comparison, kept: Array | None, cosine: Array, d_cosine: Array
) -> tuple[Projected, Array, Array]:
    """Compute the gradients of queries and shots."""
    d_y, d_v, d_gate = (empty(*how.query.key.shape) for _ in range(3))
    arrays = {"weights": kept, "cosines": cosine, "d_cosines": np.ascontiguousarray(d_cosine)}
    gradients = {"d_y": d_y, "d_v": d_v, "d_gate": d_gate}
    d_shots = _run_cap("cap_backward", how, {**arrays, **gradients})
    d_z, d_w = d_shots.sum(axis=0).transpose(2, 1, 0)  # (shot, channel) each
    return Projected(d_y, d_v, d_gate), d_z, d_w


def _run_cap(name: str, how: Comparison, arrays: dict[str, NDArray[Any] | None]) -> Array:
    """Compare; return the gradients of the shots, (part, channel, shot, key and value)."""
    (queries, channels), classes = how.query.key.shape, len(how.starts) - 1
    z, w = (np.ascontiguousarray(x.T) for x in (how.shots.key, how.shots.value))  # (channel, shot)
    shots = z.shape[1]
    # Per part: prototypes, vectors over channels and classes, shots, weights, classes of the
    # shots, and room for alignment.
    kept = channels if "d_y" in arrays else 1  # channels whose prototypes are kept
    vectors = 2 * kept * classes + 7 * channels + 4 * classes
    vectors += shots + how.heads * shots + -(-shots // 8) + 1
    parts = min(-(-queries // LANES), _parts(queries, z.size))
    d_shots = empty(parts if "d_y" in arrays else 0, channels, shots, 2)
    scratch = empty(parts, LANES * vectors)
    y, v, gate = how.query
    inputs: dict[str, NDArray[Any] | None] = {"y": y, "v": v, "gate": gate, "z": z, "w": w}
    inputs |= {"starts": how.starts, "hidden": how.hidden, "scratch": scratch, "d_shots": d_shots}
    _run(
        name,
        _Cap,
        parts,
        {**arrays, **inputs},
        queries=queries,
        channels=channels,
        heads=how.heads,
        classes=classes,
        support=shots,
        factor=how.factor,
        eps=NORM_EPS,
        scratch_size=scratch.shape[1],
    )
    return d_shots
