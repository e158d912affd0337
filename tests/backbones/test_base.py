"""The protocol's own parts: identity, preprocessing, the registry of names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from mivhead.backbones import list_backbones, load_backbone, module_of
from mivhead.backbones.base import Identity, may_be_named_by_file, preprocess
from mivhead.backbones.preset import Preprocessing
from mivhead.errors import InputError
from tests.helpers.conformance import photos

ME = Identity("mine", "ab" * 32, Preprocessing(size=64), ("layer3", "layer4"))


def test_identity_key_depends_on_every_part() -> None:
    others = [
        Identity("other", ME.weights, ME.preprocessing, ME.taps),
        Identity(ME.name, "cd" * 32, ME.preprocessing, ME.taps),
        Identity(ME.name, ME.weights, Preprocessing(size=65), ME.taps),
        Identity(ME.name, ME.weights, Preprocessing(size=64, std=(1.0, 1.0, 1.0)), ME.taps),
        Identity(ME.name, ME.weights, ME.preprocessing, ME.taps[::-1]),
    ]
    assert len({ME.key, *(other.key for other in others)}) == 6


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), 3),
        (("weights",), "abc"),
        (("taps",), "layer4"),
        (("taps",), [4]),
        (("preprocessing",), []),
        (("preprocessing", "size"), True),
        (("preprocessing", "size"), 10**9),
        (("preprocessing", "std"), [0.5, 0.5, 0.0]),
        (("preprocessing", "mean"), [0.5, 0.5]),
        (("preprocessing", "std"), [0.5, 0.5, float("nan")]),
        (("preprocessing", "crop"), 1),
        (("surplus",), 1),
    ],
)
def test_identity_refuses_foreign_json(path: tuple[str, ...], value: object) -> None:
    document = ME.as_json()
    target = document["preprocessing"] if len(path) == 2 else document
    target[path[-1]] = value
    with pytest.raises(InputError):
        Identity.from_json(document)


def test_preprocess_equals_the_plain_formula() -> None:
    settings = Preprocessing(size=48)
    photo = photos(1)[0]
    resized = np.asarray(Image.fromarray(photo).resize((48, 48), Image.Resampling.BICUBIC))
    expected = (resized / 255 - np.array(settings.mean)) / np.array(settings.std)  # (R, R, 3)
    found = preprocess([photo], settings)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        np.ones((5, 5, 3), np.float32),
        np.ones((5, 5, 4), np.uint8),
        np.ones((0, 5, 3), np.uint8),
        np.ones((1, 5, 5, 3), np.uint8),
        "photo.jpg",
    ],
)
def test_preprocess_names_the_bad_image(bad: object) -> None:
    with pytest.raises(InputError, match="Image 1"):
        preprocess([photos(1)[0], bad], Preprocessing())  # type: ignore[list-item]


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'efficientnet_lite0'"):
        load_backbone("efficientnet-lite0")
    with pytest.raises(InputError, match="`miv backbones list` shows all names"):
        load_backbone("zzz")


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="'int8'"):
        load_backbone(dtype="int8")


@pytest.mark.parametrize(
    "name",
    [
        *("my.onnx", "/etc/my.onnx", "../my.onnx", "//host/my.onnx", "my.py:net", "os:system"),
        *("http://host/", "https://host/v1#model=m", "hf://owner/name", "resnet50+resnet18"),
        *("hf-onnx:owner/name", "hf-onnx:/etc", "hf-onnx:../x", "hf-onnx:./x/y", "hf-onnx:~/x"),
        *("open_clip:/etc", "open_clip:../x", "open_clip:./x", "open_clip:a/../b", "timm:../x"),
        *("hf-onnx:a--b/c", "hf-onnx:a./b", "hf-onnx:a/b.git"),  # which the hub's library refuses
        *("timm:/x", "timm:hf_hub:owner/name", "timm:local-dir:/etc", "", "nothing", "a\nb"),
    ],
)
def test_a_file_names_only_what_is_safe_to_load(name: str) -> None:
    assert not may_be_named_by_file(name)


def test_a_file_may_name_what_is_known() -> None:
    specs = ("timm:resnet50.a1_in1k", "open_clip:ViT-B-32/laion2b_s34b_b79k")
    assert all(map(may_be_named_by_file, [*list_backbones(), *specs]))


@pytest.mark.parametrize("name", ["timm:net.onnx", "open_clip:owner/net.onnx"])
def test_what_a_file_may_name_is_no_file_whatever_its_suffix(name: str) -> None:
    assert may_be_named_by_file(name)
    assert module_of(name) != "onnx_model"
