"""The head equals the paper's formulas written as plain loops, with every mechanism on and off."""

import dataclasses

import numpy as np
import pytest
import torch

from mivhead.backbones.preset import BlockPreset
from mivhead.features import Features
from mivhead.head.recipe import resolve_blocks
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.head import MIVHead
from mivhead_bench.head.logits import combine
from mivhead_bench.head.recipe import Ablation
from mivhead_bench.head.training import loss_and_gradients
from tests.helpers import oracle

LABELS = [0, 1, 0, 2, 1, 0]  # 3, 2 and 1 shots
CLASSES = 3

CNN = (BlockPreset((3, 2), tau=20.0, heads=2), BlockPreset((), tau=20.0, heads=1))
VIT = (
    BlockPreset((3, 2), native=False, form="vit", tau=20.0, heads=2),
    BlockPreset((), native=False, form="vit", tau=20.0, heads=2),
)
NO_TOKEN = (BlockPreset((3,), native=False, form="vit", tau=20.0, heads=4),)


def make_features(n: int, kind: str, seed: int) -> Features:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape)

    if kind == "cnn":
        return Features([normal(n, 8, 4, 5), normal(n, 6, 2, 2)])
    if kind == "no_token":
        return Features([normal(n, 8, 4, 4)])
    return Features([{"map": normal(n, 8, 4, 4), "token": normal(n, 8)} for _ in range(2)])


def make_head(features: Features, presets: tuple[BlockPreset, ...], recipe: Ablation) -> MIVHead:
    """A head whose parameters are all away from their start."""
    generator = torch.Generator().manual_seed(1)
    head = MIVHead(resolve_blocks(features, presets), recipe, generator)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "pooling" in name or "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return head.double()


def logits(head: MIVHead, query: Features, support: Features) -> np.ndarray:
    bags = Bags.from_labels(torch.tensor(LABELS), CLASSES)
    with torch.no_grad():
        q, s = head.embed(head.prepare(query)), head.embed(head.prepare(support))
        return combine(head(q, s, bags), head.recipe).numpy()


def expected_logits(head: MIVHead, query: Features, support: Features) -> np.ndarray:
    recipe = head.recipe
    rows = []
    for i in range(len(query)):
        per_block = []
        for b, layer in enumerate(head.layers):
            params = {k: v.numpy() for k, v in layer.cap.state_dict().items()}
            pooling = {k: v.numpy() for k, v in layer.pooling.state_dict().items()}
            config = dataclasses.asdict(layer.config)

            def vector(features: Features, row: int, b=b, c=config, p=pooling) -> np.ndarray:
                block = features.blocks[b]
                return oracle.image_vector(
                    None if block.map is None else block.map[row],
                    None if block.token is None else block.token[row],
                    c,
                    p.get("theta"),
                    p.get("mu"),
                )

            q = vector(query, i)
            prototypes, v_query = [], q
            for c in range(CLASSES):
                bag = [vector(support, s) for s, label in enumerate(LABELS) if label == c]
                if recipe.prototype == "mean":
                    prototypes.append(sum(bag) / len(bag))
                else:
                    p, v_query = oracle.cap(
                        q, bag, params, layer.config.heads, **dataclasses.asdict(recipe)
                    )
                    prototypes.append(p)
            centred = recipe.prototype == "cap" if recipe.centred is None else recipe.centred
            per_block.append(oracle.centred_cosine(v_query, prototypes, centred))
        rows.append(oracle.combine(per_block, recipe.temperature, recipe.temperature_order))
    return np.array(rows)


