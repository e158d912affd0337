"""Compiled versions of the head's formulas: Python functions and their gradients.

Each function takes the same arguments as the formula of its name (`mivhead.head.head.FORMULAS`) and
calls the C code of the file that its section names. `mivhead.kernels.backend` decides when.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mivhead.kernels.library import address, call, empty

NORM_EPS = 1e-12  # of L2 norms, as in the formulas

# Candidates of an image: its map, max-pooled to several sizes (`derive.c`).


class _DeriveTask(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "height", "width", "candidates", "half")),
        *((n, c_int64) for n in ("image_step", "channel_step", "pixel_step")),
        *((n, c_void_p) for n in ("maps", "sizes", "patches", "norms", "scratch")),
    )


def derive_candidates(
    maps: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Max-pool maps to several sizes: the patches of each size, and the norms of all patches."""
    del dtype  # always float32 here
    images, channels, height, width = maps.shape
    if height > 1 and width > 1 and maps.stride(2) != width * maps.stride(3):
        maps = maps.contiguous()  # now rows follow each other
    patches = [maps.new_empty(images, h * w, channels) for h, w in sizes]
    norms = empty(images, sum(h * w for h, w in sizes))
    scratch = empty(torch.get_num_threads(), height, width, channels)
    flat = (c_int64 * (2 * len(sizes)))(*(side for size in sizes for side in size))
    places = (c_void_p * len(sizes))(*map(address, patches))
    call(
        "derive",
        _DeriveTask(
            images=images,
            channels=channels,
            height=height,
            width=width,
            candidates=len(sizes),
            half=maps.dtype == torch.float16,
            image_step=maps.stride(0),
            channel_step=maps.stride(1),
            pixel_step=maps.stride(3 if width > 1 else 2),  # a side of 1 may have any stride
            maps=maps.data_ptr(),
            sizes=ctypes.addressof(flat),
            patches=ctypes.addressof(places),
            norms=address(norms),
            scratch=address(scratch),
        ),
    )
    return patches, norms


# Pooling of patches by attention (`pooling.c`).


def pool_patches(theta: Tensor, maps: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Equation 1: pooled candidates I_n, (image, candidate, channel)."""
    pooled: Tensor = _PatchPooling.apply(theta, maps, scale)
    return pooled


class _PatchTask(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "candidates", "half")),
        *((n, c_void_p) for n in ("patches", "x", "scale", "vector", "weights", "pooled", "sums")),
        ("scratch", c_void_p),
    )


class _PatchPooling(torch.autograd.Function):
    """Sums of patches x, weighted with softmax(theta . x scale), for each map candidate."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, maps: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Pooled candidates I_n: (image, candidate, channel)."""
        pooled = theta.new_empty(len(scale), len(maps), len(theta))
        weights = torch.empty_like(scale)
        theta = theta.detach().contiguous()
        _run_patches(
            "pool_forward", maps, scale=scale, vector=theta, weights=weights, pooled=pooled
        )
        ctx.maps = maps
        ctx.save_for_backward(scale, weights, pooled)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of theta; patches have none."""
        scale, weights, pooled = ctx.saved_tensors
        sums = grad.new_empty(len(grad), grad.shape[2])
        _run_patches(
            "pool_backward",
            ctx.maps,
            scale=scale,
            vector=grad.contiguous(),
            weights=weights,
            pooled=pooled,
            sums=sums,
        )
        return sums.sum(dim=0), None, None


def _run_patches(name: str, maps: Sequence[Tensor], **tensors: Tensor) -> None:
    images, _, channels = maps[0].shape
    patches = (c_int64 * len(maps))(*(x.shape[1] for x in maps))
    places = (c_void_p * len(maps))(*map(address, maps))
    scratch = empty(torch.get_num_threads(), 4, channels)
    task = _PatchTask(
        images=images,
        channels=channels,
        candidates=len(maps),
        half=maps[0].dtype == torch.float16,
        patches=ctypes.addressof(patches),
        x=ctypes.addressof(places),
        scratch=address(scratch),
        **{key: address(tensor) for key, tensor in tensors.items()},
    )
    call(name, task)


# Pooling of an image's candidates by attention (`candidates.c`).


class _CandidateTask(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "candidates")),
        *((n, c_float) for n in ("factor", "eps", "length")),
        *((n, c_void_p) for n in ("mu", "x", "pooled", "d_pooled", "d_mu", "d_x", "scratch")),
    )


def pool_candidates(mu: Tensor, candidates: Tensor, factor: float, length: float | None) -> Tensor:
    """Equation 2: image vectors M_n, (image, channel)."""
    pooled: Tensor = _CandidatePooling.apply(mu, candidates, factor, NORM_EPS, length or 0.0)
    return pooled


class _CandidatePooling(torch.autograd.Function):
    """Sums of candidates x, weighted with softmax(factor mu . x / |x|), for each image.

    A `length` other than 0 replaces every |x|; otherwise |x| is at least `eps`.
    """

    @staticmethod
    def forward(
        ctx: Any, mu: Tensor, candidates: Tensor, factor: float, eps: float, length: float
    ) -> Tensor:
        """Image vectors M_n: (image, channel)."""
        x, mu = candidates.contiguous(), mu.contiguous()
        pooled = x.new_empty(len(x), x.shape[2])
        ctx.setting = {"factor": factor, "eps": eps, "length": length}
        _run_candidates("candidates_forward", ctx.setting, mu=mu, x=x, pooled=pooled)
        ctx.save_for_backward(mu, x)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of mu and of the candidates."""
        mu, x = ctx.saved_tensors
        d_pooled = grad.contiguous()
        d_mu, d_x = torch.empty_like(d_pooled), torch.empty_like(x)
        tensors = {"mu": mu, "x": x, "d_pooled": d_pooled, "d_mu": d_mu, "d_x": d_x}
        _run_candidates("candidates_backward", ctx.setting, **tensors)
        return d_mu.sum(dim=0), d_x, None, None, None


def _run_candidates(name: str, setting: dict[str, float], **tensors: Tensor) -> None:
    images, count, channels = tensors["x"].shape
    scratch = empty(torch.get_num_threads(), 4, count)
    places = {key: address(tensor) for key, tensor in tensors.items()}
    sizes = {"images": images, "channels": channels, "candidates": count}
    call(name, _CandidateTask(**sizes, **setting, **places, scratch=address(scratch)))


# Cross-attention pooling and the cosines with its prototypes (`cap_forward.c`, `cap_backward.c`).


LANES = 16  # queries per tile
KINDS = ("uniform", "l1", "dot")
TENSORS = (  # gate, hidden and weights may be None
    *("y", "v", "gate", "z", "w", "starts", "hidden", "weights", "cosines"),
    *("d_cosines", "d_y", "d_v", "d_gate", "d_shots"),
)


class _CapTask(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("queries", "channels", "heads", "classes", "support")),
        *((n, c_int64) for n in ("attention", "skip", "centred")),
        *((n, c_float) for n in ("factor", "eps")),
        *((n, c_void_p) for n in TENSORS),
        ("scratch", c_void_p),
        ("scratch_size", c_int64),
    )


