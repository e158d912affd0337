"""Several backbones at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mivhead
from mivhead import FewShotClassifier, MIVClassifier, Recipe
from mivhead.backbones import load_backbone, split_names
from mivhead.backbones.base import Identity, UnconfirmedBackbone, named_by_file
from mivhead.backbones.joint import JointBackbone
from mivhead.backbones.preset import BlockPreset, Preprocessing
from mivhead.ensemble.ridge import Expert, choose_experts, prior_weights
from mivhead.errors import InputError, MivError, NotAvailableError
from mivhead.features import Features
from tests.helpers.conformance import photos
from tests.helpers.tiny_backbone import TinyBackbone


@pytest.fixture
def joint() -> JointBackbone:
    return JointBackbone([TinyBackbone("first"), TinyBackbone("second", token=True)])


def test_features_are_the_blocks_of_all_parts(joint: JointBackbone) -> None:
    images = photos(3)
    found = joint.extract(images)
    parts = [part.extract(images) for part in joint.parts]
    assert found == Features([*parts[0].blocks, *parts[1].blocks])
    assert len(joint.preset.taps) == len(joint.preset.blocks) == len(found.blocks)
    assert [block.deepest for block in joint.preset.blocks] == [False, True, False, False, False]


def test_identity_depends_on_every_part(joint: JointBackbone) -> None:
    first, second = joint.parts
    others = [
        JointBackbone([second, first]),
        JointBackbone([first, TinyBackbone("second", token=True, weights="1" * 64)]),
        JointBackbone([first, TinyBackbone("second")]),
    ]
    assert joint.identity.name == "first+second"
    assert len({each.identity.key for each in (joint, *others)}) == 4
    assert JointBackbone([first, second]).identity == joint.identity


def test_a_pooled_vector_is_kept_of_the_last_backbone_only() -> None:
    first, last = TinyBackbone("first", token=True), TinyBackbone("last", token=True)
    for each in (first, last):
        pooled = (*each.preset.blocks[:-1], BlockPreset(form="vit", tau=200.0, pooled=True))
        object.__setattr__(each.preset, "blocks", pooled)
    joint = JointBackbone([first, last])
    assert [block.pooled for block in joint.preset.blocks] == [False] * 4 + [True]
    assert len(joint.extract(photos(1)).blocks) == 5


@pytest.mark.parametrize("parts", [[], ["a"], ["a", "a"]])
def test_parts_must_differ(parts: list[str]) -> None:
    with pytest.raises(InputError, match="must be different"):
        JointBackbone([TinyBackbone(name) for name in parts])


def test_each_backbone_has_its_experts_and_they_share_the_weights() -> None:
    blocks = Features([np.ones((1, 4, 3, 3)), np.ones((1, 5, 3, 3)), np.ones((1, 6, 3, 3))]).blocks
    spans = [range(2), range(2, 3)]
    experts = choose_experts(blocks, spans)
    kinds = {k: [e.block for e in experts if e.kind == k] for k in ("layout", "mean")}
    assert kinds == {"layout": [0, 1, 2], "mean": [1, 2]}
    weights = dict(zip(experts, prior_weights(experts, spans).tolist(), strict=True))
    assert weights[Expert("mean", 1)] == weights[Expert("mean", 2)] == 1.5
    assert weights[Expert("second_order", 0)] == 1.0


def test_a_model_on_several_backbones_comes_back_from_its_file(joint, tmp_path) -> None:
    images, labels = photos(6), list("aabbcc")
    model = FewShotClassifier(list(joint.parts), recipe=Recipe(steps=2)).fit(images, labels)
    assert model.identity_ == joint.identity
    assert [b.deepest for b in model.classifier_.blocks_] == [
        b.deepest for b in joint.preset.blocks
    ]
    means = [e.block for e in model.classifier_.ensemble_.experts.ridges if e.kind == "mean"]
    assert means == [1, 4]
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv", backbone=joint.parts)
    np.testing.assert_array_equal(again.predict_proba(images), model.predict_proba(images))
    again.add([np.zeros((9, 9, 3), np.uint8)], ["a"])
    model.add([np.zeros((9, 9, 3), np.uint8)], ["a"])
    np.testing.assert_array_equal(again.predict_proba(images), model.predict_proba(images))


def test_files_of_one_backbone_do_not_change() -> None:
    """Earlier versions refuse keys that they do not know."""
    X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    config, _ = MIVClassifier(Recipe(steps=1)).fit(X, list("aabb"))._state()
    assert all("deepest" not in block for block in config["blocks"])


def test_names_are_split_only_if_all_of_them_are_backbones() -> None:
    assert split_names("efficientnet_lite0+resnet50") == ["efficientnet_lite0", "resnet50"]
    assert split_names("efficientnet_lite0+net.onnx") == ["efficientnet_lite0", "net.onnx"]
    for single in ("efficientnet_lite0", "my+net.onnx", "hf:a+b", "mod:a+b", "http://host/a+b"):
        assert split_names(single) == []


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("efficientnet_lite0+timm:resnet50", True),
        ("timm:resnet50+http://host", False),
        ("efficientnet_lite0+https://host", False),
        ("a+timm:b.py:c", False),
        ("efficientnet_lite0+module:name", False),
    ],
)
def test_a_file_cannot_make_one_of_several_backbones_a_service_or_code(name, safe) -> None:
    found = named_by_file(Identity(name, "0" * 64, Preprocessing(), ("0:x", "1:y")))
    assert isinstance(found, UnconfirmedBackbone) != safe


@pytest.mark.parametrize("scheme", ["hf", "hf-onnx"])
def test_a_file_cannot_choose_a_download(scheme, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MIV_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in (f"{scheme}:owner/net", f"efficientnet_lite0+{scheme}:owner/net"):
        identity = Identity(name, "0" * 64, Preprocessing(), ("0:x", "1:y"))
        with pytest.raises(NotAvailableError, match="download a model: if you trust it"):
            named_by_file(identity).extract([])
    settings = tmp_path / "owner" / "net" / "config.json"
    settings.parent.mkdir(parents=True)
    settings.write_text("{}")
    assert named_by_file(identity) == identity.name  # it is on this computer


def test_options_of_one_backbone_are_refused() -> None:
    for option in ({"weights": "random"}, {"image_size": 64}):
        with pytest.raises(InputError, match="for a single backbone"):
            load_backbone(["efficientnet_lite0", "timm:resnet18"], **option)


def test_taps_of_a_model_file_go_to_their_parts() -> None:
    expected = load_backbone("efficientnet_lite0")
    taps = ("0:blocks.6", "0:bn2", "1:x", "1:y")
    tiny = TinyBackbone("tiny")
    given = mivhead.Preset(taps, (BlockPreset(),) * 4, expected.preset.preprocessing)
    joint = load_backbone(["efficientnet_lite0", tiny], preset=given)
    assert joint.preset.taps == ("0:blocks.6", "0:bn2", "1:colours", "1:edges")


def test_export_with_images_says_why_it_cannot(joint, tmp_path) -> None:
    pytest.importorskip("onnxscript")
    from mivhead.export.model import export_model

    images, labels = photos(4), list("aabb")
    model = FewShotClassifier(joint, recipe=Recipe(steps=2)).fit(images, labels)
    with pytest.raises(MivError, match="several backbones"):
        export_model(model, tmp_path / "m.onnx")
    assert export_model(model, tmp_path / "m.onnx", input="features").difference < 1e-4


def test_the_type_is_part_of_the_cache_key(joint: JointBackbone) -> None:
    wide = JointBackbone([joint.parts[0], TinyBackbone("second", token=True, dtype=torch.float32)])
    assert joint.dtype == "float16"
    assert wide.dtype == "float16+float32"
