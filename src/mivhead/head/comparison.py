"""Cosines of queries with their prototypes.

A prototype v^P is (A V) * gate + (A K), one per query, class and channel: far more numbers than
anything else in CAP, so how often they are touched decides the time of a step. They are made in
one pass and laid out query by query, so that what follows are small matrix products; their
gradient goes back the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mivhead.head.pooling import NORM_EPS


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
        d, skip = values.shape[3], keys is not None
        shots = values if keys is None else torch.cat([values, keys], dim=3)
        pooled = weights @ shots  # A V, and A K beside it: (head, class, query, d or 2 d)
        heads, classes, queries, _ = pooled.shape
        prototypes = pooled.new_empty(queries, classes, heads, d)
        torch.addcmul(
            pooled[..., d:] if skip else pooled.new_zeros(()),
            pooled[..., :d],
            pooled.new_ones(()) if gate is None else gate.unsqueeze(1),
            out=prototypes.permute(2, 1, 0, 3),
        )
        prototypes = prototypes.flatten(2)  # v^P: (query, class, channel)
        u = vectors.transpose(0, 1).flatten(1)  # (query, channel)
        if centred:
            mean = prototypes.mean(dim=1)  # m: (query, channel)
            prototypes -= mean.unsqueeze(1)
            u = u - mean
        norms = _norm(prototypes)  # (query, class)
        length = _norm(u).unsqueeze(1)  # (query, 1)
        # a row times a matrix is several times as fast as a matrix times a column
        dots = torch.bmm(u.unsqueeze(1), prototypes.mT).squeeze(1)  # (query, class)
        cosines = dots / (norms * length)
        ctx.save_for_backward(weights, shots, gate, pooled, prototypes, u, norms, length, cosines)
        ctx.skip, ctx.centred = skip, centred
        return cosines

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of everything that `forward` takes.

        With p = v^P - m and u = v^Q - m, cos = p.u / (|p| |u|) has the derivatives
        u / (|p| |u|) - p cos / |p|^2 by p and p / (|p| |u|) - u cos / |u|^2 by u;
        m passes its share on to all prototypes alike. Large tensors that `forward` saved are
        overwritten, because new memory costs as much as the work: PyTorch refuses a second call.
        """
        weights, shots, gate, pooled, p, u, norms, length, cosines = ctx.saved_tensors
        by_u = grad / (norms * length)  # (query, class)
        by_p = -grad * cosines / norms.square()  # (query, class)
        by_itself = -(grad * cosines).sum(dim=1, keepdim=True) / length.square()  # (query, 1)
        from_p = torch.bmm(by_u.unsqueeze(1), p).squeeze(1)  # (query, channel)
        d_u = torch.addcmul(from_p, u, by_itself)
        # d_p = p by_p + u by_u, less what m takes off: the mean of that over the classes, and d_u
        factors, rows = by_u.unsqueeze(2), u.unsqueeze(1)
        if ctx.centred:
            total = torch.bmm(by_p.unsqueeze(1), p).squeeze(1)  # (query, channel)
            total = torch.addcmul(total, u, by_u.sum(dim=1, keepdim=True)).add_(d_u)
            share = torch.full_like(by_u, -1 / by_u.shape[1])  # (query, class)
            factors = torch.stack([by_u, share], dim=2)  # (query, class, 2)
            rows = torch.stack([u, total], dim=1)  # (query, 2, channel)
        d_p = p.mul_(by_p.unsqueeze(2)).baddbmm_(factors, rows)  # (query, class, channel)

        heads, _, queries, width = pooled.shape
        d = width // (1 + ctx.skip)
        d_p = d_p.unflatten(2, (heads, d)).permute(2, 1, 0, 3)  # (head, class, query, d)
        d_pooled, d_gate = pooled, None
        if gate is None:
            d_pooled[..., :d] = d_p
        else:
            d_gate = pooled[..., :d].mul_(d_p).sum(dim=1)
            torch.mul(d_p, gate.unsqueeze(1), out=d_pooled[..., :d])
        if ctx.skip:
            d_pooled[..., d:] = d_p
        d_weights = (shots @ d_pooled.mT).mT
        d_shots = weights.mT @ d_pooled
        d_vectors = d_u.view(queries, heads, d).transpose(0, 1)
        d_keys = d_shots[..., d:] if ctx.skip else None
        return d_weights, d_shots[..., :d], d_keys, d_gate, d_vectors, None


def _norm(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.clamp_min_(NORM_EPS)
