"""`miv explain`, and the pages of `miv predict` and `miv fit`."""

import json
import re

import pytest


def test_explain_as_text_and_json(miv, model, new):
    answer = miv("explain", model, new / "rings" / "5.png")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"{new}/rings/5.png\n  rings ")
    assert re.search(r"^  [A-Z][a-z, ]+ speaks? for rings", answer.out, re.M)
    assert "log-odds" not in answer.out
    assert "block" not in answer.out
    # The attention to the shots of a class is all of it.
    for name in ("rings", answer.out.split("then ")[1].split()[0]):
        shares = re.findall(rf" {name} +<?(\d+) %  ", answer.out)
        assert sum(map(int, shares)) == pytest.approx(100, abs=2), answer.out
    answer = miv("explain", model, new / "rings" / "5.png", "--details")
    assert "log-odds of rings - " in answer.out
    document = json.loads(miv("explain", model, new, "--json").out)
    assert len(document["explanations"]) == 6
    assert document["explanations"][0]["shots"][0]["name"].endswith(".png")


def test_explain_as_a_picture_and_a_page(miv, fails, model, new, tmp_path):
    pytest.importorskip("matplotlib")
    picture, page = tmp_path / "why.png", tmp_path / "why.html"
    assert miv("explain", model, new / "rings" / "5.png", "-o", picture, "--quiet").out == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert miv("explain", model, new, "-o", page).out.endswith(f"Saved {page}.\n")
    assert page.read_text().startswith("<!doctype html>")
    assert "write a .html page instead" in fails("explain", model, new, "-o", picture)
    assert "or .html file, got why.gif" in fails("explain", model, new, "-o", "why.gif")


def test_predictions_as_a_page(miv, fails, model, new, tmp_path):
    page = tmp_path / "results.html"
    answer = miv("predict", model, new, "--html", page, "--json")
    assert answer.code == 0, answer.err
    plain = json.loads(miv("predict", model, new, "--json").out)["predictions"]
    assert json.loads(answer.out)["predictions"] == plain
    assert "Wrote the page" in answer.err
    text = page.read_text()
    assert "model.miv: 6 images" in text
    assert all(f"{name}/5.png" in text for name in ("rings", "checks", "stripes"))
    assert ".html file" in fails("predict", model, new, "--html", "page.txt")
    assert "does not exist" in fails("predict", model, new, "--html", tmp_path / "no" / "p.html")


def test_suspicious_shots_as_a_page(miv, fails, copy, tmp_path):
    page, output = tmp_path / "fit.html", tmp_path / "m.miv"
    (copy / "rings" / "0.png").rename(copy / "stripes" / "wrong.png")
    arguments = ["fit", copy, "-o", output, "--no-augmentation"]
    answer = miv(*arguments, "--html", page)
    assert answer.code == 0, answer.err
    assert answer.out.endswith(f"Saved {page}.\n")
    assert "m.miv: suspicious shots" in page.read_text()
    assert "omit --no-check" in fails(*arguments, "--html", page, "--no-check")


def test_features_have_no_images_to_show(fails, model, features):
    assert "cannot be used with features" in fails("predict", model, features, "--html", "p.html")
