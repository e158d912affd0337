"""GFLOPs: matrix products against counters of PyTorch and NumPy, the rest by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mivhead import Features
from mivhead.backbones import from_module
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.benchmark.gflops import count, measure_backbone
from mivhead.classifier import MIVClassifier
from mivhead.head.recipe import Recipe
from mivhead.methods.base import pooled
from mivhead.methods.cost import BackboneWork, TaskSize, Work
from mivhead.methods.registry import METHODS, make_method
from tests.helpers.products import Counted, count_products

LABELS = [0, 0, 0, 1, 1, 2, 2, 2]
VIEWS = [0, 1, 3, 3, 7]  # the shots they are made of
SIZE = TaskSize((3, 2, 3), (2, 2, 1))


def matrix_vector(a, b, *, out_shape, **_):
    return 2 * math.prod(a)


def added_matrix_vector(c, a, b, *, out_shape, **_):
    return 2 * math.prod(a)


def added_matrices(c, a, b, *, out_shape, **_):
    return 2 * math.prod(a) * b[1]


def executed(fit) -> float:
    """Multiply-adds of matrix products, as PyTorch counts them; it forgets some."""
    forgotten = {
        torch.ops.aten.addmm_: added_matrices,
        torch.ops.aten.mv: matrix_vector,
        torch.ops.aten.addmv: added_matrix_vector,
        torch.ops.aten.addmv_: added_matrix_vector,
    }
    counter = FlopCounterMode(display=False, custom_mapping=forgotten)
    with counter:
        fit()
    return counter.get_total_flops() / 2


@pytest.fixture(scope="module")
def features() -> Features:
    rng = np.random.default_rng(0)
    maps = [rng.normal(size=(13, c, 6, 6)).astype(np.float32) for c in (16, 24)]
    token = rng.normal(size=(13, 24)).astype(np.float32)
    return Features([maps[0], {"map": maps[1], "token": token}])


def fit(name: str, features: Features, **params):
    classifier = make_method(name, random_state=0, **params)
    return lambda: classifier.fit(features[:8], LABELS, views=features[8:], view_of=VIEWS)


@pytest.fixture
def counted(monkeypatch):
    """Methods on pooled features get arrays whose products are counted."""
    monkeypatch.setattr("mivhead.methods.base.pooled", lambda x: pooled(x).view(Counted))


def products_of(monkeypatch, name: str, features: Features, **params) -> float:
    """What `count` takes for matrix products, without the rest."""
    monkeypatch.setattr("mivhead.benchmark.gflops._cost", lambda work, frozen: work)
    recipe = params.pop("recipe", None)
    work = count(name, features, SIZE, None, params=params, recipe=recipe)
    assert isinstance(work, Work)
    return work.products


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.needs == "images"])
def test_tuning_is_counted_for_the_steps_that_it_trains(name, features):
    def counted(**params):
        return count(name, features, SIZE, BackboneWork(4e6, 1e6, 1e6), params=params)

    own = make_method(name).steps
    assert counted() == counted(steps=own)
    assert counted(steps=2 * own).gflops == pytest.approx(2 * counted().gflops)
    assert counted(steps=2 * own).gflops_paper == pytest.approx(2 * counted().gflops_paper)


class PlainHead(nn.Module):
    """One block of the MIV-head as the paper writes it, without any trick; 2 shots a class."""

    def __init__(self, channels: int, *, skip=True, gate=True, attention=True) -> None:
        super().__init__()
        self.theta, self.mu = (nn.Parameter(torch.zeros(channels)) for _ in range(2))
        self.norm = nn.LayerNorm(channels)
        self.value = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels) if attention else nn.Identity()
        self.gate = nn.Linear(channels, channels) if gate else None
        self.skip, self.attention = skip, attention

    def forward(self, candidates, classes: int):
        pooled = [
            torch.bmm(torch.softmax(x @ self.theta, dim=1)[:, None], x)[:, 0] for x in candidates
        ]
        stacked = torch.stack(pooled, dim=1)
        image = torch.bmm(torch.softmax(stacked @ self.mu, dim=1)[:, None], stacked)[:, 0]
        x = self.norm(image)
        k, v = self.key(x), self.value(x)
        g = 1 if self.gate is None else torch.sigmoid(self.gate(x))
        logits = []
        for c in range(classes):
            own = slice(2 * c, 2 * c + 2)
            if self.attention:
                scores = -(k[:, None] - k[None, own]).abs().sum(dim=-1)  # no matrix product
                weights = torch.softmax(scores, dim=1)
            else:
                weights = torch.full((1, 2), 0.5)
            prototype = (weights @ v[own]) * g + (weights @ k[own] if self.skip else 0)
            query = v * g + (k if self.skip else 0)
            logits.append((prototype * query).sum(dim=1))
        return torch.stack(logits, dim=1)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("miv", {}),
        ("miv-no-skip", {"skip": False}),
        ("miv-no-excitation", {"gate": False}),
        ("miv-no-attention", {"attention": False}),
    ],
)
def test_a_step_of_the_head_as_the_paper_writes_it(name, parts, monkeypatch):
    head = PlainHead(8, **parts)
    candidates = [torch.randn(10, 25, 8), torch.randn(10, 9, 8)]

    def step():
        head(candidates, 3).square().sum().backward()

    features = Features(np.ones((1, 8, 5, 5)))
    preset = Preset(("0",), (BlockPreset((3,), heads=1),))
    monkeypatch.setattr("mivhead.benchmark.gflops._cost", lambda work, frozen: work)
    size = TaskSize((2, 2, 2), (2, 2, 0))
    work = [
        count(name, features, size, None, preset=preset, recipe=Recipe.paper(steps=n))
        for n in (1, 2)
    ]
    assert work[1].products - work[0].products == pytest.approx(executed(step))


@pytest.mark.parametrize(
    "name", ["miv", "miv-gap", "miv-no-attention", "miv-blocks1", "miv-no-views"]
)
def test_our_head_does_little_more_than_it_must(name, features, monkeypatch):
    """The formulas in PyTorch pad bags."""
    few = Recipe.paper(steps=3)
    monkeypatch.setattr(MIVClassifier, "_on_device", True)  # whose products can be watched
    executes = executed(fit(name, features, recipe=few, device="cpu"))
    needed = products_of(monkeypatch, name, features, recipe=few)
    assert needed <= 1.1 * executes <= 1.6 * needed


@pytest.mark.parametrize(
    "name", ["ncc", "fit-protonets", "ridge", "knn", "simpleshot", "tip-adapter"]
)
@pytest.mark.usefixtures("counted")
def test_products_of_closed_heads(name, features, monkeypatch):
    expected = count_products(fit(name, features))
    assert products_of(monkeypatch, name, features) == pytest.approx(expected)


@pytest.mark.usefixtures("counted")
def test_products_of_a_ridge_with_more_images_than_channels(monkeypatch):
    narrow = Features(np.random.default_rng(0).normal(size=(13, 5)))
    expected = count_products(fit("ridge", narrow))
    assert products_of(monkeypatch, "ridge", narrow) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["baseline", "baseline++", "fit-lda", "fit-qda"])
@pytest.mark.parametrize("use_views", [False, True])
@pytest.mark.usefixtures("counted")
def test_products_of_trained_heads(name, use_views, features, monkeypatch):
    params = {"steps": 3, "use_views": use_views}
    expected = count_products(fit(name, features, **params))
    assert products_of(monkeypatch, name, features, **params) == pytest.approx(expected)


def test_one_block_by_hand():
    """A token alone: projections, L1 attention, prototypes, cosines; no Component 1."""
    features = Features(np.ones((1, 64)))
    size = TaskSize((2, 2), (4, 4))  # n = 12 pseudo-queries, 4 shots
    recipe = Recipe.paper(steps=1)
    cost = count("miv", features, size, None, recipe=recipe)
    projections = 3 * 3 * 12 * 64**2 + 3 * 4 * 64**2  # a step, and the support at the end
    prototypes = 3 * 2 * 12 * 4 * 64
    distances = 3 * 3 * 12 * 4 * 64
    cosines = 3 * 2 * 2 * 12 * 2 * 64
    expected = 2 * (projections + prototypes) + distances + cosines
    assert cost.gflops == pytest.approx(expected / 1e9)
    paper = 3 * (3 * 12 * 64**2 + 2 * 12 * 4 * 64)
    assert cost.gflops_paper == pytest.approx(paper / 2**30)


def test_the_backbone_passes_support_and_views_once(features):
    one = BackboneWork(1e9)
    difference = [
        count(name, features, SIZE, one).gflops - count(name, features, SIZE, None).gflops
        for name in ("miv", "miv-no-views", "ncc")
    ]
    assert difference == pytest.approx([2 * 13, 2 * 8, 2 * 8])  # views only where they are used


def test_logistic_counts_the_steps_it_took(features):
    def gflops(iterations):
        fitted = make_method("logistic")
        fitted.n_iter_ = iterations
        return count("logistic", features, SIZE, None, classifier=fitted).gflops

    assert gflops(20) - gflops(10) == pytest.approx(2 * 2 * 10 * 8 * 8 * 3 / 1e9)


def test_every_method_has_a_cost(features):
    for name in METHODS:
        cost = count(name, features, SIZE, BackboneWork(1e9, 5e8, 1e8))
        assert 0 < cost.gflops_paper < cost.gflops


class Attention(nn.Module):
    """One block of a ViT: attention and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.mix = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.mix(self.patches(x).flatten(2).transpose(1, 2)).chunk(3, dim=-1)
        return self.out(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)  # (n, 16, 32)


