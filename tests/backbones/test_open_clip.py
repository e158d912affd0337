"""Image and text towers of OpenCLIP: a tiny random model, compared with the library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mivhead import FewShotClassifier
from mivhead.backbones import load_backbone
from mivhead.backbones.base import preprocess
from mivhead.backbones.text import class_vectors
from mivhead.errors import InputError
from tests.helpers.conformance import check, photos
from tests.helpers.text_towers import open_clip, save_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the format of the hub."""
    return save_clip(tmp_path_factory.mktemp("tiny-clip"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return open_clip.create_model(f"local-dir:{folder}").eval()


def test_blocks_and_embedding_equal_the_library(folder: Path, model: Any) -> None:
    backbone = load_backbone(f"open_clip:{folder}", device="cpu", dtype="float32")
    assert backbone.preset.taps == ("blocks.0", "blocks.1", "blocks.2", "embedding")
    preprocessing = backbone.preset.preprocessing
    assert (preprocessing.size, preprocessing.mean) == (32, (0.4, 0.5, 0.6))
    images = photos(3)
    found = backbone.extract(images)
    with torch.no_grad():
        x = preprocess(images, preprocessing)
        expected = model.visual.forward_intermediates(x, output_extra_tokens=True)
        vectors = model.encode_image(x)
    for i in range(3):
        close(found.blocks[i].map, expected["image_intermediates"][i])
        close(found.blocks[i].token, expected["image_intermediates_prefix"][i][:, 0])
    close(found.blocks[3].token, vectors)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-4)


def test_conformance(folder: Path) -> None:
    check(load_backbone(f"open_clip:{folder}", device="cpu"))


def test_class_vectors_equal_the_library(folder: Path, model: Any) -> None:
    names, templates = ["robin", "wren", "jay"], ["a photo of a {}.", "{}"]
    backbone = load_backbone(f"open_clip:{folder}")
    vectors = class_vectors(backbone, names, templates)
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    expected = []
    for name in names:
        with torch.no_grad():
            sentences = tokenizer([template.replace("{}", name) for template in templates])
            mean = model.encode_text(sentences, normalize=True).mean(0)
        expected.append((mean / mean.norm()).numpy())
    assert vectors.shape == (3, 24)
    close(vectors, np.stack(expected))
    for wrong in (["a photo"], "a photo of a {}"):
        with pytest.raises(InputError, match="Templates"):
            class_vectors(backbone, names, wrong)


def test_backbones_without_a_text_tower() -> None:
    with pytest.raises(InputError, match="no text tower"):
        class_vectors(load_backbone(), ["robin"])


def test_a_classifier_learns_and_is_loaded_again(folder: Path, tmp_path: Path) -> None:
    import mivhead

    images = photos(6)
    fitted = FewShotClassifier(f"open_clip:{folder}", device="cpu").fit(images, list("aabbcc"))
    mivhead.save(fitted, tmp_path / "model.miv")
    again = mivhead.load(tmp_path / "model.miv", backbone=f"open_clip:{folder}")
    np.testing.assert_allclose(again.predict_proba(images), fitted.predict_proba(images), atol=1e-6)


def test_a_checkpoint_of_another_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a checkpoint"):
        load_backbone("clip_vitb32", weights=folder / "open_clip_model.safetensors")
    with pytest.raises(InputError, match="none"):
        load_backbone(f"open_clip:{folder}", weights=tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("open_clip:ViT-B-32/openia", "openai"),
        ("open_clip:ViT-B32/openai", "ViT-B-32"),
        ("open_clip:nobody/nothing", "download"),
    ],
)
def test_unknown_models(spec: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        load_backbone(spec)
