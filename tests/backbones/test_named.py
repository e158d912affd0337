"""The names that users know, held against the registries of the libraries that carry them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mivhead.backbones import list_backbones, load_backbone
from mivhead.backbones.preset import near_usual_size, spread_taps
from mivhead.backbones.presets import FACTS, NAMED, PAPER, PRESETS
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos

timm = pytest.importorskip("timm", reason="the extra timm is not installed")

TIMM = {name: spec.removeprefix("timm:") for name, spec in NAMED.items() if "timm:" in spec}
OPEN_CLIP = {name: spec.partition(":")[2] for name, spec in NAMED.items() if name not in TIMM}
# Where timm carries the image tower of a model of OpenCLIP: its registry knows the licence.
TWINS = {
    "clip_vitb32": "vit_base_patch32_clip_quickgelu_224.openai",
    "clip_vitb16": "vit_base_patch16_clip_quickgelu_224.openai",
    "openclip_vitb32": "vit_base_patch32_clip_224.laion2b",
    "openclip_vitb16": "vit_base_patch16_clip_224.laion2b",
    "openclip_vitl14": "vit_large_patch14_clip_224.laion2b",
    "siglip2_base": "vit_base_patch16_siglip_224.v2_webli",
    "siglip2_large": "vit_large_patch16_siglip_256.v2_webli",
    "siglip2_so400m": "vit_so400m_patch14_siglip_224.v2_webli",
    "pe_core_tiny": "vit_pe_core_tiny_patch16_384.fb",
    "pe_core_small": "vit_pe_core_small_patch16_384.fb",
    "pe_core_base": "vit_pe_core_base_patch16_224.fb",
    "pe_core_large": "vit_pe_core_large_patch14_336.fb",
    "mobileclip2_s0": "fastvit_mci0.apple_mclip2_dfndr2b",
    "mobileclip2_s2": "fastvit_mci2.apple_mclip2_dfndr2b",
}
LIGHT = 120  # megabytes: what a quick test builds


def megabytes(state: dict[str, torch.Tensor]) -> int:
    return round(sum(each.numel() * each.element_size() for each in state.values()) / 1e6)


def sizes(names: Any) -> list[Any]:
    """Parameters of a test; the large backbones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow if FACTS[n].megabytes > LIGHT else ()) for n in names]


def test_all_names_have_facts() -> None:
    assert set(FACTS) == {*NAMED, *PAPER, *PRESETS} == set(list_backbones())


@pytest.mark.parametrize("name", TIMM)
def test_facts_of_timm(name: str) -> None:
    config = timm.get_pretrained_cfg(TIMM[name])
    assert TIMM[name] in timm.list_pretrained()
    assert config.license == FACTS[name].licence
    assert config.hf_hub_id == f"timm/{TIMM[name]}"
    with torch.device("meta"):
        assert megabytes(timm.create_model(TIMM[name]).state_dict()) == FACTS[name].megabytes


@pytest.mark.parametrize("name", [n for n, each in PAPER.items() if each.on_hub])
def test_facts_of_the_papers_backbones(name: str) -> None:
    model = PAPER[name].model
    assert timm.get_pretrained_cfg(model).license == FACTS[name].licence
    with torch.device("meta"):
        assert megabytes(timm.create_model(model).state_dict()) == FACTS[name].megabytes


@pytest.mark.parametrize("name", OPEN_CLIP)
def test_facts_of_open_clip(name: str) -> None:
    open_clip = pytest.importorskip("open_clip", reason="the extra open-clip is not installed")
    if name == "bioclip2":
        assert OPEN_CLIP[name] == "imageomics/bioclip-2"  # on the hub, not in the registry
        return
    model, _, tag = OPEN_CLIP[name].partition("/")
    assert (model, tag) in open_clip.list_pretrained()
    assert open_clip.pretrained.get_pretrained_cfg(model, tag)["hf_hub"].count("/") == 2
    if name in TWINS:
        twin = timm.get_pretrained_cfg(TWINS[name])
        assert twin.license == FACTS[name].licence
        found = open_clip.pretrained.get_pretrained_cfg(model, tag)
        assert (tuple(found["mean"]), tuple(found["std"])) == (twin.mean, twin.std)
        assert open_clip.get_model_config(model)["vision_cfg"]["image_size"] == twin.input_size[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN_CLIP)
