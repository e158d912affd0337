"""Vision towers of transformers: tiny random ones, compared with the library itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mivhead import FewShotClassifier
from mivhead.backbones import load_backbone
from mivhead.backbones.preprocessing import preprocess
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.backbones.presets import PAPER
from mivhead.backbones.text import class_vectors
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos
from tests.helpers.towers import (
    DEPTH,
    MEAN,
    PATCH,
    PROCESSOR,
    SIZE,
    SMALL,
    STD,
    TEXT,
    WIDTH,
    clip,
    dinov2,
    dinov3,
    dinov3_convnext,
    hidden_states,
    registers,
    save,
    siglip,
    siglip2,
    transformers,
    vit,
    vit_classifier,
    whole_clip,
    whole_siglip,
)

# how it is made -> (the tower inside, tokens before the patches, whether the final norm applies,
# the tap after all blocks)
TOWERS: dict[Callable[[], Any], tuple[str, int, bool, tuple[str, ...]]] = {
    clip: ("", 1, False, ("pooled",)),
    whole_clip: ("vision_model", 1, False, ("embedding",)),
    siglip: ("", 0, True, ("embedding",)),
    whole_siglip: ("vision_model", 0, True, ("embedding",)),
    vit: ("", 1, True, ()),
    vit_classifier: ("vit", 1, True, ()),
    dinov2: ("", 1, True, ()),
    registers: ("", 5, True, ()),
}


@pytest.mark.parametrize("make", TOWERS, ids=lambda make: make.__name__)
def test_every_block_equals_the_library(make: Callable[[], Any], tmp_path: Path) -> None:
    inside, prefix, norm, pooled = TOWERS[make]
    model = save(make, tmp_path)
    backbone = load_backbone(f"hf:{tmp_path}", device="cpu", dtype="float32")
    expected_size = Preprocessing(SIZE, tuple(MEAN), tuple(STD))  # type: ignore[arg-type]
    assert backbone.preset.preprocessing == expected_size
    assert backbone.preset.taps == ("blocks.0", "blocks.1", "blocks.2", *pooled)
    assert all(block.form == "vit" and block.tau == 200 for block in backbone.preset.blocks)
    images = photos(5)
    found = backbone.extract(images)
    states = hidden_states(model, inside, preprocess(images, expected_size), norm=norm)
    if pooled:
        with torch.no_grad():
            pixels = preprocess(images, expected_size)
            expected = model.get_submodule(inside)(pixel_values=pixels).pooler_output
            if make is whole_clip:
                expected = model.visual_projection(expected)
        assert found.blocks[-1].token is not None
        np.testing.assert_allclose(found.blocks[-1].token, expected, rtol=1e-4, atol=1e-4)
        assert backbone.preset.blocks[-1].pooled
    assert len(found.blocks) - len(pooled) == len(states) == DEPTH
    for block, state in zip(found.blocks[:DEPTH], states, strict=True):
        assert block.map is not None
        patches = block.map.reshape(5, WIDTH, -1).swapaxes(1, 2)  # (n, patches, C)
        assert block.map.shape == (5, WIDTH, SIZE // PATCH, SIZE // PATCH)
        np.testing.assert_allclose(patches, state[:, prefix:], rtol=1e-4, atol=1e-4)
        if prefix:
            assert block.token is not None
            np.testing.assert_allclose(block.token, state[:, 0], rtol=1e-4, atol=1e-4)
        else:
            assert block.token is None


@pytest.mark.parametrize("make", [clip, siglip, vit, registers], ids=lambda make: make.__name__)
def test_conformance(make: Callable[[], Any], tmp_path: Path) -> None:
    save(make, tmp_path)
    check(load_backbone(f"hf:{tmp_path}", device="cpu"))


def test_weights_in_several_files(tmp_path: Path) -> None:
    save(clip, tmp_path / "one")
    save(clip, tmp_path / "many", max_shard_size="20KB")
    assert not (tmp_path / "many" / "model.safetensors").exists()
    one = load_backbone(f"hf:{tmp_path / 'one'}", device="cpu")
    many = load_backbone(f"hf:{tmp_path / 'many'}", device="cpu")
    assert one.extract(photos(2)) == many.extract(photos(2))
    assert one.identity.weights != many.identity.weights
    part = sorted((tmp_path / "many").glob("model-*.safetensors"))[0]
    part.unlink()
    with pytest.raises(NotAvailableError, match="lacks files"):
        load_backbone(f"hf:{tmp_path / 'many'}")


@pytest.mark.parametrize("make", [clip, siglip, vit, dinov2], ids=lambda make: make.__name__)
def test_other_sizes_and_taps(make: Callable[[], Any], tmp_path: Path) -> None:
    save(make, tmp_path)
    preset = Preset(("blocks.1",), (BlockPreset(form="vit"),), Preprocessing(size=48))
    backbone = load_backbone(f"hf:{tmp_path}", preset=preset, device="cpu")
    assert backbone.extract(photos(2)).layout["block0.map"] == (WIDTH, 6, 6)
    assert backbone.identity.taps == ("blocks.1",)
    with pytest.raises(InputError, match=r"no tap 'blocks.9'; similar names are blocks\."):
        load_backbone(f"hf:{tmp_path}", preset=replace(preset, taps=("blocks.9",)))
    odd = replace(preset, preprocessing=Preprocessing(size=50))
    with pytest.raises(InputError, match="multiple of the patch size 8, got 50"):
        load_backbone(f"hf:{tmp_path}", preset=odd)


@pytest.mark.parametrize(
    ("change", "size", "mean"),
    [
        ({}, SIZE, MEAN),
        ({"crop_size": SIZE}, SIZE, MEAN),
        ({"do_center_crop": False, "size": {"height": 40, "width": 40}}, 40, MEAN),
        ({"do_center_crop": False, "size": 48}, 48, MEAN),
        ({"do_normalize": False}, SIZE, [0.0] * 3),
        ({"do_center_crop": False, "size": {"height": 40, "width": 48}}, None, MEAN),
        ({"crop_size": None}, None, MEAN),
        ({"image_mean": None}, None, MEAN),
        ({"image_std": [1.0, 1.0]}, None, MEAN),
        ({"rescale_factor": 1 / 127.5}, None, MEAN),
    ],
)
@pytest.mark.parametrize("inside_processor", [False, True])
def test_preprocessing_of_the_folder(
    change: dict[str, Any],
    size: int | None,
    mean: list[float],
    inside_processor: bool,
    tmp_path: Path,
) -> None:
    save(dinov2, tmp_path)
    document = PROCESSOR | change
    (tmp_path / "preprocessor_config.json").unlink()
    if inside_processor:
        file, document = "processor_config.json", {"image_processor": document}
    else:
        file = "preprocessor_config.json"
    (tmp_path / file).write_text(json.dumps(document))
    if size is None:
        with pytest.raises(InputError, match=r"lacks usable settings .*: give a preset"):
            load_backbone(f"hf:{tmp_path}")
    else:
        found = load_backbone(f"hf:{tmp_path}").preset.preprocessing
        assert (found.size, list(found.mean)) == (size, mean)


def test_without_preprocessing_a_preset_is_needed(tmp_path: Path) -> None:
    save(dinov2, tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="give a preset"):
        load_backbone(f"hf:{tmp_path}")


def test_models_of_the_hub_are_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    save(clip, tmp_path)
    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    backbone = load_backbone("hf:someone/tiny-clip", device="cpu")
    assert asked == ["someone/tiny-clip"]
    assert backbone.identity.name == "hf:someone/tiny-clip"


@pytest.mark.slow
def test_clip_of_the_papers_shape_has_the_papers_preset(tmp_path: Path) -> None:
    config = SMALL | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 8,
        "patch_size": 14,
        "image_size": 224,
    }
    torch.manual_seed(0)
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**config))
    model.half().save_pretrained(tmp_path)
    document = PROCESSOR | {"crop_size": 224}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
    preset = load_backbone(f"hf:{tmp_path}", device="cpu").preset
    assert preset.blocks == PAPER["clip_vitl14"].preset.blocks
    assert preset.taps == ("blocks.22", "blocks.23", "pooled")
    assert preset.threshold == 20
    assert list(preset.preprocessing.mean) == MEAN


def test_a_classifier_learns_and_is_loaded_again(
    shots: Path, queries: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import mivhead

    save(dinov2, tmp_path / "tower")
    capfd.readouterr()
    classifier = FewShotClassifier(f"hf:{tmp_path / 'tower'}", threshold=2, device="cpu")
    classifier.fit_folder(shots).save(tmp_path / "model.miv")
    paths = sorted(queries.glob("*/*.png"))
    again = mivhead.load(tmp_path / "model.miv", device="cpu")
    np.testing.assert_allclose(
        again.predict_proba(paths), classifier.predict_proba(paths), atol=1e-5
    )
    assert np.mean(again.predict(paths) == [path.parent.name for path in paths]) > 0.9
    assert capfd.readouterr() == ("", "")


def test_dinov3_equals_the_library(tmp_path: Path) -> None:
    model = save(dinov3, tmp_path)
    backbone = load_backbone(f"hf:{tmp_path}", device="cpu", dtype="float32")
    images = photos(3)
    found = backbone.extract(images)
    with torch.no_grad():
        x = preprocess(images, backbone.preset.preprocessing)
        expected = np.asarray(model(pixel_values=x).last_hidden_state)  # (n, 1 + 4 + patches, C)
    last = np.asarray(found.blocks[-1].map)
    np.testing.assert_allclose(
        last.reshape(3, WIDTH, -1).transpose(0, 2, 1), expected[:, 5:], atol=1e-4
    )
    token = np.asarray(found.blocks[-1].token)
    np.testing.assert_allclose(token, expected[:, 0], atol=1e-4)
    larger = load_backbone(f"hf:{tmp_path}", image_size=48, device="cpu")
    assert larger.extract(images).layout["block0.map"] == (WIDTH, 6, 6)


def test_siglip2_for_any_aspect_ratio_equals_the_library(tmp_path: Path) -> None:
    model = save(siglip2, tmp_path)
    taps = ("blocks.2", "embedding")
    blocks = (BlockPreset(form="vit"), BlockPreset(form="vit", pooled=True))
    preset = Preset(taps, blocks, Preprocessing(SIZE))
    backbone = load_backbone(f"hf:{tmp_path}", preset=preset, device="cpu", dtype="float32")
    images = photos(2)
    found = backbone.extract(images)
    side = SIZE // PATCH
    patches = [  # as the library's image processor cuts them
        [
            np.asarray(each[:, PATCH * i : PATCH * (i + 1), PATCH * j : PATCH * (j + 1)])
            .transpose(1, 2, 0)
            .ravel()
            for i in range(side)
            for j in range(side)
        ]
        for each in preprocess(images, Preprocessing(SIZE))
    ]
    with torch.no_grad():
        expected = model(
            pixel_values=torch.from_numpy(np.array(patches)),
            pixel_attention_mask=torch.ones(2, side * side, dtype=torch.int64),
            spatial_shapes=torch.full((2, 2), side),
        )
    last = np.asarray(found.blocks[0].map).reshape(2, WIDTH, -1).transpose(0, 2, 1)
    np.testing.assert_allclose(last, np.asarray(expected.last_hidden_state), atol=1e-4)
    vectors = np.asarray(found.blocks[1].token)
    np.testing.assert_allclose(vectors, np.asarray(expected.pooler_output), atol=1e-4)


def test_dinov3_convnext_equals_the_library(tmp_path: Path) -> None:
    model = save(dinov3_convnext, tmp_path)
    processor = PROCESSOR | {"do_center_crop": False, "size": {"height": 64, "width": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    backbone = load_backbone(f"hf:{tmp_path}", device="cpu", dtype="float32")
    assert backbone.preset.taps == ("stages.2", "stages.3")
    assert {block.form for block in backbone.preset.blocks} == {"cnn"}
    images = photos(2)
    with torch.no_grad():
        x = preprocess(images, backbone.preset.preprocessing)
        expected = model(pixel_values=x, output_hidden_states=True).hidden_states
    for block, state in zip(backbone.extract(images).blocks, expected[-2:], strict=True):
        np.testing.assert_allclose(np.asarray(block.map), np.asarray(state), atol=1e-3, rtol=1e-4)


def tokenizer_of(words: str) -> Any:
    """A tokenizer with one token per word."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *words.split()])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [EOS]", special_tokens=[("[EOS]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )


def clip_with_words() -> Any:
    text = TEXT | {"eos_token_id": 2}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=SMALL))


