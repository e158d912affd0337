"""A tiny text-and-image model of OpenCLIP, whose text tower can be taught names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

open_clip = pytest.importorskip("open_clip", reason="the extra open-clip is not installed")

MODEL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 32, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
PREPROCESSING = {"size": 32, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}
WEIGHTS = "open_clip_model.safetensors"
COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 60, 200),
    "yellow": (230, 210, 30),
}


def save_clip(folder: Path) -> Path:
    """Write a model with random weights in the format of the hub."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": MODEL, "preprocess_cfg": PREPROCESSING}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_file(model.state_dict(), folder / WEIGHTS)
    return folder


def teach(folder: Path, pictures: Mapping[str, list[Any]]) -> None:
    """Change the last layers of both towers, so that names lie where their pictures do."""
    from safetensors.torch import save_file

    from mivhead.backbones import load_backbone

    backbone = load_backbone(f"open_clip:{folder}", device="cpu", dtype="float32")
    found = [backbone.extract(each).blocks[-1].token for each in pictures.values()]
    means = torch.tensor(np.stack([np.mean(each, axis=0) for each in found]))
    common = torch.nn.functional.normalize(means.mean(0), dim=0)  # what all pictures share
    without = torch.eye(len(common)) - torch.outer(common, common)
    targets = means @ without
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(list(pictures))
    with torch.no_grad():
        model.visual.proj.copy_(model.visual.proj @ without)
        model.text_projection.copy_(torch.eye(16, 24))
        states = model.encode_text(tokens)[:, :16]  # before the last layer
        model.text_projection.copy_(torch.linalg.lstsq(states, targets).solution)
    save_file(model.state_dict(), folder / WEIGHTS)


def picture(name: str, seed: int) -> Any:
    """Make a noisy picture in a colour."""
    noise = np.random.default_rng(seed).normal(0, 25, (40, 40, 3))
    return np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)


def save_pictures(folder: Path, counts: Mapping[str, int], first: int = 0) -> Path:
    """Write a folder with a folder of pictures per colour."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(first, first + count):
            seed = 100 * list(COLOURS).index(name) + i
            Image.fromarray(picture(name, seed)).save(folder / name / f"{i}.png")
    return folder
