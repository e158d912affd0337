"""`miv export`, and the other commands on what it wrote."""

import json

import numpy as np
import pytest

from tests.cli.test_main import imported

LARGE = {"torch", "sklearn", "scipy", "onnx"}


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """An exported model; do not change it."""
    from mivhead.cli.main import main

    path = tmp_path_factory.mktemp("cli") / "model.onnx"
    assert main(["export", str(model), "-o", str(path), "--quiet"]) == 0
    return path


def test_predictions_and_facts_are_the_same(miv, model, exported, new):
    def predicted(file):
        predictions = json.loads(miv("predict", file, new, "--json").out)["predictions"]
        return {p["file"]: (p["closest"], p["probability"]) for p in predictions}

    mine, theirs = predicted(model), predicted(exported)
    assert mine.keys() == theirs.keys()
    for file, (label, probability) in mine.items():
        assert theirs[file][0] == label
        assert theirs[file][1] == pytest.approx(probability, abs=1e-4)
    assert miv("evaluate", exported, new).out == miv("evaluate", model, new).out
    facts, expected = (json.loads(miv("info", f, "--json").out) for f in (exported, model))
    assert (facts["kind"], facts["input"]) == ("exported", "images")
    for name in ("classes", "recipe", "backbone", "seed"):
        assert facts[name] == expected[name]


def test_nothing_large_is_imported(exported, new):
    names = imported("predict", exported, new)
    assert not names & LARGE
    assert "onnxruntime" in names


def test_from_features(miv, fails, model, features, new, tmp_path, monkeypatch):
    head = tmp_path / "head.onnx"
    assert miv("export", model, "-o", head, "--features").out.startswith(f"Saved {head} (")
    mine, theirs = (
        json.loads(miv("predict", f, features, "--json").out)["predictions"] for f in (model, head)
    )
    assert [p["closest"] for p in mine] == [p["closest"] for p in theirs]
    np.testing.assert_allclose(
        [p["probability"] for p in mine], [p["probability"] for p in theirs], atol=1e-3
    )
    assert "backbone" in fails("predict", head, new)


def test_refusals(fails, model, exported, features, new, tmp_path):
    foreign = tmp_path / "foreign.onnx"
    foreign.write_bytes(b"not a model")
    assert "foreign.onnx" in fails("info", foreign)
    assert "not overwritten" in fails("export", model, "-o", foreign)
    assert foreign.read_bytes() == b"not a model"
    assert "images" in fails("predict", exported, features)
    assert "no settings" in fails("predict", exported, new, "--weights", "random")
    assert "exported" in fails("export", exported)
    assert ".onnx" in fails("export", model, "-o", tmp_path / "model.pb")
    assert "--features" in fails("export", model, "--features", "--web", tmp_path / "page")


def test_a_page_for_the_browser(miv, fails, model, tmp_path, monkeypatch):
    from mivhead.export import web

    monkeypatch.setattr(web, "FOLDER", tmp_path / "runtime")
    web.FOLDER.mkdir()
    for name in web.RUNTIME:
        (web.FOLDER / name).write_text(f"/* {name} */")
    site = tmp_path / "site"
    answer = miv("export", model, "--web", site)
    size = (site / "index.html").stat().st_size
    assert [path.name for path in site.iterdir()] == ["index.html"]
    assert answer.out.startswith(f"Saved {site}/index.html ({size / 1e6:.1f} MB")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web, "FOLDER", tmp_path / "none")
    assert "make web-runtime" in fails("export", model, "--web", tmp_path / "other")
