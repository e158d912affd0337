"""Any model of timm: taps, weights from a checkpoint, the hub's cache or nowhere."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mivhead
from mivhead import FewShotClassifier, MIVClassifier, Recipe
from mivhead.backbones import load_backbone
from mivhead.backbones.module import state_hash
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset, spread_taps
from mivhead.backbones.timm_models import (
    _config,
    _usual_size,
    build,
    has_class_token,
    has_tokens,
    intermediates,
)
from mivhead.errors import InputError, NotAvailableError
from mivhead_bench.methods.base import pooled as pooled_vectors
from tests.helpers.conformance import check, photos

timm = pytest.importorskip("timm", reason="the extra timm is not installed")

TINY = "timm:test_resnet"


def random_state(spec: str, seed: int = 1) -> dict[str, Tensor]:
    """A state of the network that is not the one of weights="random"."""
    generator = torch.Generator().manual_seed(seed)
    state = build(spec, "random").state_dict()
    return {
        k: torch.rand(v.shape, generator=generator) * 0.1 if v.is_floating_point() else v
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


@pytest.mark.parametrize("name", ["hiera_tiny_224", "coat_tiny"])
def test_an_architecture_that_cannot_be_tapped_gives_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match="preset") as caught:
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
    assert _usual_size(name, _config(name)) == size


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


def test_other_taps_and_sizes() -> None:
    taps = ("layer2", "layer3.0.conv1")
    preset = Preset(taps, (BlockPreset(), BlockPreset()), Preprocessing(size=96))
    found = load_backbone(TINY, weights="random", preset=preset).extract(photos(1))
    assert next(iter(found.layout.values()))[1:] == (12, 12)
    for taps, unknown in ((("layer9",), "layer9"), (("layer3.0.conv1", "pooled"), "pooled")):
        preset = Preset(taps, (BlockPreset(),) * len(taps))
        with pytest.raises(InputError, match=unknown):
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
    ["torchvision", "DeiT", "URL", "old PyTorch", "data parallel"],
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


def test_the_pooled_tap_is_what_a_classifier_would_see() -> None:
    model = timm.create_model("test_vit", num_classes=0).eval()
    x = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
        block, pooled = intermediates(model, [1], normed=False, pooled=True)(x)
        (alone,) = intermediates(model, [], pooled=True)(x)
        (plain,) = intermediates(model, [1], normed=False)(x)
    torch.testing.assert_close(pooled["token"], expected)
    torch.testing.assert_close(alone["token"], expected)
    assert pooled.keys() == {"token"}
    torch.testing.assert_close(block["token"], plain["token"])


def test_a_pooled_tap_is_for_other_heads() -> None:
    preset = Preset(
        ("blocks.4", "blocks.5", "pooled"),
        (BlockPreset(form="vit"), BlockPreset(form="vit"), BlockPreset(form="vit", pooled=True)),
        Preprocessing(size=160),
    )
    backbone = load_backbone("timm:test_vit", weights="random", preset=preset, dtype="float32")
    features = backbone.extract(photos(4))
    labels = ["a", "a", "b", "b"]
    np.testing.assert_array_equal(pooled_vectors(features), features.blocks[2].token)
    fitted = MIVClassifier(Recipe.paper(steps=1), preset, random_state=0).fit(features, labels)
    assert fitted.head_.taken == [0, 1]
    with pytest.raises(InputError, match="must be the last"):
        Preset(("a", "b"), (BlockPreset(pooled=True), BlockPreset()))


def test_mismatch_lists_the_names(tmp_path: Path) -> None:
    state, path = random_state(TINY), tmp_path / "weights.pth"
    del state["bn1.weight"]
    torch.save(state | {"surplus": torch.ones(1)}, path)
    with pytest.raises(InputError, match="surplus"):
        load_backbone(TINY, weights=path)


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch attacked",)


def test_checkpoint_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.pth").write_bytes(pickle.dumps(Attack(), protocol=2))
    torch.save({"state_dict": Attack()}, "wrapped.pth")
    for name in ("plain.pth", "wrapped.pth"):
        with pytest.raises(InputError, match="plain tensors"):
            load_backbone(TINY, weights=name)
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.safetensors", b"not a file"), ("a.pth", b"not a file"), ("a.pth", b"")],
)
def test_damaged_checkpoint(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match="plain tensors"):
        load_backbone(TINY, weights=path)
    with pytest.raises(InputError, match="missing"):
        load_backbone(TINY, weights=tmp_path / "missing.pth")


def offline(code: str, folder: Path) -> list[str]:
    """Output of a process whose hub is out of reach and whose cache is this folder."""
    environment = {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_ENDPOINT": "https://hub.invalid"}
    return subprocess.run(
        [sys.executable, "-c", f"from mivhead.backbones import *\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def test_weights_in_the_cache_missing_or_random_in_another_process(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    full = timm.create_model("test_resnet")
    save_file(full.state_dict(), snapshot / "model.safetensors")
    names = ("resnet18", "timm:test_resnet", "timm:test_vit")
    code = (
        "import torch\n"
        "print(load_backbone('timm:test_resnet').identity.weights)\n"
        "for name in ('deit_small', 'sdl_resnet18', 'timm:test_vit'):\n"
        "    try: load_backbone(name)\n"
        "    except RuntimeError as error: print(type(error).__name__, error)\n"
        "torch.manual_seed(7)\n"
        f"for name in {names}: print(load_backbone(name, weights='random').identity.key)"
    )
    found, deit, sdl, tiny, *keys = offline(code, tmp_path)
    full.reset_classifier(0)
    assert found == state_hash(full)
    for line in (deit, sdl, tiny):  # they say where they were looked for
        assert line.startswith(NotAvailableError.__name__)
        assert "--weights FILE" in line
    assert "VICO-UoE/URL" in sdl
    assert keys == [load_backbone(name, weights="random").identity.key for name in names]


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
    with pytest.raises(InputError, match="patch"):
        load_backbone("dinov2_small", weights="random", image_size=7)
    with pytest.raises(InputError, match="image_size=96"):
        load_backbone("efficientnet_lite0", image_size=96)
    model = FewShotClassifier(spec, weights=path, image_size=96, threshold=0, cache=False)
    images = photos(4)
    expected = model.fit(images, ["a", "a", "b", "b"]).predict_proba(images)
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv", weights=path)
    np.testing.assert_allclose(again.predict_proba(images), expected, atol=1e-6)
