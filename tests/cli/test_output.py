"""What commands print, and what they must not overwrite."""

import os
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mivhead._util.text import one_line, shorten, width
from mivhead.cli.output import table


@given(st.text(max_size=80), st.integers(8, 60))
@example("0.0000000", 8)
def test_shortened_texts_fit_and_keep_their_ends(text, limit):
    short = shorten(text, limit)
    assert width(short) <= limit
    if width(text) <= limit:
        assert short == text
    else:
        cuts = [i for i in range(len(short)) if short.startswith("...", i)]  # a text may have dots
        assert any(text.startswith(short[:i]) and text.endswith(short[i + 3 :]) for i in cuts)


@given(st.text(max_size=40))
def test_one_line_holds_no_control_characters(text):
    line = one_line(text)
    assert len(line) == len(text)
    assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in line)


@given(st.lists(st.tuples(st.text(max_size=70), st.integers(0, 10**6)), min_size=1, max_size=6))
def test_columns_are_aligned_whatever_the_names(rows):
    lines = table(["name", "count"], rows, right="count").split("\n")
    assert len(lines) == len(rows) + 1
    assert len({width(line) for line in lines}) == 1  # the last column is right-aligned


COMMANDS = {
    "fit": ["fit", "SHOTS", "-o"],
    "extract": ["extract", "SHOTS", "-o"],
    "rename": ["rename", "MODEL", "rings", "circles", "-o"],
    "predict": ["predict", "MODEL", "SHOTS", "-o"],
    "predict --html": ["predict", "MODEL", "SHOTS", "--html"],
    "predict --job": ["predict", "MODEL", "SHOTS", "--job"],
    "evaluate --picture": ["evaluate", "MODEL", "SHOTS", "--picture"],
    "explain": ["explain", "MODEL", "SHOTS", "-o"],
    "export": ["export", "MODEL", "-o"],
    "suggest --html": ["suggest", "SHOTS", "--html"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_of_the_user_is_overwritten(command, fails, shots, model, tmp_path, monkeypatch):
    """A photo, a folder, a device and a place that is not there are refused before any work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mivhead.model.model.extract_table", None)  # calling it would fail
    folder = tmp_path / "photos"
    folder.mkdir()
    kinds = "jpg", "png", "svg", "pdf", "csv", "json", "html", "parquet", "miv", "onnx"
    precious = [folder / "1.jpg", *(tmp_path / f"photo.{kind}" for kind in kinds)]
    for path in precious:
        path.write_bytes(b"precious")
    places = {"SHOTS": str(shots), "MODEL": str(model)}
    arguments = [places.get(word, word) for word in COMMANDS[command]]
    for target in (*precious, folder, os.devnull, tmp_path / "no" / "m.miv"):
        fails(*arguments, target)
    assert {*tmp_path.rglob("*")} == {folder, *precious}
    assert all(path.read_bytes() == b"precious" for path in precious)


def test_results_are_replaced(miv, shots, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo = next(shots.rglob("*.png"))
    for command in (
        ["predict", model, shots, "-o", "names.csv"],
        ["predict", model, shots, "-o", "names.json"],
        ["predict", model, shots, "--html", "names.html"],
        ["suggest", shots, "--html", "next.html"],
        *(["explain", model, photo, "-o", f"why.{kind}"] for kind in ("png", "svg", "pdf")),
    ):
        miv(*command)
        miv(*command)


def test_a_model_does_not_replace_features(fails, features):
    before = features.read_bytes()
    assert "not overwritten" in fails("fit", features, "-o", features)
    assert features.read_bytes() == before


def test_a_folder_that_is_not_writable(fails, shots, tmp_path, monkeypatch):
    def refuse(**settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # tests may run as root
    assert "Permission denied" in fails("fit", shots, "-o", tmp_path / "m.miv")
