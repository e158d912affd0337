"""Hand-written gradients against plain formulas, in chunks of any size."""

import pytest
import torch
from torch import Tensor

from mivhead.head import pooling
from mivhead.head.comparison import BagCosine
from mivhead.head.pooling import PatchPooling


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return values.requires_grad_()


def plain_cosine(
    weights: Tensor, values: Tensor, keys: Tensor | None, gate: Tensor | None, vectors: Tensor
) -> Tensor:
    """Prototype by prototype, centred: (query, class)."""
    heads, classes, queries, _ = weights.shape
    rows = []
    for q in range(queries):
        prototypes = []
        for c in range(classes):
            parts = []
            for h in range(heads):
                part = weights[h, c, q] @ values[h, c]
                if gate is not None:
                    part = part * gate[h, q]
                if keys is not None:
                    part = part + weights[h, c, q] @ keys[h, c]
                parts.append(part)
            prototypes.append(torch.cat(parts))
        mean = sum(prototypes) / classes
        query = torch.cat([vectors[h, q] for h in range(heads)]) - mean
        rows.append(
            torch.stack([torch.cosine_similarity(query, p - mean, dim=0) for p in prototypes])
        )
    return torch.stack(rows)


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_cosines_and_gradients_of_bags(has_keys, has_gate):
    heads, classes, queries, shots, d = 2, 3, 4, 2, 5
    inputs = (
        drawn(heads, classes, queries, shots, seed=0),
        drawn(heads, classes, shots, d, seed=1),
        drawn(heads, classes, shots, d, seed=2) if has_keys else None,
        drawn(heads, queries, d, seed=3) if has_gate else None,
        drawn(heads, queries, d, seed=4),
    )
    given = [each for each in inputs if each is not None]
    ours, plain = BagCosine.apply(*inputs, True), plain_cosine(*inputs)
    torch.testing.assert_close(ours, plain)
    weight = drawn(queries, classes, seed=5).detach()
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), given),
        torch.autograd.grad((plain * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_cosines_without_a_centre():
    inputs = (
        drawn(1, 2, 3, 2, seed=0),
        drawn(1, 2, 2, 4, seed=1),
        drawn(1, 2, 2, 4, seed=2),
        drawn(1, 3, 4, seed=3),
        drawn(1, 3, 4, seed=4),
    )
    assert torch.autograd.gradcheck(lambda *given: BagCosine.apply(*given, False), inputs)


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
@pytest.mark.parametrize("scaled", ["per patch", "alike"])
def test_pooling_of_patches_and_its_gradient(monkeypatch, chunk, scaled):
    monkeypatch.setattr(pooling, "CHUNK", chunk)
    theta, patches = drawn(5, seed=0), drawn(3, 4, 5, seed=1).detach()
    scale = drawn(3, 4, seed=2).detach().abs()
    if scaled == "alike":
        scale = scale[:1, :1].expand(3, 4)
    ours = PatchPooling.apply(theta, patches, scale)
    plain = torch.einsum("np,npc->nc", torch.softmax((patches @ theta) * scale, dim=1), patches)
    torch.testing.assert_close(ours, plain)
    weight = drawn(3, 5, seed=3).detach()
    torch.testing.assert_close(
        torch.autograd.grad((ours * weight).sum(), theta),
        torch.autograd.grad((plain * weight).sum(), theta),
    )
