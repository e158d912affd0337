"""Drawings of how a model classifies one image."""

import io
from pathlib import Path

import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead_bench.figures.plots import Case
from tests.helpers.extras import needs
from tests.helpers.tiny_backbone import TinyBackbone

drawn = needs("matplotlib", "plot")


@pytest.fixture
def model(shots: Path) -> FewShotClassifier:
    return FewShotClassifier(TinyBackbone(), verbose=False).fit(shots)


@drawn
def test_drawings_are_shown_and_written_only_on_request(model, queries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    image = queries / "red" / "0.png"
    figures = [
        Case(model, image).plot_attention(),
        Case(model, Image.open(image)).plot_attention(),
        Case(model, image).plot_tsne(truth="red"),
        model.evaluate(queries).plot(),
    ]
    for figure in figures:
        with Image.open(io.BytesIO(figure._repr_png_())) as picture:
            assert picture.format == "PNG"
    assert sorted(tmp_path.rglob("*")) == before
    Case(model, image).plot_attention("attention.svg")
    assert (tmp_path / "attention.svg").exists()
