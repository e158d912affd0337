"""Hand-written gradients against plain formulas, in chunks of any size."""

import pytest
import torch
from torch import Tensor

from mivhead.blocks import Block
from mivhead.head import pooling
from mivhead.head.comparison import BagCosine
from mivhead.head.config import BlockConfig
from mivhead.head.pooling import CandidatePooling, PatchPooling, prepare


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return values.requires_grad_()


def plain_cosine(
    weights: Tensor,
    values: Tensor,
    keys: Tensor | None,
    gate: Tensor | None,
    vectors: Tensor,
    centred: bool,
) -> Tensor:
    """Prototype by prototype: (query, class)."""
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
        mean = sum(prototypes) / classes if centred else 0
        query = torch.cat([vectors[h, q] for h in range(heads)]) - mean
        rows.append(
            torch.stack([torch.cosine_similarity(query, p - mean, dim=0) for p in prototypes])
        )
    return torch.stack(rows)


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_cosines_and_gradients_of_bags(has_keys, has_gate, centred):
    heads, classes, queries, shots, d = 2, 3, 4, 2, 5
    inputs = (
        drawn(heads, classes, queries, shots, seed=0),
        drawn(heads, classes, shots, d, seed=1),
        drawn(heads, classes, shots, d, seed=2) if has_keys else None,
        drawn(heads, queries, d, seed=3) if has_gate else None,
        drawn(heads, queries, d, seed=4),
    )
    given = [each for each in inputs if each is not None]
    ours, plain = BagCosine.apply(*inputs, centred), plain_cosine(*inputs, centred)
    torch.testing.assert_close(ours, plain)
    weight = drawn(queries, classes, seed=5).detach()
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), given),
        torch.autograd.grad((plain * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_cosines_do_not_go_back_twice():
    inputs = drawn(1, 2, 3, 2, seed=0), drawn(1, 2, 2, 4, seed=1), drawn(1, 3, 4, seed=2)
    cosines = BagCosine.apply(inputs[0], inputs[1], None, None, inputs[2], True)
    torch.autograd.grad(cosines.sum(), inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(cosines.sum(), inputs)


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_pooling_of_patches_and_its_gradient(monkeypatch, chunk):
    monkeypatch.setattr(pooling, "CHUNK", chunk)
    config = BlockConfig(channels=5, heads=1, grid=(2, 3), token=False, pool_sizes=(2,), tau=3.0)
    map_ = drawn(7, 5, 2, 3, seed=1).detach()
    theta = drawn(5, seed=0)
    ours = PatchPooling.apply(theta, prepare(Block(map=map_), config, torch.float64))
    plain = []
    for size in ((2, 3), (2, 2)):
        x = torch.nn.functional.adaptive_max_pool2d(map_, size).flatten(2).mT
        weights = torch.softmax((x @ theta) * 3 / (5**0.5 * x.norm(dim=2)), dim=1)
        plain.append((weights.unsqueeze(2) * x).sum(dim=1))
    plain = torch.stack(plain, dim=1)
    torch.testing.assert_close(ours, plain)
    weight = drawn(7, 2, 5, seed=3).detach()
    torch.testing.assert_close(
        torch.autograd.grad((ours * weight).sum(), theta),
        torch.autograd.grad((plain * weight).sum(), theta),
    )


@pytest.mark.parametrize("form", ["cnn", "vit"])
def test_pooling_of_candidates_and_its_gradient(form):
    config = BlockConfig(channels=5, heads=1, grid=(2, 2), token=False, form=form, tau=3.0)
    inputs = drawn(5, seed=0), drawn(3, 4, 5, seed=1)
    assert torch.autograd.gradcheck(lambda *given: CandidatePooling.apply(*given, config), inputs)


def test_half_precision_patches_are_those_of_single_precision():
    config = BlockConfig(channels=4, heads=1, grid=(5, 6), token=False, pool_sizes=(3, 2))
    map_ = drawn(7, 4, 5, 6, seed=0).detach().half()
    half, single = (prepare(Block(map=map_.to(t)), config) for t in (torch.float16, torch.float32))
    for mine, theirs in zip(half.maps, single.maps, strict=True):
        assert mine[0].patches.dtype == torch.float16
        for ours, expected in zip(mine[0].load(), theirs[0].load(), strict=True):
            assert torch.equal(ours, expected)  # patches, and scales of their scores
