"""Pooling of half-precision patches: the formula's values and gradients, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mivhead_bench.head.pooling import pool_patches


def patches() -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(6, size * size, 32, generator=generator).half() for size in (5, 3)]
    scale = torch.rand(6, 34, generator=generator)
    theta = torch.randn(32, generator=generator)
    return maps, scale, theta


def test_half_precision_gives_the_formulas_values_and_gradients():
    maps, scale, theta = patches()
    found = []
    for given in (maps, [x.float() for x in maps]):
        own = theta.clone().requires_grad_()
        pooled = pool_patches(own, given, scale)  # (image, candidate, channel)
        (pooled * torch.linspace(-1, 1, 32)).square().sum().backward()
        found.append((pooled.detach(), own.grad))
    (half, of_half), (full, of_full) = found
    torch.testing.assert_close(half, full)
    torch.testing.assert_close(of_half, of_full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("half", "expected"), [(True, 0), (False, 2)])
def test_no_patch_is_kept_in_full_precision(half, expected):
    """Autograd alone keeps every patch twice: once for the scores, once for the sums."""
    maps, scale, theta = patches()
    sizes = [x.numel() for x in maps]
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.numel() in sizes:
            kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        pool_patches(theta.requires_grad_(), maps if half else [x.float() for x in maps], scale)
    assert [kept.count(size) for size in sizes] == [expected] * 2
