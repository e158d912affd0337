"""The presets of the paper's backbones: settings, shapes, activations, parameter counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from mivhead import Features, MIVClassifier, Recipe
from mivhead.backbones import list_backbones, load_backbone
from mivhead.backbones.base import preprocess
from mivhead.backbones.preset import derive_presets
from mivhead.backbones.presets import PAPER
from mivhead.backbones.timm_models import build
from mivhead.head.recipe import resolve_blocks
from mivhead_bench.head.head import MIVHead
from mivhead_bench.methods.base import pooled
from tests.helpers.conformance import photos

timm = pytest.importorskip("timm", reason="the extra timm is not installed")


@dataclass(frozen=True)
class Expected:
    """What the paper and its authors' code have, in their own terms (`n` is the native map)."""

    layout: list[tuple[int, ...]]  # channels, side
    candidates: list[str]  # shallow to deep
    tau: int
    heads: list[int]
    threshold: int
    size: int = 224
    token: bool = False
    parameters: tuple[int, int] | None = None  # Component 2, Component 1


RESNET = ["n 13 11 9 8", "n 6 5 4"]
VIT_S = {"tau": 200, "heads": [6] * 4, "token": True, "parameters": (1_777_152, 1_536)}
VIT_B = {"tau": 200, "heads": [12] * 2, "token": True, "parameters": (3_546_624, 1_536)}
WIDE = [(1024, 14), (2048, 7)]

EXPECTED = {
    "resnet50": Expected(WIDE, RESNET, 500, [16, 32], 15, parameters=(15_744_000, 6_144)),
    # Its third block is the paper's ablation; the sizes there are ours, as the paper has none.
    "resnet50_3blocks": Expected(
        [(512, 28), *WIDE], ["n 26 22 18 16", *RESNET], 500, [8, 16, 32], 15
    ),
    "dino_resnet50": Expected(WIDE, RESNET, 500, [16, 32], 15, parameters=(15_744_000, 6_144)),
    "resnet34": Expected(
        [(256, 14), (512, 7)], RESNET, 500, [4, 8], 30, parameters=(986_880, 1_536)
    ),
    "resnet18": Expected(
        [(128, 11), (256, 6), (512, 3)],
        ["n 10 9 8 7", "n 5 4", "n"],
        500,
        [2, 4, 8],
        30,
        size=84,
        parameters=(1_036_672, 1_280),
    ),
    "sdl_resnet18": Expected(
        [(256, 11), (512, 6)], ["n 10 9 8 7", "n 5 4 3"], 500, [4, 8], 30, size=84
    ),
    "deit_small": Expected([(384, 14)] * 4, ["13 10", "7", "", ""], threshold=20, **VIT_S),
    "dino_vits16": Expected([(384, 14)] * 4, ["13 10", "7", "", ""], threshold=20, **VIT_S),
    "dino_vits8": Expected([(384, 28)] * 4, ["24 20 16", "12 8", "", ""], threshold=15, **VIT_S),
    "deit_base": Expected([(768, 14)] * 2, ["14 10 7", ""], threshold=30, **VIT_B),
    "dino_vitb16": Expected([(768, 14)] * 2, ["14 10 7", ""], threshold=30, **VIT_B),
    "densenet161": Expected([(2112, 14), (2208, 7)], ["n 11 9", "n 5"], 500, [32, 32], 15),
    "regnety_016": Expected([(336, 14), (888, 7)], RESNET, 500, [8, 24], 20),
    "swin_base_simmim": Expected([(1024, 7), (1024, 7)], ["7", "4"], 200, [16, 32], 20),
    "clip_vitl14": Expected(
        [(1024, 16)] * 2,
        ["15 11", "7"],
        200,
        [16, 16],
        20,
        token=True,
        parameters=(6_301_696, 4_096),
    ),
}
BIG = {"deit_base", "dino_vitb16", "densenet161", "swin_base_simmim", "clip_vitl14"}
# The same architecture and preset as another, which is built here.
TWINS = {"dino_resnet50": "resnet50", "dino_vits16": "deit_small", "dino_vitb16": "deit_base"}


