"""The names that users know, held against the registries of the libraries that carry them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mivhead.backbones import list_backbones, load_backbone
from mivhead.backbones.preset import near_usual_size, spread_taps
from mivhead.backbones.presets import FACTS, NAMED, PAPER, PRESETS
from mivhead.backbones.timm_models import hub_file
from mivhead.errors import NotAvailableError
from tests.helpers.conformance import photos

timm = pytest.importorskip("timm", reason="the extra timm is not installed")

TIMM = {name: spec.removeprefix("timm:") for name, spec in NAMED.items() if "timm:" in spec}
OPEN_CLIP = {name: spec.partition(":")[2] for name, spec in NAMED.items() if name not in TIMM}
LIGHT = 120  # megabytes: what a quick test builds


def megabytes(state: dict[str, torch.Tensor]) -> int:
    return round(sum(each.numel() * each.element_size() for each in state.values()) / 1e6)


def sizes(names: Any) -> list[Any]:
    """Parameters of a test; the large backbones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow if FACTS[n].megabytes > LIGHT else ()) for n in names]


def test_all_names_have_facts() -> None:
    assert set(FACTS) == {*NAMED, *PAPER, *PRESETS} == set(list_backbones())


def test_names_that_others_rely_on() -> None:
    names = (
        "efficientnet_lite0 resnet50 dino_resnet50 resnet34 resnet18 sdl_resnet18 deit_small "
        "dino_vits16 dino_vits8 deit_base dino_vitb16 densenet161 regnety_016 swin_base_simmim "
        "clip_vitl14 dinov2_small dinov3_small siglip2_base"
    )
    assert set(names.split()) <= set(list_backbones())


def test_facts_of_timm() -> None:
    on_hub = {name: paper.model for name, paper in PAPER.items() if paper.on_hub}
    for name, model in (TIMM | on_hub).items():
        config = timm.get_pretrained_cfg(model)
        assert config.license == FACTS[name].licence
        assert hub_file(model) == (config.hf_hub_id, "model.safetensors")
        with torch.device("meta"):
            assert megabytes(timm.create_model(model).state_dict()) == FACTS[name].megabytes


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
    assert not is_vit or backbone.preset.taps == spread_taps([f"blocks.{i}" for i in range(12)])
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
    has_token = not name.startswith(("siglip2", "mobileclip2"))
    for block in features.blocks[:-1]:
        assert block.map is not None
        assert (block.token is not None) == has_token


@pytest.mark.parametrize("name", ["dinov2_small", "siglip2_base"])
def test_weights_that_cannot_be_had(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("open_clip")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(NotAvailableError, match="no connection"):
        load_backbone(name)


def test_usual_taps_and_sizes() -> None:
    assert spread_taps("ab") == ("a", "b")
    assert [near_usual_size(*case) for case in ((518, 14), (256, 16), (512, 32))] == [224, 256, 224]
