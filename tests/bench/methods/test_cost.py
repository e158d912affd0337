"""GFLOPs: the head's formula against PyTorch's counter and by hand, and what the backbone adds."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mivhead import BlockPreset, Features, MIVClassifier, Preprocessing, Recipe
from mivhead.backbones import from_module
from mivhead_bench.methods import make_method
from mivhead_bench.methods.cost import GIGA, TaskSize, count, measure_backbone

SIZE = TaskSize((3, 2, 3), (2, 2, 1))
FEATURES = Features([np.ones((1, 16, 6, 6)), np.ones((1, 24, 6, 6))])


class PlainHead(nn.Module):
    """One block of the MIV-head as the paper writes it, without any trick; 2 shots a class."""

    def __init__(self, channels: int, *, skip=True, gate=True, attention=True) -> None:
        super().__init__()
        self.theta, self.mu = (nn.Parameter(torch.zeros(channels, 1)) for _ in range(2))
        self.norm = nn.LayerNorm(channels)
        self.value = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels) if attention else nn.Identity()
        self.gate = nn.Linear(channels, channels) if gate else None
        self.skip, self.attention = skip, attention

    def forward(self, candidates, classes: int):
        pooled = [torch.softmax(x @ self.theta, dim=1).mT @ x for x in candidates]
        stacked = torch.cat(pooled, dim=1)
        image = (torch.softmax(stacked @ self.mu, dim=1).mT @ stacked)[:, 0]
        x = self.norm(image)
        k, v = self.key(x), self.value(x)
        g = 1 if self.gate is None else torch.sigmoid(self.gate(x))
        logits = []
        for c in range(classes):
            shots = slice(2 * c, 2 * c + 2)
            if self.attention:
                scores = -(k[:, None] - k[None, shots]).abs().sum(dim=-1)  # no matrix product
                weights = torch.softmax(scores, dim=1)
            else:
                weights = torch.full((1, 2), 0.5)
            prototype = (weights @ v[shots]) * g + (weights @ k[shots] if self.skip else 0)
            query = v * g + (k if self.skip else 0)
            logits.append((prototype * query).sum(dim=1))
        return torch.stack(logits, dim=1)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("miv-paper", {}),
        ("miv-no-skip", {"skip": False}),
        ("miv-no-excitation", {"gate": False}),
        ("miv-no-attention", {"attention": False}),
    ],
)
def test_a_step_of_the_head_as_the_paper_writes_it(name, parts) -> None:
    head = PlainHead(8, **parts)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head([torch.randn(10, 25, 8), torch.randn(10, 9, 8)], 3)
    made = make_method(name, preset=[BlockPreset((3,), heads=1)], steps=2)
    size = TaskSize((2, 2, 2), (2, 2, 0))
    cost = count(made, Features(np.ones((1, 8, 5, 5))), size, None)
    assert cost.gflops_paper * GIGA == pytest.approx(3 * 2 * counter.get_total_flops() / 2)


def test_one_block_by_hand() -> None:
    """A token alone: projections, L1 attention, prototypes; no Component 1."""
    size = TaskSize((2, 2), (4, 4))  # n = 12 pseudo-queries, 4 shots
    cost = count(MIVClassifier(Recipe.paper(steps=1)), Features(np.ones((1, 64))), size, None)
    ours = 3 * (3 * 12 * 64**2 + 2 * 12 * 4 * 64)
    assert cost.gflops_paper == pytest.approx(ours / 2**30)
    # Queries are projected per class, and the support per query.
    authors = 3 * (3 * 2 * 12 * 64**2 + 2 * 12 * 4 * 64**2 + 12 * 4 * 64)
    assert cost.gflops_authors == pytest.approx(authors / 2**30)


def test_the_backbone_passes_support_and_views_once_and_tuned_in_every_step() -> None:
    added = {
        name: count(made := make_method(name), FEATURES, SIZE, GIGA).gflops_paper
        - count(made, FEATURES, SIZE, None).gflops_paper
        for name in ("miv", "ncc", "tsa", "ln-tune")
    }
    expected = {"miv": 13, "ncc": 13, "tsa": 3 * 40 * 13, "ln-tune": 3 * 20 * 13}
    assert added == pytest.approx(expected)


def test_the_default_recipe_has_two_more_heads_and_experts() -> None:
    rng, y = np.random.default_rng(0), np.repeat([0, 1, 2], 6)
    X = Features(rng.normal(size=(18, 64, 3, 3)))
    size = TaskSize((6, 6, 6), (0, 0, 0))
    made = {vote: MIVClassifier(Recipe(vote=vote)) for vote in ("logsumexp", "stacked", "experts")}
    head, stacked, none = (count(each, X, size, None).gflops_paper for each in made.values())
    assert 1.5 < stacked / head < 2.1  # two heads on half of the images each
    assert none == 0
    with_experts = count(made["experts"].fit(X, y), X, size, None).gflops_paper
    # 18 images: covariances, and of each expert a system, its inverse, and products with 3 classes
    lengths = [len(each.coefficients) for each in made["experts"].ensemble_.experts.ridges.values()]
    systems = [18 * d * min(18, d) + min(18, d) ** 3 + 18 * (d + min(18, d)) * 3 for d in lengths]
    assert with_experts * GIGA == pytest.approx(18 * 9 * 64**2 + sum(systems))


def test_a_backbone_is_counted_by_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.ReLU())
    size = Preprocessing(size=32)
    backbone = from_module(model, ["2"], name="tiny", preprocessing=size, device="cpu")
    assert measure_backbone(backbone) == 16 * 16 * 8 * 3 * 9 + 16 * 16 * 8 * 8
