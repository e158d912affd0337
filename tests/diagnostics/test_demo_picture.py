"""The demo's picture: what it says about right and wrong predictions."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageColor

from mivhead.diagnostics import demo_picture
from mivhead.diagnostics.demo_picture import Bar, Card, draw_demo


def card(truth: str, **probabilities: float) -> Card:
    image = Image.new("RGB", (8, 8), "red")
    return Card(image, [np.eye(4)], image, truth, probabilities)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Draw, and return all strings in the picture."""

    def draw(sections: dict[str, list[Card]], bars: list[Bar]) -> list[str]:
        found: list[str] = []
        write = demo_picture._Page.write

        def noted(page, left, top, text, *rest, **style) -> None:
            found.append(text)
            write(page, left, top, text, *rest, **style)

        monkeypatch.setattr(demo_picture._Page, "write", noted)
        path = tmp_path / "demo.png"
        draw_demo(sections, bars, path, title="T", subtitle="S", chart_title="C")
        with Image.open(path) as picture:
            colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24)}
        assert {(255, 0, 0), ImageColor.getrgb(demo_picture.RIGHT)} <= colours  # image, bars
        return found

    return draw


def test_right_and_wrong_cards(texts):
    right = card("cat", cat=0.9, dog=0.06, eel=0.03, fox=0.01)
    wrong = card("$5", dog=0.6, cat=0.4)
    found = texts({"Right": [right], "Wrong": [wrong]}, [Bar("ours", 0.9, 0.02)])
    assert {"T", "S", "C", "Right", "Wrong", "90 %", "6 %", "60 %", "is $5"} <= set(found)
    assert "is cat" not in found
    assert "fox" not in found  # only the three most probable classes
    assert "90.0 ± 2.0 %" in found


def test_sections_without_cards_are_omitted(texts):
    found = texts({"First": [card("cat", cat=1.0)] * 6, "Mistakes": []}, [Bar("ours", 0.9, 0.0)])
    assert "Mistakes" not in found
    assert found.count("First") == 1
    assert found.count("closest shot") == 6
