"""Pooling of an image's candidates by attention (`candidates.c`)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mivhead.kernels.library import address, call, empty


class _Task(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "candidates")),
        *((n, c_float) for n in ("factor", "eps", "length")),
        *((n, c_void_p) for n in ("mu", "x", "pooled", "d_pooled", "d_mu", "d_x", "scratch")),
    )


class CandidatePooling(torch.autograd.Function):
    """Sums of candidates x, weighted with softmax(factor mu . x / |x|), for each image.

    With `length`, all |x| count as so long; otherwise they are at least `eps`.
    """

    @staticmethod
    def forward(
        ctx: Any, mu: Tensor, candidates: Tensor, factor: float, eps: float, length: float
    ) -> Tensor:
        """Image vectors M_n: (image, channel)."""
        x, mu = candidates.contiguous(), mu.contiguous()
        pooled = x.new_empty(len(x), x.shape[2])
        ctx.setting = {"factor": factor, "eps": eps, "length": length}
        _run("candidates_forward", ctx.setting, mu=mu, x=x, pooled=pooled)
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
        _run("candidates_backward", ctx.setting, **tensors)
        return d_mu.sum(dim=0), d_x, None, None, None


def _run(name: str, setting: dict[str, float], **tensors: Tensor) -> None:
    images, count, channels = tensors["x"].shape
    scratch = empty(torch.get_num_threads(), 4, count)
    places = {key: address(tensor) for key, tensor in tensors.items()}
    sizes = {"images": images, "channels": channels, "candidates": count}
    call(name, _Task(**sizes, **setting, **places, scratch=address(scratch)))
