"""Cosines of queries with their prototypes, which are made tile by tile and never kept.

A prototype v^P is (A V) * gate + (A K), one per query, class and channel: far more numbers than
anything else in the head, so what is done with them decides the time and the memory of a step.
Here they live in tiles that stay in the processor's cache, forward and, made again, backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mivhead.head.pooling import NORM_EPS

TILE = 2**17  # numbers in a tile: 0.5 MB in float32

Index = tuple[slice, slice]  # heads and queries of a tile


class Tile(NamedTuple):
    """Prototypes of some heads and queries."""

    pooled: Tensor  # A V: (head, class, query, d)
    prototypes: Tensor  # v^P - m, or v^P if not centred: (head, class, query, d)
    vectors: Tensor  # v^Q - m, or v^Q: (head, query, d)


class BagCosine(torch.autograd.Function):
    """Cosine of v^Q and v^P around m, the mean of a query's prototypes over the classes."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,  # A: (head, class, query, shot)
        values: Tensor,  # V: (head, class, shot, d)
        keys: Tensor | None,  # K: (head, class, shot, d), or None for no skip connection
        gate: Tensor | None,  # (head, query, d), or None for 1
        vectors: Tensor,  # v^Q: (head, query, d)
        centred: bool,
    ) -> Tensor:
        """Cosines (query, class)."""
        inputs = weights, values, keys, gate, vectors
        classes, queries = weights.shape[1:3]
        dots = weights.new_zeros(classes, queries)
        norms = weights.new_zeros(classes, queries)  # |v^P - m|, squared until the end
        length = weights.new_zeros(queries)  # |v^Q - m|, likewise
        for index in tiles(weights, values):
            tile, (_, some) = make_tile(inputs, index, centred), index
            norms[:, some] += tile.prototypes.square().sum(dim=(0, 3))
            length[some] += tile.vectors.square().sum(dim=(0, 2))
            dots[:, some] += tile.prototypes.mul_(tile.vectors.unsqueeze(1)).sum(dim=(0, 3))
        norms, length = (x.sqrt_().clamp_min_(NORM_EPS) for x in (norms, length))
        cosines = dots / (norms * length)  # (class, query)
        ctx.save_for_backward(*inputs, norms, length, cosines)
        ctx.centred = centred
        return cosines.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of everything that `forward` takes.

        With p = v^P - m and u = v^Q - m, cos = p.u / (|p| |u|) has the derivatives
        u / (|p| |u|) - p cos / |p|^2 by p and p / (|p| |u|) - u cos / |u|^2 by u;
        m passes its share on to all prototypes alike.
        """
        *inputs, norms, length, cosines = ctx.saved_tensors
        weights, values, keys, gate, vectors = inputs
        to_u = grad.T / (norms * length)  # (class, query)
        to_p = -grad.T * cosines / norms.square()  # (class, query)
        to_itself = -(grad.T * cosines).sum(dim=0) / length.square()  # (query,)
        d_weights, d_vectors = torch.empty_like(weights), torch.empty_like(vectors)
        d_values = torch.zeros_like(values)
        d_keys = None if keys is None else torch.zeros_like(keys)
        d_gate = None if gate is None else torch.empty_like(gate)
        for index in tiles(weights, values):
            heads, some = index
            pooled, p, u = make_tile(inputs, index, ctx.centred)
            by_u, by_p = to_u[:, some, None], to_p[:, some, None]  # (class, query, 1)
            d_u = (p * by_u).sum(dim=1).addcmul_(u, to_itself[some, None])  # (head, query, d)
            d_p = p.mul_(by_p).addcmul_(u.unsqueeze(1), by_u)  # (head, class, query, d)
            if ctx.centred:
                d_p -= (d_p.sum(dim=1) + d_u).div_(len(norms)).unsqueeze(1)
            d_vectors[index] = d_u
            d_pooled = d_p
            if gate is not None and d_gate is not None:
                d_gate[index] = pooled.mul_(d_p).sum(dim=1)
                d_pooled = torch.mul(d_p, gate[index].unsqueeze(1), out=pooled)
            a = weights[heads, :, some]  # (head, class, query, shot)
            d_a = d_pooled @ values[heads].transpose(2, 3)
            d_values[heads] += a.transpose(2, 3) @ d_pooled
            if keys is not None and d_keys is not None:
                d_a += d_p @ keys[heads].transpose(2, 3)
                d_keys[heads] += a.transpose(2, 3) @ d_p
            d_weights[heads, :, some] = d_a
        return d_weights, d_values, d_keys, d_gate, d_vectors, None


def tiles(weights: Tensor, values: Tensor) -> Iterator[Index]:
    """Cut heads and queries into tiles of at most about `TILE` numbers."""
    heads, classes, queries, _ = weights.shape
    a_query = classes * values.shape[-1]  # numbers of one query in one head
    rows = max(1, min(queries, TILE // a_query))
    depth = max(1, TILE // (a_query * rows))
    for head in range(0, heads, depth):
        for query in range(0, queries, rows):
            yield slice(head, head + depth), slice(query, query + rows)


def make_tile(inputs: Any, index: Index, centred: bool) -> Tile:
    """Make the prototypes of some heads and queries."""
    weights, values, keys, gate, vectors = inputs
    heads, some = index
    a = weights[heads, :, some]  # (head, class, query, shot)
    pooled = a @ values[heads]  # (head, class, query, d)
    prototypes = pooled.clone() if gate is None else pooled * gate[index].unsqueeze(1)
    if keys is not None:
        prototypes += a @ keys[heads]
    if not centred:
        return Tile(pooled, prototypes, vectors[index])
    mean = prototypes.mean(dim=1)  # m: (head, query, d)
    prototypes -= mean.unsqueeze(1)
    return Tile(pooled, prototypes, vectors[index] - mean)
