"""Tiny vision towers of transformers with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra transformers is absent")

SIZE, PATCH, WIDTH, DEPTH = 32, 8, 32, 3
SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": SIZE,
    "patch_size": PATCH,
}
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
PROCESSOR = {
    "do_center_crop": True,
    "crop_size": {"height": SIZE, "width": SIZE},
    "size": {"shortest_edge": SIZE + 4},
    "image_mean": MEAN,
    "image_std": STD,
    "rescale_factor": 1 / 255,
}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 50}


def clip() -> Any:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL))


def whole_clip() -> Any:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=SMALL)
    return transformers.CLIPModel(config)


def siglip() -> Any:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL))


def whole_siglip() -> Any:
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=SMALL)
    return transformers.SiglipModel(config)


def vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(**SMALL))


def vit_classifier() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL))


def dinov2() -> Any:
    return transformers.Dinov2Model(transformers.Dinov2Config(**SMALL))


def registers() -> Any:
    config = transformers.Dinov2WithRegistersConfig(**SMALL, num_register_tokens=4)
    return transformers.Dinov2WithRegistersModel(config)


def dinov3() -> Any:
    config = transformers.DINOv3ViTConfig(**SMALL, num_register_tokens=4)
    return transformers.DINOv3ViTModel(config)


def siglip2() -> Any:
    settings = {k: v for k, v in SMALL.items() if k != "image_size"} | {"num_patches": 16}
    config = transformers.Siglip2VisionConfig(**settings)
    return transformers.Siglip2VisionModel(config)


def dinov3_convnext() -> Any:
    config = transformers.DINOv3ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])
    return transformers.DINOv3ConvNextModel(config)


def save(make: Callable[[], Any], folder: Path, **settings: Any) -> Any:
    """Write a model with weights far from their initial ones, and its preprocessing."""
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **settings)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def hidden_states(model: Any, tower: str, x: torch.Tensor, *, norm: bool) -> list[torch.Tensor]:
    """What the library itself gives after each layer, before any final norm but ours."""
    inside = model.get_submodule(tower)
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        outputs = inside(pixel_values=x, output_hidden_states=True)
    states = outputs.hidden_states[1:]
    last = next(
        (m for k, m in inside.named_modules() if k.endswith("post_layernorm") or k == "layernorm"),
        None,
    )
    assert last is not None
    for state in states:
        with torch.no_grad():
            seen.append(last(state) if norm else state)
    if norm:  # the library's own result for the last block
        torch.testing.assert_close(seen[-1], outputs.last_hidden_state)
    return seen