def names() -> list[object]:
    """All that are built, the big ones marked as slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in BIG else name
        for name in EXPECTED
        if name not in TWINS
    ]


def test_every_name_of_the_paper_is_there() -> None:
    assert set(EXPECTED) == set(PAPER)
    assert set(EXPECTED) < set(list_backbones())


@pytest.mark.parametrize("name", EXPECTED)
def test_settings(name: str) -> None:
    preset, expected = PAPER[name].preset, EXPECTED[name]
    own = [b for b in preset.blocks if not b.pooled]
    found = [" ".join(["n"] * b.native + [str(s) for s in b.pool_sizes]) for b in own]
    assert found == expected.candidates
    assert {b.tau for b in preset.blocks} == {float(expected.tau)}
    assert {b.form for b in preset.blocks} == {"cnn" if expected.tau == 500 else "vit"}
    assert preset.threshold == expected.threshold
    assert preset.preprocessing.size == expected.size
    assert preset.preprocessing.mean == (0.485, 0.456, 0.406)
    assert preset.preprocessing.std == (0.229, 0.224, 0.225)


@pytest.mark.parametrize(("name", "twin"), TWINS.items())
def test_twins_differ_in_their_weights_alone(name: str, twin: str) -> None:
    with torch.device("meta"):
        mine, theirs = (timm.create_model(PAPER[n].model, num_classes=0) for n in (name, twin))
    assert repr(mine) == repr(theirs)
    assert PAPER[name].preset == PAPER[twin].preset


@pytest.mark.parametrize("name", names())
def test_shapes_and_head(name: str) -> None:
    backbone = load_backbone(name, weights="random", device="cpu", dtype="float32")
    features, expected = backbone.extract(photos(4)), EXPECTED[name]
    layout = [(c, s, s) for c, s in expected.layout]
    assert [tuple(b.map.shape[1:]) for b in features.blocks if b.map is not None] == layout
    own = [b for b, p in zip(features.blocks, backbone.preset.blocks, strict=True) if not p.pooled]
    tokens = [tuple(b.token.shape[1:]) for b in own if b.token is not None]
    assert tokens == ([(c,) for c, _ in expected.layout] if expected.token else [])

    blocks = resolve_blocks(features, backbone.preset.blocks)
    assert [block.heads for block in blocks if not block.pooled] == expected.heads
    if expected.parameters is not None:
        head = MIVHead(blocks, Recipe.paper(), None)
        second = sum(p.numel() for layer in head.layers for p in layer.cap.parameters())
        first = sum(p.numel() for layer in head.layers for p in layer.pooling.parameters())
        assert (second, first) == expected.parameters
    classifier = MIVClassifier(Recipe.paper(steps=2), backbone.preset)
    predicted = classifier.fit(features, ["a", "a", "b", "b"]).predict_proba(features)
    np.testing.assert_allclose(predicted.sum(axis=1), 1, rtol=1e-5)


def features_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The plain network and its input."""
    return build(name, "random").eval(), preprocess(photos(2), PAPER[name].preset.preprocessing)


