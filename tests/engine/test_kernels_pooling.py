"""Compiled pooling against the formulas in double precision, and what must hold in any case."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.features import Block
from mivhead.head.blocks import BlockConfig
from mivhead.head.head import FORMULAS
from mivhead.head.pooling import Candidates, PoolingByAttention
from mivhead.kernels.backend import COMPILED, Operations, choose
from tests.helpers.kernel_numbers import close, drawn


def operations() -> Operations:
    return choose(FORMULAS, torch.device("cpu"), torch.float32)


def prepare(block: Block, config: BlockConfig) -> Candidates:
    return PoolingByAttention(config).prepare(block, operations(), torch.float32)


def pool_patches(theta: Tensor, candidates: Candidates) -> Tensor:
    return operations().pool_patches(theta, candidates.maps, candidates.scale)


def pool_candidates(mu: Tensor, candidates: Tensor, config: BlockConfig) -> Tensor:
    pooling = PoolingByAttention(config)
    return operations().pool_candidates(mu, candidates, pooling.factor, pooling.length)


def make_maps(form: str, channels: int, dtype: torch.dtype):
    config = BlockConfig(
        channels=channels, heads=1, grid=(5, 6), token=False, pool_sizes=(3, 1), form=form, tau=3.0
    )
    return config, Block(map=drawn(9, channels, 5, 6, seed=1).to(dtype))


@pytest.mark.parametrize("form", ["cnn", "vit"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("channels", [3, 7, 40])
@pytest.mark.parametrize("size", [0.0, 1.0, 50.0])  # of theta: even, usual, one patch takes all
def test_pooling_of_patches_and_its_gradient(kernels, threads, form, dtype, channels, size):
    config, block = make_maps(form, channels, dtype)
    theta = (size * drawn(channels, seed=0)).requires_grad_()
    ours = pool_patches(theta, prepare(block, config))
    double, plain = theta.detach().double().requires_grad_(), []
    for grid in config.candidate_sizes:
        x = F.adaptive_max_pool2d(block.map.double(), grid).flatten(2).mT  # (image, patch, channel)
        norms = x.norm(dim=2) if form == "cnn" else math.sqrt(channels)
        weights = torch.softmax((x @ double) * 3 / (math.sqrt(channels) * norms), dim=1)
        plain.append((weights.unsqueeze(2) * x).sum(dim=1))
    expected = torch.stack(plain, dim=1)
    close(ours, expected)
    weight = drawn(*ours.shape, seed=3)
    (mine,) = torch.autograd.grad((ours * weight).sum(), theta)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), double)
    close(mine, theirs)


@pytest.mark.parametrize("form", ["cnn", "vit"])
@pytest.mark.parametrize("size", [0.0, 1.0, 50.0])
def test_pooling_of_candidates_and_its_gradient(kernels, threads, form, size):
    config = BlockConfig(channels=7, heads=1, grid=(2, 2), token=False, form=form, tau=3.0)
    mu, x = (size * drawn(7, seed=0)).requires_grad_(), drawn(9, 4, 7, seed=1).requires_grad_()
    assert (operations() is COMPILED) == kernels
    ours = pool_candidates(mu, x, config)
    double = [t.detach().double().requires_grad_() for t in (mu, x)]
    norms = double[1].norm(dim=2) if form == "cnn" else math.sqrt(7)
    weights = torch.softmax((double[1] @ double[0]) * 3 / (math.sqrt(7) * norms), dim=1)
    expected = (weights.unsqueeze(2) * double[1]).sum(dim=1)
    close(ours, expected)
    weight = drawn(9, 7, seed=3)
    mine = torch.autograd.grad((ours * weight).sum(), (mu, x))
    for gradient, theirs in zip(
        mine, torch.autograd.grad((expected * weight).sum(), double), strict=True
    ):
        close(gradient, theirs)


@pytest.mark.parametrize("layout", ["rows", "channels last", "cut out"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [[(5, 6)], [(5, 6), (3, 4), (1, 1), (2, 6)], [(4, 5)]])
def test_candidates_are_max_pooled_maps(kernels, threads, layout, dtype, sizes):
    maps = drawn(9, 7, 5, 6, seed=0).to(dtype)
    if layout == "channels last":
        maps = maps.contiguous(memory_format=torch.channels_last)
    if layout == "cut out":
        maps = F.pad(maps, (1, 1, 1, 1))[:, :, 1:-1, 1:-1]
    patches, norms = operations().derive_candidates(maps, sizes, torch.float32)
    expected = [F.adaptive_max_pool2d(maps.double(), s).flatten(2).mT for s in sizes]
    for mine, theirs in zip(patches, expected, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine.double(), theirs)
    close(norms, torch.cat([x.norm(dim=2) for x in expected], dim=1))


@pytest.mark.parametrize("turned", [(2, 3), (3, 2)])
def test_a_side_of_one_may_have_any_stride(kernels, turned):
    maps = drawn(4, 9, 1, 5, seed=0).permute(0, 1, *turned)
    patches, norms = operations().derive_candidates(maps, [tuple(maps.shape[2:])], torch.float32)
    assert torch.equal(patches[0], maps.flatten(2).mT)
    close(norms, maps.flatten(2).double().norm(dim=1))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_precision_of_pytorch_does_not_matter(default):
    config, block = make_maps("cnn", 40, torch.float16)
    theta, mu = drawn(40, seed=0).requires_grad_(), drawn(40, seed=1)

    def gradient() -> Tensor:
        pooled = pool_patches(theta, prepare(block, config))
        return torch.autograd.grad(pool_candidates(mu, pooled, config).sum(), theta)[0]

    expected = gradient()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(gradient(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_that_are_none_are_not_hidden(kernels):
    config, block = make_maps("cnn", 7, torch.float32)
    theta = torch.full((7,), math.nan)
    assert pool_patches(theta, prepare(block, config)).isnan().all()


def test_gradients_of_any_layout():
    config = BlockConfig(channels=7, heads=1, grid=(2, 2), token=False, tau=3.0)
    x, weight = drawn(9, 4, 7, seed=1).requires_grad_(), drawn(7, 9, seed=2)
    mu = drawn(7, seed=0).requires_grad_()
    turned = (pool_candidates(mu, x, config).T.contiguous() * weight).sum()
    straight = (pool_candidates(mu, x, config) * weight.T).sum()
    for mine, expected in zip(
        torch.autograd.grad(turned, (mu, x)), torch.autograd.grad(straight, (mu, x)), strict=True
    ):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_become_single(dtype):
    config, block = make_maps("cnn", 7, dtype)
    maps = prepare(block, config).maps
    assert {x.dtype for x in maps} == {torch.float32}


def test_half_precision_patches_are_those_of_single_precision():
    config, block = make_maps("cnn", 40, torch.float16)
    half = prepare(block, config)
    single = prepare(Block(map=block.map.float()), config)
    assert torch.equal(half.scale, single.scale)
    for mine, theirs in zip(half.maps, single.maps, strict=True):
        assert mine.dtype == torch.float16
        assert torch.equal(mine.float(), theirs)


def test_images_of_zeros_are_no_harm(kernels):
    config, block = make_maps("cnn", 7, torch.float32)
    block.map[0] = 0
    theta = drawn(7, seed=0).requires_grad_()
    pooled = pool_patches(theta, prepare(block, config))
    vectors = pool_candidates(drawn(7, seed=1), pooled, config)
    (gradient,) = torch.autograd.grad(vectors.sum(), theta)
    assert vectors.isfinite().all()
    assert gradient.isfinite().all()
    assert (vectors[0] == 0).all()
