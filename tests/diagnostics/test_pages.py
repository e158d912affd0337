"""The pages of results, in a real browser: what is typed survives a reload and works elsewhere."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead.diagnostics.explanation import CloseShot, Explanation, Vote
from mivhead.diagnostics.pages import SIDE, write_results
from mivhead.prediction import Prediction

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def explanation(name: str) -> Explanation:
    prediction = Prediction(name, "dog", 0.7, {"dog": 0.7, "horse": 0.3}, "dog", 0.1)
    votes = (
        *(Vote("texture (block 3)", 0.2, "dog", 0.9), Vote("texture (block 4)", 0.2, "dog", 0.4)),
        *(
            Vote("layout (block 4)", 0.1, "horse", -0.5),
            Vote("details (block 4)", 0.1, "dog", 0.01),
        ),
    )
    shots = (
        *(CloseShot("a.jpg", "dog", 0.5, 0.9), CloseShot("b.jpg", "dog", 0.3, 0.8)),
        CloseShot("c.jpg", "horse", 0.9, 0.4),
    )
    image = Image.fromarray(np.full((32, 18, 3), 90, np.uint8))  # small, and upright
    heat = np.full((2, 2), 0.25)
    return Explanation(prediction, "horse", heat, {3: heat}, shots, votes, image)


def test_reasons_in_words() -> None:
    found = explanation("new/1.jpg")
    assert found.words == "Texture points to dog; layout points to horse."
    assert found.other_attention("dog") == pytest.approx(0.2)
    assert found.other_attention("horse") == pytest.approx(0.1)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser.new_page()
        browser.close()


def test_corrections_survive_a_reload_and_work_from_any_folder(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "results.html"
    items = [explanation("new/1.jpg"), explanation("/elsewhere/2.jpg")]
    write_results(items, path, title="Results", classes=["dog", "horse"], model="pets.miv")
    page.goto(path.as_uri())
    first, second = page.locator("article").all()
    assert not first.locator("canvas").is_visible()  # the photo first, where it looked if asked
    page.get_by_label("where it looked").check()
    assert first.locator("canvas").bounding_box() == first.locator("img").first.bounding_box()
    assert first.locator("canvas").bounding_box()["height"] == SIDE
    first.get_by_role("button", name="none of these").click()
    first.get_by_role("button", name="horse").click()  # rather
    second.locator(".fix").fill("zebra")
    page.reload()
    pressed = first.locator("[aria-pressed=true]").all_inner_texts()
    assert (pressed, second.locator(".fix").input_value()) == (["horse 30%"], "zebra")
    assert page.locator("article.corrected").count() == 2
    assert "miv " not in page.locator("body").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download 2 corrections").click()
    assert "miv add pets.miv corrections.csv" in page.locator("header").inner_text()
    with download.value.path().open(newline="") as file:
        rows = sorted(csv.reader(file))
    assert rows == [
        ["/elsewhere/2.jpg", "zebra"],
        [f"{tmp_path.as_posix()}/new/1.jpg", "horse"],
        ["path", "label"],
    ]
    # Reasons are folded away; the attention to the class is all of it.
    assert not first.locator(".near").is_visible()
    first.locator("summary").click()
    assert first.locator(".why p").first.inner_text().startswith("Texture points to dog")
    shares = first.locator(".near").inner_text().split()
    assert shares == ["50%", "30%", "others", "20%", "horse"]
