"""Compiled kernels against the formulas in double precision, and what must hold in any case."""

import itertools
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.blocks import Block
from mivhead.features import Features
from mivhead.head.bags import Bags
from mivhead.head.config import RECIPES, BlockConfig, Recipe, resolve_blocks
from mivhead.head.head import MIVHead
from mivhead.head.pooling import derive_candidates, pool_candidates, pool_patches, prepare
from mivhead.head.projection import in_place, project
from mivhead.head.training import loss_and_gradients
from mivhead.kernels import library
from mivhead.kernels.cap import KINDS, CapCosine, Setting
from mivhead.kernels.library import serves
from mivhead.preset import BlockPreset

STARTS = torch.tensor([0, 3, 4, 9, 11])  # 3, 1, 5 and 2 shots
SUPPORT, CHANNELS, HEADS = 11, 24, 4


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor) -> None:
    scale = max(0.1, float(expected.detach().abs().max()))
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-5 * scale)


def inputs(queries: int, gated: bool) -> list[Tensor | None]:
    """Keys, values and gates of queries; keys and values of shots."""
    of_queries = [drawn(queries, CHANNELS, seed=s) for s in range(3)]
    of_shots = [drawn(SUPPORT, CHANNELS, seed=s) for s in (3, 4)]
    n = min(queries, SUPPORT)
    of_queries[0][:n] = of_shots[0][:n]  # |x - y| has no slope where a query is a shot itself
    return [*of_queries[:2], of_queries[2].sigmoid() if gated else None, *of_shots]


def hidden_shots(queries: int) -> Tensor:
    return torch.tensor([0, 1, 2, -1, 4, 5, 6, 7, 8, *[-1] * queries][:queries])


def plain_cosines(key, value, gate, shot_key, shot_value, hidden, setting: Setting) -> Tensor:
    """Query by query and class by class."""
    d, rows = CHANNELS // HEADS, []
    for q in range(len(key)):
        prototypes = []
        for start, end in itertools.pairwise(STARTS.tolist()):
            seen = [i for i in range(start, end) if hidden is None or i != int(hidden[q])]
            parts = []
            for part in (slice(h * d, (h + 1) * d) for h in range(HEADS)):
                y, z, w = key[q, part], shot_key[seen][:, part], shot_value[seen][:, part]
                scores = {
                    "uniform": torch.zeros(len(seen), dtype=key.dtype),
                    "l1": (y - z).abs().sum(dim=1),
                    "dot": z @ y,
                }[setting.attention]
                weights = torch.softmax(setting.factor * scores, dim=0)
                pooled = weights @ w
                if gate is not None:
                    pooled = pooled * gate[q, part]
                parts.append(pooled + weights @ z if setting.skip else pooled)
            prototypes.append(torch.cat(parts))
        mean = sum(prototypes) / len(prototypes) if setting.centred else 0
        vector = value[q] if gate is None else value[q] * gate[q]
        vector = (vector + key[q] if setting.skip else vector) - mean
        cosines = [F.cosine_similarity(vector, p - mean, dim=0) for p in prototypes]
        rows.append(torch.stack(cosines))
    return torch.stack(rows)


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("hiding", [True, False])
def test_cosines_with_prototypes_and_their_gradients(attention, skip, gated, centred, hiding):
    queries = 37  # no multiple of the lanes of a vector
    setting = Setting(HEADS, attention, -0.3 if attention == "l1" else 0.4, skip, centred, 1e-12)
    hidden = hidden_shots(queries) if hiding else None
    given = inputs(queries, gated)
    single = [None if t is None else t.clone().requires_grad_() for t in given]
    double = [None if t is None else t.double().requires_grad_() for t in given]
    ours = CapCosine.apply(*single, STARTS, hidden, setting)
    plain = plain_cosines(*double, hidden, setting)
    close(ours, plain)
    weight = drawn(*ours.shape, seed=5)
    (ours * weight).sum().backward()
    (plain * weight).sum().backward()
    for mine, theirs in zip(single, double, strict=True):
        if mine is not None:
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            close(mine.grad, expected)


def test_cosines_on_any_number_of_threads(threads):
    setting = Setting(HEADS, "l1", -0.3, True, True, 1e-12)
    given = [t.requires_grad_() for t in inputs(50, gated=True)]
    ours = CapCosine.apply(*given, STARTS, None, setting)
    close(ours, plain_cosines(*(t.double() for t in given), None, setting))
    gradients = torch.autograd.grad(ours.sum(), given)
    torch.set_num_threads(1)
    alone = CapCosine.apply(*given, STARTS, None, setting)
    assert torch.equal(ours, alone)
    for mine, expected in zip(gradients, torch.autograd.grad(alone.sum(), given), strict=True):
        close(mine, expected.double())


