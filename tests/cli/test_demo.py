"""`miv demo`, in a small size."""

import json
import re

import pytest

from mivhead.cli import demo
from tests.helpers.extras import needs

pytestmark = needs("sklearn", "demo")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("NAMES", demo.NAMES[:3]), ("SHOTS", 3), ("NEW", 4)):
        monkeypatch.setattr(demo, name, value)


def test_the_demo_from_end_to_end(miv, tmp_path):
    folder = tmp_path / "demo"
    answer = miv("demo", "-o", folder)
    assert (answer.code, answer.err) == (0, "")
    for step in ("Images", "Fit", "Predict and evaluate", "Save and load", "Explain"):
        assert re.search(rf"^\d\. {step}: ", answer.out, re.M)
    assert "Of 100 photos, " in answer.out
    assert (folder / "results.html").stat().st_size > 10_000
    assert len(list(folder.glob("shots/*/*.png"))) == 9
    document = json.loads(miv("demo", "-o", folder, "--json").out)  # again, into its own folder
    assert document["images"] == 12
    assert 0 < document["right"] <= 12


def test_the_demo_touches_only_its_own_folder(fails, tmp_path):
    mine = tmp_path / "shots" / "zero" / "1.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"precious")
    assert "something other than a demo" in fails("demo", "-o", tmp_path)
    assert "is a file" in fails("demo", "-o", mine)
    assert "does not exist" in fails("demo", "-o", tmp_path / "no" / "demo")
    assert mine.read_bytes() == b"precious"