def test_size_of_open_clip(name: str) -> None:
    open_clip = pytest.importorskip("open_clip", reason="the extra open-clip is not installed")
    model = "ViT-L-14" if name == "bioclip2" else OPEN_CLIP[name].partition("/")[0]
    built = open_clip.create_model(model, device="meta", load_weights=False)
    assert megabytes(built.state_dict()) == FACTS[name].megabytes


@pytest.mark.parametrize("name", sizes(TIMM))
def test_every_name_of_timm_is_tapped(name: str) -> None:
    # Random weights may give values that are too large for float16.
    backbone = load_backbone(name, weights="random", device="cpu", dtype="float32")
    config = timm.get_pretrained_cfg(TIMM[name])
    preprocessing = backbone.preset.preprocessing
    assert (preprocessing.mean, preprocessing.std) == (config.mean, config.std)
    assert 224 <= preprocessing.size <= 256
    features = backbone.extract(photos(1))
    is_vit = "patch" in TIMM[name]
    depth = 24 if "large" in name else 12
    expected = spread_taps([f"blocks.{i}" for i in range(depth)])
    assert not is_vit or backbone.preset.taps == expected
    # All of these ViTs have [CLS]; none of these CNNs has any token.
    assert all((block.token is not None) == is_vit for block in features.blocks)
    assert backbone.identity.name == f"{name} (random weights)"


@pytest.mark.parametrize("name", sizes(OPEN_CLIP))
def test_every_name_of_open_clip_is_tapped(name: str) -> None:
    pytest.importorskip("open_clip", reason="the extra open-clip is not installed")
    backbone = load_backbone(name, weights="random", device="cpu", dtype="float32")
    assert 224 <= backbone.preset.preprocessing.size <= 256
    assert backbone.preset.taps[-1] == "embedding"
    assert backbone.preset.blocks[-1].pooled
    features = backbone.extract(photos(1))
    assert all(block.map is not None for block in features.blocks[:-1])
    has_token = not name.startswith(("siglip2", "mobileclip2_s"))
    assert all((block.token is not None) == has_token for block in features.blocks[:-1])


def test_conformance_of_a_name() -> None:
    check(load_backbone("mobilenetv4_small", weights="random", device="cpu"))


def test_another_input_size() -> None:
    backbone = load_backbone("dinov3_small", weights="random", image_size=64, device="cpu")
    assert backbone.extract(photos(1)).layout["block3.map"] == (384, 4, 4)
    with pytest.raises(InputError, match="fixed input size: leave out image_size=64"):
        load_backbone("resnet50", weights="random", image_size=64)


def test_missing_weights_name_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("MIV_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with pytest.raises(NotAvailableError, match=r"`miv backbones download dinov2_small`, or give"):
        load_backbone("dinov2_small")
    if pytest.importorskip("open_clip"):
        with pytest.raises(NotAvailableError, match=r"`miv backbones download siglip2_base`"):
            load_backbone("siglip2_base")


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(InputError, match="did you mean 'dinov3_small'"):
        load_backbone("dinov3_smal")


def test_an_unknown_tag_of_a_vit() -> None:
    with pytest.raises(InputError, match=r"timm has no weights .*: known .* are lvd142m"):
        load_backbone("timm:vit_small_patch14_dinov2.lvd143m")


def test_weights_of_another_architecture(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    save_file({"blocks.0.norm1.weight": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="is not a checkpoint of dinov2_small: it lacks"):
        load_backbone("dinov2_small", weights=tmp_path / "other.safetensors")


@pytest.mark.parametrize(("depth", "expected"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3])])
def test_taps_of_shallow_networks(depth: int, expected: list[int]) -> None:
    assert list(map(int, spread_taps(list(map(str, range(depth)))))) == expected
    assert np.isclose(near_usual_size(512, 32) / 32, 7)
