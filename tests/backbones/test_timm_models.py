"""Any model of timm: taps, weights from a checkpoint, the hub's cache or nowhere."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mivhead
from mivhead import FewShotClassifier, MIVClassifier, Recipe
from mivhead.backbones import load_backbone
from mivhead.backbones.checkpoints import load_exactly, state_hash
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset, spread_taps
from mivhead.backbones.timm_models import (
    Intermediates,
    build,
    has_class_token,
    has_tokens,
    to_timm,
    usual_size,
)
from mivhead.errors import InputError, NotAvailableError
from mivhead.methods.base import pooled as pooled_vectors
from tests.helpers.conformance import check, photos

timm = pytest.importorskip("timm", reason="the extra timm is not installed")

TINY = "timm:test_resnet"


def random_state(spec: str, seed: int = 1) -> dict[str, Tensor]:
    """A state of the network that is not the one of weights="random"."""
    generator = torch.Generator().manual_seed(seed)
    state = build(spec, "random").state_dict()
    return {
        k: torch.rand(v.shape, generator=generator) if v.is_floating_point() else v
        for k, v in state.items()
    }


def hash_of(spec: str, state: dict[str, Tensor]) -> str:
    model = build(spec, "random")
    model.load_state_dict(state)
    return state_hash(model)


@pytest.mark.parametrize("spec", [TINY, "timm:test_vit"])
def test_conformance(spec: str) -> None:
    check(load_backbone(spec, weights="random", device="cpu"))


# One small model per kind of architecture, by name: a list made by timm grows with its versions.
CNNS = ["byobnet", "convnext", "efficientnet", "mambaout", "maxvit", "nfnet", "resnet"]
VITS = ["vit", "vit2", "vit3", "vit_relpos"]


@pytest.mark.parametrize("kind", CNNS + VITS)
def test_the_blocks_of_any_architecture(kind: str) -> None:
    name = f"test_{kind}"
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    model = timm.create_model(name, num_classes=0)
    backbone = load_backbone(f"timm:{name}", weights="random", device="cpu", dtype="float32")
    features = backbone.extract(photos(1))
    info = {each["module"]: each for each in model.feature_info}
    tapped = [info[tap] for tap in backbone.preset.taps]
    plain = kind in VITS
    assert plain == has_tokens(model)
    names = list(info)
    assert backbone.preset.taps == (spread_taps(names) if plain else tuple(names[-2:]))
    assert [block.channels for block in features.blocks] == [each["num_chs"] for each in tapped]
    side = model.pretrained_cfg["input_size"][1]
    sides = [(side // each["reduction"],) * 2 for each in tapped]
    assert [b.map.shape[2:] for b in features.blocks] == sides
    assert backbone.preset.threshold == 15
    assert {b.form for b in backbone.preset.blocks} == {"vit" if plain else "cnn"}
    has_cls = plain and has_class_token(model)
    assert all((block.token is not None) == has_cls for block in features.blocks)


def test_stages_whose_names_are_not_those_of_modules() -> None:
    spec = "timm:twins_pcpvt_small"
    backbone = load_backbone(spec, weights="random", device="cpu", image_size=64)
    assert backbone.preset.taps == ("block.2", "block.3")  # timm's names; the modules are blocks.N
    assert [block.channels for block in backbone.extract(photos(1)).blocks] == [320, 512]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hiera_tiny_224", r"cannot be tapped at blocks.9 and blocks.11 \(normalization of .*\): "),
        ("coat_tiny", "does not list its stages by name: "),
    ],
)
def test_an_architecture_that_cannot_be_tapped_gives_one_sentence(name: str, message: str) -> None:
    sentence = f"^timm:{name} {message}choose another model of timm, or give a preset"
    with pytest.raises(InputError, match=sentence) as caught:
        load_backbone(f"timm:{name}", weights="random")
    assert "\n" not in str(caught.value)


def test_registers_without_a_class_token_are_left_out() -> None:
    spec = "timm:vit_medium_patch16_reg4_gap_256"
    found = load_backbone(spec, weights="random", image_size=64).extract(photos(1))
    assert set(found.layout.values()) == {(512, 4, 4)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_small_patch14_dinov2.lvd142m", 224),  # trained at 518 pixels
        ("vit_small_patch16_dinov3.lvd1689m", 256),
        ("vit_base_patch32_384", 224),
        ("resnet50", None),
        ("swin_base_patch4_window12_384", None),  # its windows fit its own size
    ],
)
def test_large_vits_get_a_usual_input_size(name: str, size: int | None) -> None:
    assert usual_size(name) == size


def test_hierarchical_transformers_are_tapped_after_merging_and_after_the_norm() -> None:
    spec = "timm:swin_tiny_patch4_window7_224"
    backbone = load_backbone(spec, weights="random", device="cpu", dtype="float32")
    assert backbone.preset.taps == ("layers.3.downsample", "norm")
    features = backbone.extract(photos(2))
    assert list(features.layout.values()) == [(768, 7, 7), (768, 7, 7)]
    last = features.blocks[1].map
    assert last is not None
    np.testing.assert_allclose(last.mean(axis=1), np.zeros((2, 7, 7)), atol=1e-5)
    assert {b.form for b in backbone.preset.blocks} == {"vit"}


def test_registers_are_left_out() -> None:
    preset = Preset(("blocks.11",), (BlockPreset(),), Preprocessing(size=56))
    spec = "timm:vit_small_patch14_reg4_dinov2"
    found = load_backbone(spec, weights="random", preset=preset, dtype="float32").extract(photos(1))
    assert found.layout == {"block0.map": (384, 4, 4), "block0.token": (384,)}


def test_other_taps_and_sizes() -> None:
    taps = ("layer2", "layer3.0.conv1")
    preset = Preset(taps, (BlockPreset(), BlockPreset()), Preprocessing(size=96))
    found = load_backbone(TINY, weights="random", preset=preset).extract(photos(1))
    assert next(iter(found.layout.values()))[1:] == (12, 12)
    for taps, unknown in ((("layer9",), "layer9"), (("layer3.0.conv1", "pooled"), "pooled")):
        preset = Preset(taps, (BlockPreset(),) * len(taps))
        with pytest.raises(InputError, match=rf"has no tap '{unknown}'; similar names are .*\w"):
            load_backbone(TINY, weights="random", preset=preset)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_checkpoint(tmp_path: Path, suffix: str) -> None:
    state, path = random_state(TINY), tmp_path / f"weights.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    backbone = load_backbone(TINY, weights=path)
    assert backbone.identity.name == TINY
    assert backbone.identity.weights == hash_of(TINY, state)


def wrapped(state: dict[str, Tensor], how: str) -> object:
    """The same weights as different projects store them."""
    extra = {"fc.weight": torch.ones(3, 3), "fc.bias": torch.ones(3)}
    return {
        "torchvision": {**state, **extra},
        "DeiT": {"model": state, "epoch": 3},
        "DINO, whole training": {
            "student": {f"module.backbone.{k}": v + 1 for k, v in state.items()},
            "teacher": {f"backbone.{k}": v for k, v in state.items()} | {"head.mlp": torch.ones(1)},
        },
        "URL": {
            "state_dict": {**state, "cls_fn.weight": torch.ones(2, 2)},
            "best_val_acc": np.float64(0.7),
            "epoch": np.int64(4),
        },
        "old PyTorch": {k: v for k, v in state.items() if "num_batches" not in k},
        "data parallel": {f"module.{k}": v for k, v in state.items()},
    }[how]


@pytest.mark.parametrize(
    "how",
    ["torchvision", "DeiT", "DINO, whole training", "URL", "old PyTorch", "data parallel"],
)
def test_checkpoints_of_other_projects(tmp_path: Path, how: str) -> None:
    state, path = random_state("sdl_resnet18"), tmp_path / "weights.pth"
    torch.save(wrapped(state, how), path)
    assert load_backbone("sdl_resnet18", weights=path).identity.weights == hash_of(
        "sdl_resnet18", state
    )


def test_checkpoint_of_the_original_swin(tmp_path: Path) -> None:
    """It merges patches at the end of a stage, and keeps what can be computed."""
    spec = "timm:swin_tiny_patch4_window7_224"
    state = random_state(spec)
    original = {"head.weight": torch.ones(5, 768), "head.bias": torch.ones(5)}
    for name, tensor in state.items():
        part = name.split(".")
        if "downsample" in name:
            part[1] = str(int(part[1]) - 1)
        original[".".join(part)] = tensor
    original["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49)
    original["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    path = tmp_path / "swin.pth"
    torch.save({"model": original}, path)
    assert load_backbone(spec, weights=path).identity.weights == hash_of(spec, state)


def test_clip_of_transformers_gives_the_same_hidden_states() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    torch.manual_seed(0)
    theirs = transformers.CLIPVisionModel(config).eval()
    ours = timm.models.VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2,
        num_classes=0,
        pre_norm=True,
        norm_layer=partial(nn.LayerNorm, eps=1e-5),
        act_layer=timm.layers.QuickGELU,
    ).eval()
    inner = {k.removeprefix("vision_model."): v for k, v in theirs.state_dict().items()}
    state = {f"vision_model.{k}": v for k, v in inner.items()}  # as in the hub's files
    state |= {"text_model.final_layer_norm.weight": torch.ones(3), "logit_scale": torch.ones(())}
    load_exactly(ours, to_timm(state, ours), "ours", "theirs")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        output = theirs(x, output_hidden_states=True)
        hidden = output.hidden_states[1:]
        found = ours.forward_intermediates(x, intermediates_only=True, return_prefix_tokens=True)
        *_, last = Intermediates(ours, [0, 1], normed=False, pooled=True)(x)
    torch.testing.assert_close(last["token"], output.pooler_output)
    for expected, (map_, prefix_tokens) in zip(hidden, found, strict=True):
        torch.testing.assert_close(map_.flatten(2).transpose(1, 2), expected[:, 1:])
        torch.testing.assert_close(prefix_tokens, expected[:, :1])


def test_the_pooled_tap_is_what_a_classifier_would_see() -> None:
    model = timm.create_model("test_vit", num_classes=0).eval()
    x = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
        block, pooled = Intermediates(model, [1], normed=False, pooled=True)(x)
        (alone,) = Intermediates(model, [], pooled=True)(x)
        (plain,) = Intermediates(model, [1], normed=False)(x)
    torch.testing.assert_close(pooled["token"], expected)
    torch.testing.assert_close(alone["token"], expected)
    assert pooled.keys() == {"token"}
    torch.testing.assert_close(block["token"], plain["token"])


def test_a_pooled_tap_is_for_other_heads(tmp_path: Path) -> None:
    preset = Preset(
        ("blocks.4", "blocks.5", "pooled"),
        (BlockPreset(form="vit"), BlockPreset(form="vit"), BlockPreset(form="vit", pooled=True)),
        Preprocessing(size=160),
    )
    backbone = load_backbone("timm:test_vit", weights="random", preset=preset, dtype="float32")
    features = backbone.extract(photos(4))
    labels = ["a", "a", "b", "b"]
    np.testing.assert_array_equal(pooled_vectors(features), features.blocks[2].token)
    for recipe, taken in (
        (Recipe.paper(steps=1), [0, 1]),
        (Recipe.paper(steps=1, last_blocks=1), [0]),
    ):
        fitted = MIVClassifier(recipe, preset, random_state=0).fit(features, labels)
        assert fitted.head_.taken == taken
        before = fitted.predict_proba(features)
        mivhead.save(fitted, tmp_path / "m.miv")
        np.testing.assert_allclose(
            mivhead.load(tmp_path / "m.miv").predict_proba(features), before, atol=1e-6
        )
    with pytest.raises(InputError, match="last_blocks is 3, but the features have only 2 blocks"):
        MIVClassifier(Recipe.paper(last_blocks=3), preset).fit(features, labels)
    with pytest.raises(InputError, match="must be the last"):
        Preset(("a", "b"), (BlockPreset(pooled=True), BlockPreset()))


def test_mismatch_lists_the_names(tmp_path: Path) -> None:
    state, path = random_state(TINY), tmp_path / "weights.pth"
    for gone in ("bn1.weight", "bn1.bias"):
        del state[gone]
    state["surplus"] = torch.ones(1)
    state["conv1.0.weight" if "conv1.0.weight" in state else "conv1.weight"] = torch.ones(1)
    torch.save(state, path)
    with pytest.raises(InputError) as caught:
        load_backbone(TINY, weights=path)
    message = str(caught.value)
    assert "weights.pth is not a checkpoint of timm:test_resnet" in message
    assert "it lacks bn1.bias, bn1.weight" in message
    assert "it also has surplus" in message
    assert "it has with another shape conv1" in message


def test_checkpoint_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "vit.pth"
    torch.save(random_state("timm:test_vit"), path)
    with pytest.raises(InputError, match=r"it lacks bn1.bias, .* and \d+ more; it also has blocks"):
        load_backbone(TINY, weights=path)


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch attacked",)


def test_checkpoint_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.pth").write_bytes(pickle.dumps(Attack(), protocol=2))
    torch.save({"state_dict": Attack()}, "wrapped.pth")
    for name in ("plain.pth", "wrapped.pth"):
        with pytest.raises(InputError, match=f"{name} is not a checkpoint of plain tensors"):
            load_backbone(TINY, weights=name)
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.safetensors", b"not a file"), ("a.pth", b"not a file"), ("a.pth", b"")],
)
def test_damaged_checkpoint(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a checkpoint of plain tensors"):
        load_backbone(TINY, weights=path)
    with pytest.raises(InputError, match="does not exist"):
        load_backbone(TINY, weights=tmp_path / "missing.pth")


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="timm has no model 'resnet5O': did you mean resnet50"):
        load_backbone("timm:resnet5O")
    with pytest.raises(InputError, match="known for resnet18 are a1_in1k"):
        load_backbone("timm:resnet18.mine")


def offline(code: str, folder: Path) -> str:
    """Output of a process whose hub is out of reach and whose cache is this folder."""
    environment = {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_ENDPOINT": "https://hub.invalid"}
    return subprocess.run(
        [sys.executable, "-c", f"from mivhead.backbones import *\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_missing_weights_say_where_they_were_looked_for(tmp_path: Path) -> None:
    code = (
        "for name in ('deit_small', 'sdl_resnet18', 'timm:test_resnet'):\n"
        "    try: load_backbone(name)\n"
        "    except RuntimeError as error: print(type(error).__name__, error)"
    )
    deit, sdl, tiny = offline(code, tmp_path).splitlines()
    for line in (deit, sdl, tiny):
        assert line.startswith(NotAvailableError.__name__)
        assert "--weights FILE" in line
    assert str(tmp_path / "hub") in deit
    assert "facebookresearch/deit" in deit
    assert "VICO-UoE/URL" in sdl
    assert str(tmp_path / "hub") in tiny


def test_weights_in_the_cache_are_used(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    full = timm.create_model("test_resnet")
    save_file(full.state_dict(), snapshot / "model.safetensors")
    found = offline("print(load_backbone('timm:test_resnet').identity.weights)", tmp_path)
    full.reset_classifier(0)
    assert found == state_hash(full)


def test_another_input_size(tmp_path: Path) -> None:
    """Position embeddings of a checkpoint are resampled, and a model file remembers the size."""
    spec, path = "timm:test_vit", tmp_path / "vit.safetensors"
    save_file(build(spec, "random").state_dict(), path)
    usual = load_backbone(spec, weights=path)
    small = load_backbone(spec, weights=path, image_size=96)
    assert small.preset.preprocessing.size == 96
    side = small.extract(photos(1)).blocks[0].map.shape[2]  # type: ignore[union-attr]
    assert side == 6
    assert usual.extract(photos(1)).blocks[0].map.shape[2] == 10  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"image_size=7 .* smaller than a patch .* at least 14"):
        load_backbone("dinov2_small", weights="random", image_size=7)
    with pytest.raises(InputError, match=r"leave out image_size=96"):
        load_backbone("efficientnet_lite0", image_size=96)
    model = FewShotClassifier(spec, weights=path, image_size=96, threshold=0, cache=False)
    images = photos(4)
    expected = model.fit(images, ["a", "a", "b", "b"]).predict_proba(images)
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv", weights=path)
    np.testing.assert_allclose(again.predict_proba(images), expected, atol=1e-6)
