"""`miv explain`."""

import json
import re

import pytest

import mivhead


def test_explain_as_text_and_json(miv, model, new):
    answer = miv("explain", model, new / "rings" / "5.png")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"{new}/rings/5.png\n  rings ")
    # The attention to the shots of a class is all of it.
    for name in ("rings", answer.out.split("then ")[1].split()[0]):
        shares = re.findall(rf" {name} +<?(\d+) ?%  ", answer.out)
        assert sum(map(int, shares)) == pytest.approx(100, abs=2), answer.out
    document = json.loads(miv("explain", model, new, "--json").out)
    assert len(document["explanations"]) == 6
    assert document["explanations"][0]["shots"][0]["name"].endswith(".png")


def test_probabilities_say_nothing_about_what_is_none_of_these(model, new):
    loaded = mivhead.load(model)
    reasons = loaded.explain(new / "rings" / "5.png", reject=1)
    assert reasons.prediction.decision == "none of these"
    assert reasons.title == "none of these: unlike all your photos; closest: rings"


def test_explain_as_a_picture(miv, fails, model, new, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "why.png"
    assert miv("explain", model, new / "rings" / "5.png", "-o", picture, "--quiet").out == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "one image" in fails("explain", model, new, "-o", picture)
    assert "why.gif" in fails("explain", model, new, "-o", "why.gif")
