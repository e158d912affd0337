"""What commands print, and whether they can write to a file."""

import os
import time
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mivhead._util.text import one_line, percent, shorten, width
from mivhead.cli.output import interval, table


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


def test_a_long_string_is_shortened_at_once():
    began = time.process_time()
    assert shorten(2**20 * "x" + "e\u0301", 9) == "xxx...xxe\u0301"
    assert time.process_time() - began < 5  # character by character, it took hours


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


def test_percent_never_claims_certainty():
    assert percent(0.5) == "50 %"
    assert percent(0.996) == ">99 %"
    assert percent(1.0) == "100 %"
    assert percent(0.001) == "<1 %"
    assert percent(0.0) == "0 %"
    assert percent(0.8767, 1) == "87.7 %"
    assert percent(0.9999, 1) == ">99.9 %"
    assert interval((0.0, 0.5)) == "0 % to 50 %"


@pytest.mark.parametrize("command", ["fit", "extract"])
def test_output_is_checked_before_the_work(command, fails, shots, tmp_path, monkeypatch):
    monkeypatch.setattr("mivhead.model.readers.extract_table", None)  # calling it would fail
    foreign = tmp_path / "photo.jpg"
    foreign.write_bytes(b"precious")
    assert "does not exist" in fails(command, shots, "-o", tmp_path / "no" / "m.miv")
    assert "is a folder" in fails(command, shots, "-o", tmp_path)
    assert "is not a regular file" in fails(command, shots, "-o", os.devnull)
    assert "not overwritten" in fails(command, shots, "-o", foreign)
    assert foreign.read_bytes() == b"precious"


def test_a_model_does_not_replace_features(fails, features, tmp_path):
    before = features.read_bytes()
    assert "not overwritten" in fails("fit", features, "-o", features)
    assert features.read_bytes() == before


def test_a_folder_that_is_not_writable(fails, shots, tmp_path, monkeypatch):
    def refuse(**settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # tests may run as root
    error = fails("fit", shots, "-o", tmp_path / "m.miv")
    assert f"Cannot write to {tmp_path}: Permission denied." in error
