"""`miv demo`, in a small size."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from mivhead.cli import demo as command
from mivhead.cli.demo import Scale
from tests.helpers.extras import needs

pytestmark = needs("sklearn", "demo")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(command, "QUICK", Scale(classes=3, shots=3, new=4, queries=4, tasks=2))


def test_the_demo_from_end_to_end(miv, small, tmp_path):
    folder = tmp_path / "demo"
    answer = miv("demo", "--quick", "-o", folder)
    assert answer.code == 0
    assert answer.err == ""
    for step in ("Images", "Fit", "Predict", "Save and load", "Compare", "Picture"):
        assert re.search(rf"^\d\. {step}: ", answer.out, re.M)
    assert "learn 3 classes from 3 images each" in answer.out
    assert "of 12 new images" in answer.out
    assert "exactly the same" in answer.out
    for method in ("MIV-head", "ridge regression", "nearest centroid"):
        assert re.search(rf"^   {method} +\d+\.\d ± \d+\.\d %", answer.out, re.M)
    with Image.open(folder / "demo.png") as picture:
        assert picture.width > 1500
        assert len(np.unique(np.asarray(picture.convert("L")))) > 50
    assert len(list(folder.glob("shots/*/*.png"))) == 9
    assert miv("predict", folder / "digits.miv", folder / "new").code == 0


def test_the_demo_touches_only_its_own_folder(fails, tmp_path):
    mine = tmp_path / "shots" / "zero" / "1.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"precious")
    assert "something other than a demo" in fails("demo", "-o", tmp_path)
    assert "is a file" in fails("demo", "-o", mine)
    assert "does not exist" in fails("demo", "-o", tmp_path / "no" / "demo")
    assert "at least 2" in fails("demo", "-o", tmp_path / "demo", "--tasks", "1")
    assert mine.read_bytes() == b"precious"


def test_the_demo_as_json(miv, small, tmp_path):
    answer = miv("demo", "--quick", "-o", tmp_path / "demo", "--json", "--seed", "1")
    assert answer.code == 0
    document = json.loads(answer.out)
    assert document["images"] == 12
    assert 0 < document["right"] <= 12
    assert set(document["accuracies"]) == {"miv", "ridge", "ncc"}
    assert all(len(each) == 2 for each in document["accuracies"].values())
