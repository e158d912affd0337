"""The user's own backbones: a module with named taps, a function, an object, a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mivhead
from mivhead import BlockPreset, FewShotClassifier, Preprocessing
from mivhead.backbones import from_callable, from_module, load_backbone
from mivhead.backbones.base import read_output
from mivhead.backbones.module import hooked
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import check, photos
from tests.helpers.tiny_backbone import TinyBackbone

SMALL = Preprocessing(size=32)


def network() -> nn.Sequential:
    """Two strided convolutions and a linear layer over the mean."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


class Reshaped(nn.Module):
    """Gives its map in another shape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 8, 8)
        self.out = nn.Identity()
        self.how = how

    def forward(self, x: Tensor) -> object:
        map_ = self.conv(x)  # (n, 6, 4, 4)
        tokens = map_.flatten(2).transpose(1, 2)  # (n, 16, 6)
        mean = tokens.mean(1, keepdim=True)
        return self.out(
            {
                "NHWC": map_.permute(0, 2, 3, 1),
                "tokens": tokens,
                "CLS": torch.cat([mean, tokens], 1),
                "registers": torch.cat([mean, tokens[:, :4] + 9, tokens], 1),
                "tuple": (torch.cat([mean, tokens], 1), None),
                "vector": mean[:, 0],
                "dictionary": {"map": map_},
                "flat": map_.flatten(),
            }[self.how]
        )


def test_module_conforms() -> None:
    backbone = from_module(network(), ["0", "1"], name="mine", preprocessing=SMALL, device="cpu")
    check(backbone)
    assert backbone.identity.name == "mine"
    assert backbone.preset.blocks == (BlockPreset((7, 6, 5)), BlockPreset((3,)))


def test_module_identity_depends_on_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 16, 16))
    first = from_module(model, ["0"], name="a").identity
    assert from_module(model, ["0"], name="a").identity == first
    with torch.no_grad():
        model[0].bias += 1
    assert from_module(model, ["0"], name="a").identity.weights != first.weights


@pytest.mark.parametrize("how", ["NHWC", "tokens", "CLS", "registers", "tuple", "vector"])
def test_shapes_of_taps(how: str) -> None:
    torch.manual_seed(0)
    model = Reshaped(how)
    features = from_module(
        model, ["out"], name=how, preprocessing=SMALL, dtype="float32", device="cpu"
    ).extract(photos(3))
    plain = from_module(
        model, ["conv"], name=how, preprocessing=SMALL, dtype="float32", device="cpu"
    ).extract(photos(3))
    map_ = plain.blocks[0].map
    assert map_ is not None
    block = features.blocks[0]
    if how != "vector":
        assert block.map is not None
        torch.testing.assert_close(block.map, map_)
    if how in ("CLS", "registers", "tuple", "vector"):
        assert block.token is not None
        torch.testing.assert_close(block.token, map_.mean((2, 3)))
    else:
        assert block.token is None


def test_tokens_without_a_grid_have_no_neighbours() -> None:
    parts = read_output(torch.ones(2, 15, 4), "x")
    assert {k: tuple(v.shape) for k, v in parts.items()} == {"map": (2, 4, 15, 1)}


@pytest.mark.parametrize("how", ["dictionary", "flat"])
def test_taps_that_give_no_features(how: str) -> None:
    with pytest.raises(InputError, match="tap"):
        from_module(Reshaped(how), ["out"], name=how, preprocessing=SMALL)


def test_values_too_large_for_float16_name_the_way_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8))
    nn.init.constant_(model[0].bias, 1e6)
    kind = {"name": "large", "preprocessing": SMALL, "device": "cpu"}
    with pytest.raises(InputError, match='dtype="float32"'):
        from_module(model, ["0"], **kind).extract(photos(1))
    assert from_module(model, ["0"], **kind, dtype="float32").extract(photos(1)).dtype.itemsize == 4


def colours(images: list[Image.Image]) -> list[np.ndarray]:
    """A 4 x 4 grid of colours, and their mean."""
    grid = np.stack([np.asarray(i.resize((4, 4)), np.float32) for i in images]) / 255
    return [grid.reshape(-1, 16, 3), grid.mean(axis=(1, 2))]


def test_function_conforms() -> None:
    backbone = from_callable(colours, name="colours", size=24)
    check(backbone)
    assert backbone.identity.preprocessing.size == 24
    assert backbone.preset.taps == ("block0", "block1")
    assert backbone.extract(photos(1)).layout == {"block0.map": (3, 4, 4), "block1.token": (3,)}


def test_function_gets_pictures_of_its_size() -> None:
    seen: list[tuple[str, tuple[int, int]]] = []

    def look(images: list[Image.Image]) -> np.ndarray:
        seen.extend((image.mode, image.size) for image in images)
        return np.ones((len(images), 2), np.float32)

    from_callable(look, name="look", size=20, blocks=[BlockPreset()]).extract(
        [np.zeros((7, 9), np.uint8), Image.new("L", (30, 40))]
    )
    assert seen == [("RGB", (20, 20))] * 2


def test_function_identity_is_its_name_and_version() -> None:
    first = from_callable(colours, name="colours").identity
    assert from_callable(colours, name="colours").identity == first
    assert from_callable(colours, name="colours", version="2").identity.weights != first.weights


def test_function_that_gives_the_wrong_thing() -> None:
    with pytest.raises(InputError, match="two received 1 images"):
        from_callable(lambda _: np.ones((2, 3)), name="two").extract(photos(1))
    sometimes = from_callable(colours, name="one", blocks=[BlockPreset()])
    with pytest.raises(InputError, match="expected 1 blocks"):
        sometimes.extract(photos(1))


OWN = """
from mivhead.backbones import from_callable
import numpy as np