def test_a_backbone_is_counted_by_its_parts():
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.ReLU())
    settings = {"name": "tiny", "preprocessing": Preprocessing(size=32)}
    found = measure_backbone(from_module(convolutions, ["2"], **settings))
    spatial, point = 16 * 16 * 8 * 3 * 9, 16 * 16 * 8 * 8
    assert found == BackboneWork(spatial + point, spatial, 0)
    found = measure_backbone(from_module(Attention(), ["out"], **settings))
    attention = 2 * 16 * 16 * 32
    assert found == BackboneWork(16 * 32 * 3 * 64 + 16 * 32 * 128 + attention, 0, attention)


class BlackBox:
    preset = Preset(("0",), (BlockPreset(),), Preprocessing(size=8))

    def extract(self, images):
        return Features(np.zeros((len(images), 4), np.float32))


def test_nobody_knows_the_work_of_a_black_box():
    assert measure_backbone(BlackBox()) is None


def test_tuning_against_a_real_step():
    """Adapters beside frozen 3x3 convolutions: TSA's step, counted by PyTorch."""
    torch.manual_seed(0)
    frozen = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4))
    frozen.requires_grad_(False)
    adapters = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(4))
    x = torch.randn(6, 16, 8, 8)

    def step():
        y = x
        for conv, adapter in zip(frozen, adapters, strict=True):
            y = conv(y) + adapter(y)
        y.mean().backward()

    forward = 4 * 16 * 16 * 9 * 64  # an image
    features = Features(np.ones((1, 16)))
    cost = count(
        "tsa",
        features,
        TaskSize((3, 3), (0, 0)),
        BackboneWork(forward, forward),
        params={"steps": 1},
    )
    classify = 3 * (6 * 16 * 16 + 2 * 6 * 2 * 16)
    # The first layer's input needs no gradient; the rule takes it as the others.
    first = 6 * 64 * (16 * 16 * 9 + 16 * 16)
    assert cost.gflops == pytest.approx(2 * (executed(step) + first + classify) / 1e9)
