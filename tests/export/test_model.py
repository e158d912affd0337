"""Whole classifiers: the backbone's graph continued by the head's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import mivhead
from mivhead import FewShotClassifier, Preprocessing
from mivhead.backbones import from_callable, from_module
from mivhead.errors import InputError, ModelFileError, NotAvailableError
from mivhead.export import model as exporting
from mivhead.export.model import export_model
from mivhead.features import Features
from tests.helpers.tiny_onnx import network as tiny_onnx

LABELS = ["dark", "light", "red"]


def images(count: int = 1, seed: int = 0, side: int = 40) -> list[np.ndarray]:
    """Images of three kinds, in turn."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(3 * count):
        image = rng.integers(0, 90, (side, side + 7, 3), dtype=np.uint8)
        if i % 3:
            image[:, :, : 3 if i % 3 == 1 else 1] += 140
        found.append(image)
    return found


def small_cnn() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 4, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 12, 2, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(12, 4, 1),
    )


def fitted(backbone, **params) -> FewShotClassifier:
    return FewShotClassifier(backbone, threshold=0, **params).fit(images(3), LABELS * 3)


@pytest.fixture(scope="module")
def model() -> FewShotClassifier:
    return fitted(
        from_module(small_cnn(), ["1", "3"], name="small", preprocessing=Preprocessing(size=32))
    )


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    export_model(model, path)
    return path


def check(model: FewShotClassifier, path: Path, least: float = 1e-4) -> None:
    new = images(4, seed=9)
    found, expected = mivhead.load(path).predict_proba(new), model.predict_proba(new)
    np.testing.assert_allclose(found, expected, atol=least)


def test_images_to_probabilities(model, exported) -> None:
    check(model, exported)
    loaded = mivhead.load(exported)
    assert loaded.predict(images()).tolist() == LABELS
    assert loaded.identity_ == model.identity_
    (first, *_) = loaded.classify(images())
    assert first.label == "dark"
    assert (
        list(first.probabilities) == sorted(first.probabilities, key=first.probabilities.get)[::-1]
    )


def test_decisions_are_those_of_the_model(model, exported) -> None:
    new = [*images(3, seed=9), images(seed=3)[0][:, :, ::-1] * np.uint8(2)]
    asked = [{}, {"reject": 0.5}, {"max_errors": 0.01}, {"reject": None}]
    loaded = mivhead.load(exported)
    for options in asked:
        mine, theirs = model.classify(new, **options), loaded.classify(new, **options)
        assert [each.decision for each in mine] == [each.decision for each in theirs]
        np.testing.assert_allclose(
            [each.unknown for each in mine], [each.unknown for each in theirs], atol=1e-4
        )
    assert len({each.decision for each in model.classify(new)}) > 1


def test_the_class_for_everything_else_is_never_a_name(tmp_path) -> None:
    small = from_module(small_cnn(), ["3"], name="small", preprocessing=Preprocessing(size=32))
    model = fitted(small, other="red")
    export_model(model, tmp_path / "model.onnx")
    loaded = mivhead.load(tmp_path / "model.onnx")
    assert loaded.predict_proba(images()).argmax(axis=1).tolist() == [0, 1, 2]  # the last is red
    assert loaded.predict(images()).tolist() == model.predict(images()).tolist()
    assert "red" not in loaded.predict(images())
    assert loaded.shot_counts == model.shot_counts == {"dark": 3, "light": 3, "red": 3}


def test_a_background_is_part_of_the_score(model, tmp_path) -> None:
    classifier = model.classifier_
    rule = classifier.decision_
    try:
        classifier.decision_ = rule.with_background(rule.shots[::-1] * np.float32(0.9))
        export_model(model, tmp_path / "model.onnx")
        mine, theirs = (
            model.classify(images()),
            mivhead.load(tmp_path / "model.onnx").classify(images()),
        )
    finally:
        classifier.decision_ = rule
    found, expected = ([each.unknown for each in part] for part in (theirs, mine))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(np.subtract(expected, [e.unknown for e in model.classify(images())])).min() > 0.1


def test_the_batch_is_dynamic_and_the_file_valid(exported) -> None:
    file = onnx.load(exported)
    onnx.checker.check_model(file, full_check=True)
    (source,), (target, unknown) = file.graph.input, file.graph.output
    assert (target.name, unknown.name) == ("probabilities", "unknown")
    assert source.type.tensor_type.shape.dim[0].dim_param == "n"
    assert target.type.tensor_type.shape.dim[0].dim_param == "n"
    assert [d.dim_value for d in source.type.tensor_type.shape.dim][1:] == [3, 32, 32]
    loaded = mivhead.load(exported)
    many = loaded.predict_proba(images(7))
    np.testing.assert_allclose(many[:1], loaded.predict_proba(images(7)[:1]), atol=1e-6)


def test_the_metadata_says_what_the_model_file_says(model, exported, tmp_path) -> None:
    from mivhead.model.file import read_info

    model.save(tmp_path / "model.miv")
    assert mivhead.load(exported).info == read_info(tmp_path / "model.miv")
    metadata = {each.key: each.value for each in onnx.load(exported).metadata_props}
    assert json.loads(metadata["mivhead"])["model"]["classes"] == LABELS


WITHOUT_TORCH = """
import sys

for name in ("torch", "sklearn", "scipy", "onnxscript"):
    sys.modules[name] = None  # importing it is an error

import numpy as np

import mivhead
from mivhead import FewShotClassifier
from mivhead.export.model import export_model

rng = np.random.default_rng(0)
images = list(rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8))
model = FewShotClassifier(threshold=0, random_state=0).fit(images, ["a", "a", "b", "b"])
export_model(model, "model.onnx")
assert mivhead.load("model.onnx").predict(images).tolist() == ["a", "a", "b", "b"]
"""


