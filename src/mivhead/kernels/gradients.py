"""Gradients in flat memory: fused projections, and a backward pass in chunks.

`mivhead.kernels.backend` explains when and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_IN_PLACE = ContextVar("in_place", default=False)
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward

Parts = TypeVar("Parts", bound="tuple[Tensor, ...]")  # a named tuple of tensors


@contextmanager
def in_place() -> Iterator[None]:
    """Let a call of `backward` add the gradients of matrices to those they already have.

    PyTorch would allocate a matrix for each new gradient and add it afterwards.
    """
    token = _IN_PLACE.set(True)
    try:
        yield
    finally:
        _IN_PLACE.reset(token)


def project(norm: nn.LayerNorm, layers: Sequence[nn.Linear], vectors: Tensor) -> list[Tensor]:
    """Normalise vectors and apply each layer to the result: (image, channel) each."""
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    return list(_Projection.apply(vectors, norm.eps, norm.weight, norm.bias, *parameters))


class _Projection(torch.autograd.Function):
    """LayerNorm and linear layers in one, because a training step consists of many small calls.

    Gradients are summed within the matrix products that compute them: those of the vectors, and,
    `in_place`, those of matrices that already have a gradient.
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


def backward_in_chunks(
    embedded: Sequence[Parts],
    shots: int,
    chunks: Iterable[slice],
    loss: Callable[[list[Parts], list[Parts], slice], Tensor],
) -> float:
    """Sum a loss over chunks of queries, and add its gradient to the parameters.

    Parameters
    ----------
    embedded : sequence of named tuples
        Per block, what was computed of every image: tensors (image, ...), the support first.
    shots : int
        How many of the images are the support.
    chunks : iterable of slice
        Which images are queries at the same time.
    loss : callable
        The loss of a chunk, given all queries, the support, and the chunk.

    Returns
    -------
    float
        The sum.
    """
    # Cut the graph here: every chunk adds its gradients to the leaves.
    queries = [_leaves(block) for block in embedded]
    support = [_leaves(block, shots) for block in embedded]
    total = 0.0
    for chunk in chunks:
        part = loss(queries, support, chunk)
        if part.requires_grad:
            part.backward()
        total += part.item()
    outputs, grads = [], []
    for block, as_query, as_shot in zip(embedded, queries, support, strict=True):
        for output, leaf, shot in zip(block, as_query, as_shot, strict=True):
            if leaf.grad is not None:
                if shot.grad is not None:
                    leaf.grad[:shots] += shot.grad
                outputs.append(output)
                grads.append(leaf.grad)
    if outputs:
        with in_place():
            _Restart.apply(grads, *outputs).backward()
    return total


def _leaves(block: Parts, rows: int | None = None) -> Parts:
    """Detach tensors, or their first rows, from their graph; a scalar holds for all images."""
    cut = ((x if rows is None or x.ndim == 0 else x[:rows], x.requires_grad) for x in block)
    return type(block)(*(x.detach().requires_grad_(wanted) for x, wanted in cut))


class _Restart(torch.autograd.Function):
    """Continues the backward pass from gradients that are known already.

    `torch.autograd.backward(outputs, grads)` would do the same but imports sympy, which takes half
    a second.
    """

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        """Return a tensor whose `backward` can be called."""
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the known gradients."""
        return None, *ctx.grads
