"""Pooling of patches by attention (`pooling.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mivhead.kernels.library import address, call, empty


class _Task(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "candidates", "half")),
        *((n, c_void_p) for n in ("patches", "x", "scale", "vector", "weights", "pooled", "sums")),
        ("scratch", c_void_p),
    )


class PatchPooling(torch.autograd.Function):
    """Sums of patches x, weighted with softmax(theta . x scale), for each map candidate."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, maps: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Pooled candidates I_n: (image, candidate, channel)."""
        pooled = theta.new_empty(len(scale), len(maps), len(theta))
        weights = torch.empty_like(scale)
        theta = theta.detach().contiguous()
        _run("pool_forward", maps, scale=scale, vector=theta, weights=weights, pooled=pooled)
        ctx.maps = maps
        ctx.save_for_backward(scale, weights, pooled)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of theta; patches have none."""
        scale, weights, pooled = ctx.saved_tensors
        sums = grad.new_empty(len(grad), grad.shape[2])
        _run(
            "pool_backward",
            ctx.maps,
            scale=scale,
            vector=grad.contiguous(),
            weights=weights,
            pooled=pooled,
            sums=sums,
        )
        return sums.sum(dim=0), None, None


def _run(name: str, maps: Sequence[Tensor], **tensors: Tensor) -> None:
    images, _, channels = maps[0].shape
    patches = (c_int64 * len(maps))(*(x.shape[1] for x in maps))
    places = (c_void_p * len(maps))(*map(address, maps))
    scratch = empty(torch.get_num_threads(), 4, channels)
    task = _Task(
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
