"""`miv demo`, in a small size."""

import re

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from mivhead.cli import demo as command
from mivhead.cli._demo_steps import Comparison
from mivhead.cli.demo import Scale
from tests.helpers.extras import needs

pytestmark = needs("matplotlib", "plot")


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
    for method in ("MIV-head", "logistic regression", "nearest centroid"):
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
    assert "something else" in fails("demo", "-o", tmp_path)
    assert "is a file" in fails("demo", "-o", mine)
    assert "does not exist" in fails("demo", "-o", tmp_path / "no" / "demo")
    assert "at least 2" in fails("demo", "-o", tmp_path / "demo", "--tasks", "1")
    assert mine.read_bytes() == b"precious"


def test_statistics_of_the_comparison():
    values = {"miv": np.array([0.9, 0.8, 0.85]), "ncc": np.array([0.7, 0.75, 0.7])}
    result = Comparison(values)
    low, high = stats.t.interval(
        0.95, df=2, loc=values["miv"].mean(), scale=stats.sem(values["miv"])
    )
    assert result.mean("miv") == pytest.approx(0.85)
    assert result.half_width("miv") == pytest.approx((high - low) / 2)
    gap, p = result.difference("miv", "ncc")
    assert gap == pytest.approx(0.4 / 3)
    assert p == pytest.approx(stats.ttest_rel(values["miv"], values["ncc"]).pvalue)
    assert result.difference("miv", "miv") == (0.0, 1.0)
