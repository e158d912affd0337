"""Projections of image vectors: several linear layers of the same normalised vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_IN_PLACE = ContextVar("in_place", default=False)
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward


@contextmanager
def in_place() -> Iterator[None]:
    """Add gradients to those that matrices have, in a call of `backward`.

    PyTorch would make a matrix for each and then add it: as much memory once more.
    """
    token = _IN_PLACE.set(True)
    try:
        yield
    finally:
        _IN_PLACE.reset(token)


def project(norm: nn.LayerNorm, layers: Sequence[nn.Linear], vectors: Tensor) -> list[Tensor]:
    """Normalised vectors, and what each layer makes of them: (image, channel) each."""
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    return list(_Projection.apply(vectors, norm.eps, norm.weight, norm.bias, *parameters))


class _Projection(torch.autograd.Function):
    """LayerNorm and linear layers in one, because a step of training is made of many small calls.

    Gradients are added up within the matrix products that make them: those of the vectors, and,
    `in_place`, those of matrices that have a gradient already.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, eps: float, scale: Tensor, shift: Tensor, *layers: Tensor
    ) -> tuple[Tensor, ...]:
        """Normalised vectors, and weight x + bias for each layer."""
        x, mean, deviation = torch.native_layer_norm(vectors, scale.shape, scale, shift, eps)
        weights, biases = layers[::2], layers[1::2]
        ctx.save_for_backward(vectors, x, mean, deviation, scale, shift, *weights)
        ctx.set_materialize_grads(False)
        pairs = zip(weights, biases, strict=True)
        return x, *(torch.addmm(bias, x, weight.T) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of everything but eps."""
        vectors, x, mean, deviation, scale, shift, *weights = ctx.saved_tensors
        total = torch.zeros_like(x) if d_x is None else d_x.clone()
        of_layers: list[Tensor | None] = []
        for weight, grad in zip(weights, grads, strict=True):
            if grad is None:
                of_layers += None, None
                continue
            total.addmm_(grad, weight)
            if _IN_PLACE.get() and weight.requires_grad and weight.grad is not None:
                weight.grad.addmm_(grad.T, x)
                of_layers.append(None)
            else:
                of_layers.append(grad.T @ x)
            of_layers.append(grad.sum(dim=0))
        wanted = ctx.needs_input_grad[0], True, True
        d_vectors, d_scale, d_shift = _layer_norm_backward(
            total, vectors, scale.shape, mean, deviation, scale, shift, wanted
        )
        return d_vectors, None, d_scale, d_shift, *of_layers