def test_the_default_backbone_is_exported_without_pytorch(tmp_path) -> None:
    code = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(code, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_features_of_a_model_of_images(model, tmp_path) -> None:
    export_model(model, tmp_path / "head.onnx", input="features")
    head = mivhead.load(tmp_path / "head.onnx")
    table = model.extract(images(4, seed=9))
    expected = model.predict_proba(table)
    np.testing.assert_allclose(head.predict_proba(table), expected, atol=1e-5)
    arrays = table.features.tensors
    np.testing.assert_allclose(head.predict_proba(arrays), expected, atol=1e-5)
    assert [each.id for each in head.classify(table)] == list(table.ids)
    with pytest.raises(InputError, match="takes features"):
        head.predict_proba(images())
    with pytest.raises(InputError, match=r"lack 'block1\.map'"):
        head.predict_proba({"block0.map": arrays["block0.map"]})


def test_a_backbone_that_is_an_onnx_file(tmp_path) -> None:
    file = tiny_onnx(tmp_path / "backbone.onnx")
    backbone = mivhead.backbones.load_backbone(file, outputs=["shallow", "deep"])
    model = fitted(backbone)
    export_model(model, tmp_path / "model.onnx")
    check(model, tmp_path / "model.onnx", 1e-4)
    # What comes after the taps, such as a classification layer, is dropped.
    names = {each.name for each in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert "w3" not in names


def test_a_backbone_of_another_layout_is_refused(tmp_path) -> None:
    file = tiny_onnx(tmp_path / "backbone.onnx", channels_last=True)
    model = fitted(mivhead.backbones.load_backbone(file, outputs=["shallow", "deep"]))
    with pytest.raises(InputError, match="--features"):
        export_model(model, tmp_path / "model.onnx")


def test_a_fixed_batch_becomes_dynamic(tmp_path) -> None:
    backbone = mivhead.backbones.load_backbone(
        tiny_onnx(tmp_path / "backbone.onnx", batch=1), outputs=["shallow", "deep"]
    )
    model = fitted(backbone)
    export_model(model, tmp_path / "model.onnx")
    check(model, tmp_path / "model.onnx")


def test_tokens_of_a_transformer(tmp_path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, num_classes=0, pretrained=False
    )
    backbone = from_module(
        vit, ["blocks.0", "blocks.1"], name="vit", preprocessing=Preprocessing(size=64)
    )
    model = fitted(backbone)
    assert "block1.token" in model.classifier_.layout_
    export_model(model, tmp_path / "model.onnx")
    check(model, tmp_path / "model.onnx")


def test_a_function_or_service_cannot_be_exported(tmp_path) -> None:
    def features(batch):
        return [np.stack([np.asarray(each).mean(axis=(0, 1)) for each in batch]).astype(np.float32)]

    model = fitted(from_callable(features, name="means"))
    with pytest.raises(InputError, match="export with --features"):
        export_model(model, tmp_path / "model.onnx")
    export_model(model, tmp_path / "head.onnx", input="features")


def test_features_of_unknown_origin(tmp_path) -> None:
    X, y = np.eye(4, 8, dtype=np.float32), ["a", "a", "b", "b"]
    model = mivhead.MIVClassifier(random_state=0).fit(X, y)
    with pytest.raises(InputError, match="only with --features"):
        export_model(model, tmp_path / "model.onnx", input="images")
    export_model(model, tmp_path / "model.onnx")
    assert mivhead.load(tmp_path / "model.onnx").predict(X).tolist() == y


def test_a_wrong_graph_is_not_written(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "_compare", lambda *_: 0.02)
    with pytest.raises(NotAvailableError, match="nothing was written"):
        export_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_comparison_can_fail(model, exported) -> None:
    """Change a constant of the file: the comparison must notice."""
    file = onnx.load(exported)
    for tensor in file.graph.initializer:
        if len(tensor.dims) > 1:
            array = onnx.numpy_helper.to_array(tensor)
            if array.dtype == np.float32:
                tensor.CopyFrom(onnx.numpy_helper.from_array(array * 1.5, tensor.name))
    assert exporting._compare(model, file.SerializeToString(), "images") > 1e-3


def test_an_old_opset_is_converted(tmp_path) -> None:
    file = tiny_onnx(tmp_path / "backbone.onnx")
    old = onnx.load(file)
    old.opset_import[0].version = 11  # its operations are older than that
    onnx.save(old, file)
    model = fitted(mivhead.backbones.load_backbone(file, outputs=["shallow", "deep"]))
    export_model(model, tmp_path / "model.onnx")
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 13
    check(model, tmp_path / "model.onnx")
    assert isinstance(model.extract(images()).features, Features)


def test_damage_is_found_before_the_model_is_used(exported, tmp_path) -> None:
    content = exported.read_bytes()
    path = tmp_path / "damaged.onnx"
    rng = np.random.default_rng(0)
    places = rng.integers(0, len(content), 60)
    mark = content.index(b"mivhead-crc32:")
    for place in [*places, mark, mark + 3, mark + 15]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(InputError):  # also: not a model, an unknown key
            mivhead.load(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match="corrupted"):
        mivhead.load(path)


def test_an_exported_model_takes_a_prior(tmp_path) -> None:
    backbone = from_module(small_cnn(), ["3"], name="small", preprocessing=Preprocessing(size=32))
    model, path = fitted(backbone), tmp_path / "m.onnx"
    export_model(model, path)
    for wanted in (None, "uniform", "shots", {"dark": 1, "light": 0, "red": 2}):
        found, expected = (
            each.classify(images(2, seed=9), class_prior=wanted)
            for each in (mivhead.load(path), model)
        )
        for one, other in zip(found, expected, strict=True):
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
