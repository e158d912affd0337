"""What tells two towers of transformers apart, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mivhead.backbones import load_backbone
from mivhead.backbones.preprocessing import preprocess
from mivhead.extraction.cache import CacheKeys
from mivhead.images.augmentation import Augmentation
from tests.helpers.conformance import photos, run
from tests.helpers.towers import DEPTH, clip, hidden_states, registers, save, siglip, vit


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_identity_is_the_same_in_another_process(tmp_path: Path) -> None:
    save(clip, tmp_path)
    spec = f"hf:{tmp_path}"
    backbone = load_backbone(spec, device="cpu")
    assert backbone.identity.name == spec
    code = f"from mivhead.backbones import *; print(load_backbone({spec!r}).identity.key)"
    assert run(code) == backbone.identity.key


@pytest.mark.parametrize("make", [clip, siglip, vit, registers], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 8}, {"hidden_act": "relu"}, {"layer_norm_eps": 0.1}], ids=str
)
def test_settings_that_no_tensor_shows_are_part_of_the_identity(
    make: Callable[[], Any], change: dict[str, Any], tmp_path: Path
) -> None:
    save(make, tmp_path)
    before = load_backbone(f"hf:{tmp_path}", device="cpu")
    change_config(tmp_path, **change)
    after = load_backbone(f"hf:{tmp_path}", device="cpu")
    assert after.extract(photos(1)) != before.extract(photos(1))
    assert after.identity != before.identity


def test_settings_that_change_nothing_are_no_part_of_the_identity(tmp_path: Path) -> None:
    save(clip, tmp_path)
    before = load_backbone(f"hf:{tmp_path}", device="cpu")
    # Were the network to run in bfloat16, as this asks for, its features would be others.
    change_config(tmp_path, dtype="bfloat16", torch_dtype="bfloat16", transformers_version="0")
    after = load_backbone(f"hf:{tmp_path}", device="cpu")
    assert after.identity == before.identity
    assert after.extract(photos(2)) == before.extract(photos(2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_lower_precision_run_in_float32(kind: torch.dtype, tmp_path: Path) -> None:
    model = save(clip, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "low")
    model.to(kind).save_pretrained(tmp_path / "low")
    low, whole = (
        load_backbone(f"hf:{tmp_path / name}", device="cpu", dtype="float32")
        for name in ("low", "whole")
    )
    assert low.identity.weights != whole.identity.weights
    images = photos(2)
    x = preprocess(images, low.preset.preprocessing)
    states = hidden_states(model.float(), "", x, norm=False)  # rounded once, when it was saved
    patches = low.extract(images).blocks[DEPTH - 1].map
    assert patches is not None
    np.testing.assert_allclose(
        patches.reshape(*patches.shape[:2], -1).swapaxes(1, 2),
        states[-1][:, 1:],
        rtol=1e-4,
        atol=1e-4,
    )


def test_each_type_of_features_has_its_own_place_in_the_cache(tmp_path: Path) -> None:
    save(clip, tmp_path)
    keys = set()
    for dtype in ("float16", "float32", "float64"):
        backbone = load_backbone(f"hf:{tmp_path}", device="cpu", dtype=dtype)
        assert str(backbone.extract(photos(1)).dtype) == dtype
        keys.add(CacheKeys(backbone, Augmentation()).key("0" * 64, None))
    assert len(keys) == 3