VARIANTS = {
    "paper": {},
    "temperature inside": {"temperature_order": "inside"},
    "dot product": {"attention": "dot", "eta": 1.0},
    "eta 0": {"eta": 0.0},
    "sharp attention": {"eta": 3.0},
    "no cross-attention": {"cross_attention": False},
    "no co-excitation": {"co_excitation": False},
    "no skip": {"skip": False},
    "nothing but values": {"cross_attention": False, "co_excitation": False, "skip": False},
    "mean instead of CAP": {"prototype": "mean"},
    "centred mean": {"prototype": "mean", "centred": True},
    "CAP not centred": {"centred": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kind", "presets"), [("cnn", CNN), ("vit", VIT), ("no_token", NO_TOKEN)])
def test_logits_equal_plain_loops(kind: str, presets: tuple, variant: str) -> None:
    support, query = make_features(len(LABELS), kind, 0), make_features(4, kind, 1)
    head = make_head(support, presets, Ablation.paper(**VARIANTS[variant]))
    np.testing.assert_allclose(
        logits(head, query, support), expected_logits(head, query, support), atol=1e-5
    )


def test_tau_zero_is_plain_averaging() -> None:
    features = make_features(3, "cnn", 0)
    presets = (BlockPreset((), tau=0.0), BlockPreset((), tau=0.0))
    head = make_head(features, presets, Ablation.paper())
    vectors = head.layers[0].pooling(head.prepare(features)[0])
    np.testing.assert_allclose(vectors.detach(), features.blocks[0].map.mean(axis=(2, 3)))


@pytest.mark.parametrize("variant", ["paper", "dot product", "no cross-attention", "no skip"])
def test_gradients_equal_finite_differences(variant: str) -> None:
    support = make_features(len(LABELS), "vit", 0)
    head = make_head(support, VIT, Ablation.paper(**VARIANTS[variant]))
    bags = Bags.from_labels(torch.tensor(LABELS), CLASSES)
    candidates, labels = head.prepare(support), torch.tensor(LABELS)
    loss_and_gradients(head, candidates, labels, bags)
    gradients = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()

    def loss() -> float:
        with torch.no_grad():
            embedded = head.embed(candidates)
            logits = combine(head(embedded, embedded, bags), head.recipe)
            return torch.nn.functional.cross_entropy(logits, labels).item()

    step = 1e-5
    generator = torch.Generator().manual_seed(0)
    for name, parameter in head.named_parameters():
        flat = parameter.detach().view(-1)
        for index in torch.randint(len(flat), (3,), generator=generator).tolist():
            start = flat[index].item()
            flat[index] = start + step
            up = loss()
            flat[index] = start - step
            down = loss()
            flat[index] = start
            expected = (up - down) / (2 * step)
            found = gradients[name].view(-1)[index].item() if name in gradients else 0.0
            assert found == pytest.approx(expected, abs=2e-6, rel=1e-4), name


def test_one_class_alone_gives_zero_logits_not_nan() -> None:
    support = make_features(3, "cnn", 0)
    head = make_head(support, CNN, Ablation.paper(temperature_order="inside"))
    bags = Bags.from_labels(torch.zeros(3, dtype=torch.long), 1)
    candidates = head.prepare(support)
    loss = loss_and_gradients(head, candidates, torch.zeros(3, dtype=torch.long), bags)
    assert loss == pytest.approx(0.0)
    assert all(torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None)


def test_parameter_counts_of_the_paper() -> None:
    def counts(channels: list[int], presets: list[BlockPreset], token: bool) -> tuple[int, int]:
        blocks = [
            {"map": np.zeros((1, c, 8, 8)), **({"token": np.zeros((1, c))} if token else {})}
            for c in channels
        ]
        head = MIVHead(resolve_blocks(Features(blocks), presets), Ablation.paper(), None)
        return tuple(
            sum(p.numel() for layer in head.layers for p in getattr(layer, part).parameters())
            for part in ("cap", "pooling")
        )

    cnn, single = BlockPreset((5,)), BlockPreset()
    pooled, cls = (BlockPreset(s, native=False, form="vit") for s in ((7,), ()))
    assert counts([1024, 2048], [cnn, cnn], False) == (15_744_000, 6_144)  # ResNet-50
    assert counts([256, 512], [cnn, cnn], False) == (986_880, 1_536)  # ResNet-34
    assert counts([128, 256, 512], [cnn, cnn, single], False) == (1_036_672, 1_280)  # ResNet-18
    vit_s = counts([384] * 4, [pooled, pooled, cls, cls], True)
    assert vit_s == (1_777_152, 1_536)
    assert counts([768] * 2, [pooled, cls], True) == (3_546_624, 1_536)  # ViT-B
    assert counts([1024] * 2, [pooled, pooled], True) == (6_301_696, 4_096)  # CLIP-L