@dataclass(frozen=True)
class Setting:
    """How queries are compared with the bags."""

    heads: int
    attention: str  # one of KINDS
    factor: float  # of the distance or the dot product
    skip: bool
    centred: bool
    eps: float  # smallest norm


def compare(cap: Any, query: Any, support: Any, bags: Any, hidden: Tensor | None) -> Tensor:
    """Equations 3 to 5 and the cosines of Component 3: (query, class).

    The arguments are those of `mivhead.head.cap.CrossAttentionPooling.forward` and the module
    itself; this package does not import the head.
    """
    shots = support if bags.even else support.rows(bags.order)
    recipe = cap.recipe
    cosines: Tensor = CapCosine.apply(
        query.key.flatten(1),
        query.value.flatten(1),
        None if cap.excitation is None else query.gate.flatten(1),
        shots.key.flatten(1),
        shots.value.flatten(1),
        bags.starts,
        hidden,
        Setting(
            heads=cap.heads,
            attention=recipe.attention if recipe.cross_attention else "uniform",
            factor=cap.factor,
            skip=recipe.skip,
            centred=recipe.centres,
            eps=NORM_EPS,
        ),
    )
    return cosines


class CapCosine(torch.autograd.Function):
    """Cosines of v^Q with the prototypes v^P of all classes."""

    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,  # of queries: (query, channel)
        value: Tensor,
        gate: Tensor | None,
        shot_key: Tensor,  # of shots, class after class: (shot, channel)
        shot_value: Tensor,
        starts: Tensor,  # (class + 1,): where the shots of each class start
        hidden: Tensor | None,  # (query,): the shot that a query does not see, or -1
        setting: Setting,
    ) -> Tensor:
        """Cosines (query, class)."""
        y, v = key.contiguous(), value.contiguous()
        gate = None if gate is None else gate.contiguous()
        z, w = shot_key.T.contiguous(), shot_value.T.contiguous()  # (channel, shot)
        cosines = y.new_empty(len(y), len(starts) - 1)
        weights = None
        if any(ctx.needs_input_grad):
            tiles = -(-len(y) // LANES)
            weights = y.new_empty(tiles, setting.heads, len(shot_key), LANES)
        given = y, v, gate, z, w, starts, hidden, weights, cosines
        _run_cap("cap_forward", setting, given)
        ctx.setting = setting
        ctx.save_for_backward(*given)
        return cosines

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys, values and gates."""
        y, v, gate, z, *_ = ctx.saved_tensors
        d_y, d_v = torch.empty_like(y), torch.empty_like(v)
        d_gate = None if gate is None else torch.empty_like(gate)
        d_shots = z.new_empty(torch.get_num_threads(), *z.shape, 2)  # keys and values side by side
        grads = grad.contiguous(), d_y, d_v, d_gate, d_shots
        _run_cap("cap_backward", ctx.setting, (*ctx.saved_tensors, *grads))
        d_z, d_w = d_shots.sum(dim=0).permute(2, 1, 0)  # (shot, channel) each
        return d_y, d_v, d_gate, d_z, d_w, None, None, None


def _run_cap(name: str, setting: Setting, tensors: Sequence[Any]) -> None:
    """Call a function with tensors in the order of TENSORS; forward, without gradients."""
    y, _, _, z, _, starts, *_ = tensors
    (queries, channels), support, classes = y.shape, z.shape[1], len(starts) - 1
    # Per thread: prototypes, vectors over channels and classes, shots, weights, classes of the
    # shots, and room for alignment.
    kept = channels if len(tensors) == len(TENSORS) else 1  # channels whose prototypes are kept
    vectors = 2 * kept * classes + 7 * channels + 4 * classes
    vectors += support + setting.heads * support + -(-support // 8) + 1
    scratch = y.new_empty(torch.get_num_threads(), LANES * vectors)
    task = _CapTask(
        queries=queries,
        channels=channels,
        heads=setting.heads,
        classes=classes,
        support=support,
        attention=KINDS.index(setting.attention),
        skip=setting.skip,
        centred=setting.centred,
        factor=setting.factor,
        eps=setting.eps,
        scratch=address(scratch),
        scratch_size=scratch.shape[1],
        **dict(zip(TENSORS[: len(tensors)], map(address, tensors), strict=True)),
    )
    call(name, task)
