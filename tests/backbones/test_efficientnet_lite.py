"""EfficientNet-Lite0 with its real weights: mapped properly, checked, conforming."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mivhead.backbones import efficientnet_lite as module
from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, module_of
from mivhead.backbones.efficientnet_lite import (
    PRESETS,
    WEIGHTS,
    encode_graph,
    expected_shapes,
    list_taps,
    read_checkpoint,
    rename_in_order,
)
from mivhead.backbones.efficientnet_lite_network import build
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
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3)


def test_storage_type_is_a_rounding(backbone: Backbone) -> None:
    exact = load_backbone(NAME, device="cpu", dtype="float32").extract(photos(2))
    assert exact.dtype == np.float32
    assert exact.to(torch.float16) == backbone.extract(photos(2))


def test_identity_is_the_same_in_another_process(backbone: Backbone) -> None:
    code = f"from mivhead.backbones import *; print(load_backbone('{NAME}').identity.key)"
    output = run(code)
    assert output == backbone.identity.key
    assert backbone.identity.weights == WEIGHTS[NAME].sha256


def test_unknown_tap_suggests_near_ones() -> None:
    with pytest.raises(InputError, match=r"no tap 'blocks.4.2.conv_pw'.*blocks\.4\.2"):
        load_backbone(NAME, preset=tapped("blocks.4.2.conv_pw"))


def test_every_tap_runs_in_its_listed_order() -> None:
    activations = [name for name in list_taps(NAME) if name.endswith(("bn1", "bn2"))]
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


def checkpoint(dtype: str = "f4", **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {f"_fc.{role}": np.zeros(shape, dtype) for role, shape in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (checkpoint(weight=(3, 2)), "has 1 tensors, the architecture 2"),
        (checkpoint(weight=(2, 3), bias=(3,)), r"\(2, 3\) .*is not"),
        (checkpoint(bias=(3, 2), weight=(3,)), "_fc.bias .* is not"),
        (checkpoint("f2", weight=(3, 2), bias=(3,)), "float16 is not"),
    ],
)
def test_wrong_mappings_are_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(NotAvailableError, match=message):
        rename_in_order(tensors, {"classifier.weight": (3, 2), "classifier.bias": (3,)})


def test_weights_are_those_of_pytorch(plain: torch.nn.Module) -> None:
    source = WEIGHTS[NAME]
    expected = torch.load(source.locate(), map_location="cpu", weights_only=True)
    found = read_checkpoint(source.locate(), source.sha256)
    assert list(found) == list(expected)
    for name, array in found.items():
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, expected[name].numpy(), strict=True)
    assert expected_shapes(NAME) == {k: tuple(v.shape) for k, v in plain.state_dict().items()}
    tap = re.compile(r"bn[12]|blocks\.\d+(\.\d+(\.bn[12])?)?")
    assert sorted(list_taps(NAME)) == sorted(filter(tap.fullmatch, dict(plain.named_modules())))


TAPS = [PRESET.taps, ("bn1",), ("blocks.0.0.bn2", "blocks.0.0", "blocks.0", "blocks.4.1")]


@pytest.mark.parametrize("taps", TAPS)
def test_onnx_accepts_the_graph_and_infers_its_shapes(taps: tuple[str, ...]) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
    model = onnx.load_model_from_string(encode_graph(NAME, taps, 97))
    onnx.checker.check_model(model, full_check=True)  # also that the shapes are as declared
    assert [each.name for each in model.graph.output] == list(taps)


@pytest.mark.parametrize("taps", TAPS)
def test_onnxruntime_equals_pytorch(taps: tuple[str, ...]) -> None:
    ours = load_backbone(NAME, preset=tapped(*taps), dtype="float32")
    theirs = module_of(ours)
    assert theirs is not None
    assert theirs.identity == ours.identity
    images = photos(3)
    found, expected = ours.extract(images), theirs.extract(images)
    for name, tensor in expected.tensors.items():
        scale = float(abs(np.asarray(tensor)).max())
        difference = abs(np.asarray(found.tensors[name]) - np.asarray(tensor)).max()
        assert difference <= 1e-5 * scale, name


def test_features_do_not_depend_on_the_batch(backbone: Backbone) -> None:
    images = photos(5)
    whole = backbone.extract(images)
    for i, image in enumerate(images):
        assert backbone.extract([image]) == whole[[i]]


def test_taps_out_of_order_are_refused() -> None:
    with pytest.raises(InputError, match="in the order in which they run"):
        load_backbone(NAME, preset=tapped("blocks.4", "blocks.4.2"))


def test_runs_without_pytorch_and_onnx() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, onnx=None, sklearn=None, scipy=None)\n"
        "import numpy as np; from mivhead.backbones import load_backbone\n"
        f"backbone = load_backbone('{NAME}').loaded()\n"
        "found = backbone.run(np.zeros((1, 3, 224, 224), np.float32))\n"
        "print({name: array.shape[1:] for name, array in found.items()})"
    )
    assert run(code) == (
        "{'blocks.4': (112, 14, 14), 'blocks.5': (192, 7, 7), 'blocks.6': (320, 7, 7), "
        "'bn2': (1280, 7, 7)}"
    )


def test_graph_is_kept_and_made_again_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path))
    image = photos(1)
    expected = load_backbone(NAME).extract(image)
    (file,) = (tmp_path / "backbones").iterdir()
    content = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_weights", None)  # which the second one does not need
        assert load_backbone(NAME).extract(image) == expected
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    for wrong in (bytes(damaged), content[:-1], b""):
        file.write_bytes(wrong)
        assert load_backbone(NAME).extract(image) == expected
        assert file.read_bytes() == content