def captured(model: nn.Module, x: torch.Tensor, layers: list[str]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name in layers:
        model.get_submodule(name).register_forward_hook(lambda *call: found.append(call[2].clone()))
    with torch.no_grad():
        model(x)
    return found


def close(found: np.ndarray | None, expected: torch.Tensor) -> None:
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18", "sdl_resnet18", "regnety_016"])
def test_cnn_activations_are_stage_outputs_after_relu(name: str) -> None:
    found = load_backbone(name, weights="random", device="cpu", dtype="float32").extract(photos(2))
    model, x = features_of(name)
    outputs = captured(model, x, list(PAPER[name].preset.taps))
    for block, output in zip(found.blocks, outputs, strict=True):
        close(block.map, output)
        assert output.min() == 0


def test_vit_activations_are_normed_in_every_block() -> None:
    found = load_backbone("deit_small", weights="random", device="cpu", dtype="float32").extract(
        photos(2)
    )
    model, x = features_of("deit_small")
    for block, tokens in zip(
        found.blocks, captured(model, x, [f"blocks.{i}" for i in (8, 9, 10, 11)]), strict=True
    ):
        with torch.no_grad():
            normed = model.norm(tokens)  # (n, 197, 384)
        close(block.token, normed[:, 0])
        close(block.map, normed[:, 1:].transpose(1, 2).reshape(2, 384, 14, 14))


def test_sdl_stem() -> None:
    model = build("sdl_resnet18", "random")
    assert [tuple(p.shape) for p in model.conv1.parameters()] == [(64, 3, 5, 5)]
    sides = [t.shape[-1] for t in captured(*features_of("sdl_resnet18"), ["conv1", "layer1"])]
    assert sides == [41, 41]  # of 84 px: no pooling behind the stem


@pytest.mark.slow
def test_densenet_activations_are_the_last_two_of_five() -> None:
    found = load_backbone("densenet161", weights="random", device="cpu", dtype="float32").extract(
        photos(2)
    )
    model, x = features_of("densenet161")
    plain = timm.create_model("densenet161", features_only=True).eval()
    plain.load_state_dict(
        {k.replace("features.", "features_", 1): v for k, v in model.state_dict().items()}
        if not set(plain.state_dict()) <= set(model.state_dict())
        else model.state_dict()
    )
    with torch.no_grad():
        *_, second_last, last = plain(x)
    close(found.blocks[0].map, second_last)
    close(found.blocks[1].map, last)


@pytest.mark.slow
def test_swin_activations_are_merged_and_normed() -> None:
    found = load_backbone(
        "swin_base_simmim", weights="random", device="cpu", dtype="float32"
    ).extract(photos(2))
    model, x = features_of("swin_base_simmim")
    stage3, stage4 = captured(model, x, ["layers.2", "layers.3"])
    assert stage3.shape == (2, 14, 14, 512)
    with torch.no_grad():
        merged = model.layers[3].downsample(stage3)  # (n, 7, 7, 1024)
        close(found.blocks[0].map, merged.permute(0, 3, 1, 2))
        close(found.blocks[1].map, model.norm(stage4).permute(0, 3, 1, 2))


@pytest.mark.slow
def test_clip_activations_are_raw() -> None:
    found = load_backbone("clip_vitl14", weights="random", device="cpu", dtype="float32").extract(
        photos(2)
    )
    model, x = features_of("clip_vitl14")
    states = captured(model, x, ["blocks.22", "blocks.23"])
    for block, tokens in zip(found.blocks[:2], states, strict=True):
        close(block.token, tokens[:, 0])
        close(block.map, tokens[:, 1:].transpose(1, 2).reshape(2, 1024, 16, 16))
    with torch.no_grad():
        close(found.blocks[2].token, model.norm(states[1])[:, 0])  # for heads on one vector
    assert found.blocks[2].map is None
    torch.testing.assert_close(pooled(found), found.blocks[2].token)


def test_random_weights_are_visible() -> None:
    backbone = load_backbone("resnet18", weights="random")
    assert backbone.identity.name == "resnet18 (random weights)"


FOLLOWS = {"resnet50", "dino_resnet50", "resnet34", "resnet18", "sdl_resnet18", "regnety_016"}
FOLLOWS |= {"deit_small", "dino_vits16"}


@pytest.mark.parametrize("name", EXPECTED)
def test_rule_for_unknown_backbones_gives_the_papers_lists_where_it_applies(name: str) -> None:
    expected = EXPECTED[name]
    shapes = [np.zeros((1, c, s, s), np.float32) for c, s in expected.layout]
    tokens = [{"token": m[:, :, 0, 0]} if expected.token else {} for m in shapes]
    features = Features([{"map": m, **t} for m, t in zip(shapes, tokens, strict=True)])
    derived = derive_presets(features)
    found = [" ".join(["n"] * b.native + [str(s) for s in b.pool_sizes]) for b in derived]
    assert (found == expected.candidates) == (name in FOLLOWS)
    heads = [block.heads for block in resolve_blocks(features, derived)]
    exceptions = {"densenet161": [33, 32], "regnety_016": [6, 12], "swin_base_simmim": [16, 16]}
    assert heads == exceptions.get(name, expected.heads)


@pytest.mark.parametrize("side", range(1, 40))
def test_derived_settings_always_fit_the_map(side: int) -> None:
    map_ = np.zeros((1, 8, side, side), np.float32)
    for features in (
        Features([map_]),
        Features([map_, map_]),
        Features([{"map": map_, "token": map_[:, :, 0, 0]}] * 3),
    ):
        for block in resolve_blocks(features):
            assert block.candidates
            assert list(block.pool_sizes) == sorted(set(block.pool_sizes), reverse=True)
            assert all(3 <= size < side for size in block.pool_sizes)