def siglip_with_words() -> Any:
    text = TEXT | {"hidden_size": WIDTH, "projection_size": WIDTH}
    config = transformers.SiglipConfig(text_config=text, vision_config=SMALL)
    return transformers.SiglipModel(config)


@pytest.mark.parametrize("make", [clip_with_words, siglip_with_words])
def test_text_and_image_share_a_space(make: Callable[[], Any], tmp_path: Path) -> None:
    model = save(make, tmp_path)
    tokenizer_of("a photo of robin wren").save_pretrained(tmp_path)
    spec = f"hf:{tmp_path}"
    vectors = class_vectors(spec, ["robin", "wren"], ["a photo of a {}", "{}"])
    taps = ("blocks.2", "embedding")
    blocks = (BlockPreset(form="vit"), BlockPreset(form="vit", pooled=True))
    preset = Preset(taps, blocks, Preprocessing(SIZE))
    backbone = load_backbone(spec, preset=preset, device="cpu", dtype="float32")
    images = photos(2)
    found = np.asarray(backbone.extract(images).blocks[1].token)
    with torch.no_grad():
        expected = model.get_image_features(pixel_values=preprocess(images, Preprocessing(SIZE)))
    expected = getattr(expected, "pooler_output", expected)
    np.testing.assert_allclose(found, np.asarray(expected), atol=1e-4, rtol=1e-4)
    assert vectors.shape == (2, found.shape[1])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert not np.allclose(vectors[0], vectors[1])


def test_a_tower_alone_has_no_text(tmp_path: Path) -> None:
    save(clip, tmp_path)
    with pytest.raises(InputError, match="model type 'clip_vision_model' and no text tower"):
        class_vectors(f"hf:{tmp_path}", ["robin"])


def test_code_that_a_tokenizer_names_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(clip_with_words, tmp_path)
    tokenizer_of("a photo of robin wren").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # a user who is asked, and agrees
    with suppress(InputError):  # some versions of the library take a usual tokenizer instead
        class_vectors(f"hf:{tmp_path}", ["robin"])
    assert not Path("ran").exists()