def mean(images):
    return np.stack([np.asarray(image, np.float32).mean(axis=(0, 1)) for image in images])

mine = from_callable(mean, name="mean", size=8)

def make():
    return mine

nothing = 3
"""


def test_backbone_in_a_file_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_backbones.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for place in (tmp_path / "own_backbones.py", "own_backbones"):
        for name in ("mine", "make"):
            backbone = load_backbone(f"{place}:{name}")
            assert backbone.identity.name == "mean"
            assert backbone.extract(photos(2)).layout == {"block0.token": (3,)}
        with pytest.raises(InputError, match=r"must name an object with `identity`.*got 3"):
            load_backbone(f"{place}:nothing")
        with pytest.raises(InputError, match="got None"):
            load_backbone(f"{place}:missing")
    with pytest.raises(InputError, match="cannot be imported"):
        load_backbone(tmp_path / "missing.py:mine")
    with pytest.raises(InputError, match="no_such_module"):
        load_backbone("no_such_module:mine")
    with pytest.raises(InputError, match="omit weights"):
        load_backbone("own_backbones:mine", weights="random")


def test_a_model_file_cannot_have_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    red, blue = (np.full((8, 8, 3), colour, np.uint8) for colour in ((230, 30, 60), (20, 90, 210)))
    for name in ("own_code.py:mine", "own_code:mine"):
        fitted = FewShotClassifier(TinyBackbone(name), threshold=0).fit([red, blue], ["r", "b"])
        fitted.save(tmp_path / "model.miv")
        with pytest.raises(NotAvailableError, match=r"must not .* run code"):
            mivhead.load(tmp_path / "model.miv").predict([red])
    assert not Path("ran").exists()


def test_taps_are_copies_that_later_layers_cannot_change() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before, after = (parts["map"] for parts in hooked(model, ["0", "1"])(x))
        assert before.min() < 0 <= after.min()
        torch.testing.assert_close(before, model[0](x))
        torch.testing.assert_close(after, before.relu())


def test_taps_stop_after_the_deepest() -> None:
    class Mine(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("not needed for the taps")

    model = nn.Sequential(nn.ReLU(), Mine())
    assert hooked(model, ["0"])(torch.ones(1, 1))[0]["token"] == 1


def test_taps_in_the_wrong_order_are_refused() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with pytest.raises(InputError, match="order in which they run"):
        hooked(model, ["1", "0"])(torch.ones(1, 1))


def test_taps_of_one_model_do_not_disturb_each_other() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    first, second = hooked(model, ["0"]), hooked(model, ["1"])
    one = torch.ones(1, 1)
    assert second(one)[0]["token"] == one.tanh()
    assert first(one)[0]["token"] == 1