def test_a_query_does_not_see_other_queries():
    setting = Setting(HEADS, "l1", -0.3, True, True, 1e-12)
    *of_queries, shot_key, shot_value = inputs(37, gated=True)
    together = CapCosine.apply(*of_queries, shot_key, shot_value, STARTS, None, setting)
    for q in range(37):
        single = [t[q : q + 1] for t in of_queries]
        alone = CapCosine.apply(*single, shot_key, shot_value, STARTS, None, setting)
        assert torch.equal(alone[0], together[q])


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
    assert serves(mu, x) == kernels
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
    patches, norms = derive_candidates(maps, sizes, torch.float32)
    expected = [F.adaptive_max_pool2d(maps.double(), s).flatten(2).mT for s in sizes]
    for mine, theirs in zip(patches, expected, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine.double(), theirs)
    close(norms, torch.cat([x.norm(dim=2) for x in expected], dim=1))


@pytest.mark.parametrize("turned", [(2, 3), (3, 2)])
def test_a_side_of_one_may_have_any_stride(kernels, turned):
    maps = drawn(4, 9, 1, 5, seed=0).permute(0, 1, *turned)
    patches, norms = derive_candidates(maps, [tuple(maps.shape[2:])], torch.float32)
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


def test_projections_leave_gradients_alone_unless_told():
    norm, layer = nn.LayerNorm(5), nn.Linear(5, 5)
    x = drawn(3, 5, seed=0).requires_grad_()
    project(norm, [layer], x)[1].sum().backward()
    before = layer.weight.grad.clone()
    (again,) = torch.autograd.grad(project(norm, [layer], x)[1].sum(), layer.weight)
    assert torch.equal(again, before)
    assert torch.equal(layer.weight.grad, before)
    with in_place():
        project(norm, [layer], x)[1].sum().backward()
    torch.testing.assert_close(layer.weight.grad, 2 * before)


def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path):
    copied = tmp_path / "libkernels.so"
    shutil.copy(library.PATH, copied)  # without the sources beside it
    monkeypatch.setattr(library, "PATH", copied)
    library.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Install mivhead again"):
            assert library.library() is None
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        monkeypatch.setattr(library, "PATH", broken)
        library.library.cache_clear()
        with pytest.warns(UserWarning, match="not of this version"):
            assert library.library() is None
    finally:
        library.library.cache_clear()


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


HEADS_TO_TRY = {
    "paper": Recipe(),
    "mivhead": RECIPES["mivhead"],
    "dot product": Recipe(attention="dot", self_mask=True),
    "no cross-attention": Recipe(cross_attention=False),
    "no skip": Recipe(skip=False),
    "no co-excitation": Recipe(co_excitation=False),
    "not centred": Recipe(centred=False),
    "means": Recipe(prototype="mean"),
}


@pytest.mark.parametrize("recipe", HEADS_TO_TRY.values(), ids=HEADS_TO_TRY)
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 0, 2]], ids=["even", "uneven"])
@pytest.mark.parametrize("form", ["cnn", "vit"])
def test_a_step_equals_that_in_double_precision(recipe, labels, form):
    token = drawn(9, 24, seed=1) if form == "vit" else None
    blocks = (Block(drawn(9, 16, 4, 4, seed=0)), Block(drawn(9, 24, 2, 2, seed=2), token))
    features = Features(blocks)
    presets = (BlockPreset((3, 2), form=form, tau=3.0), BlockPreset(form=form, tau=3.0))
    configs = resolve_blocks(features, presets)
    bags = Bags.from_labels(torch.tensor(labels), 3)
    sources = torch.tensor([*range(6), 0, 3, 3])
    everything = torch.tensor(labels)[sources]
    found = []
    for dtype in (torch.float32, torch.float64):
        head = MIVHead(configs, recipe, torch.Generator().manual_seed(0)).to(dtype)
        for layer in head.layers:
            for name in ("theta", "mu"):
                if (vector := getattr(layer.pooling, name)) is not None:
                    vector.data = drawn(len(vector), seed=7).to(dtype)
        candidates = [
            prepare(block, layer.config, dtype)
            for block, layer in zip(blocks, head.layers, strict=True)
        ]
        hidden = sources if recipe.self_mask else None
        loss = loss_and_gradients(head, candidates, everything, bags, hidden)
        found.append((loss, [p.grad for p in head.parameters()]))
    (ours, gradients), (loss, expected) = found
    assert ours == pytest.approx(loss, rel=1e-5)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            close(mine, theirs)
