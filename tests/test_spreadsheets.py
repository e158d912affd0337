"""CSV cells: harmless for spreadsheets and terminals, and restored exactly."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mivhead.spreadsheets import neutralise, restore, to_csv

PIECES = ["=", "+", "-", "@", "'", ";", "\\", "x1b", "\x1b", "\n", "a", "\uff1d"]
TRICKY = st.lists(st.sampled_from(PIECES)).map("".join)


@given(st.one_of(st.text(), TRICKY, st.text(st.characters(categories=["Cs", "Cc", "Lu"]))))
def test_every_text_comes_back_from_a_file(text):
    cell = neutralise(text)
    assert restore(cell) == text
    assert cell.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in cell)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    for part in cell.split(";")[1:]:  # as Excel splits lines in many countries
        assert not part.startswith(("=", "+", "-", "@"))
    read = list(csv.reader(io.StringIO(to_csv(["name"], [[text]]), newline="")))
    assert [restore(cell) for cell in read[1]] == [text]


@pytest.mark.parametrize("text", ["photos/cat.jpg", "Rotkehlchen", "猫", "a b, c", "5-way", "x=1"])
def test_ordinary_names_stay_as_they_are(text):
    assert neutralise(text) == text


def test_numbers_are_numbers_and_raw_is_raw():
    rows = [["=a", -1.5, None, -2]]
    assert to_csv(["n", "x", "y", "z"], rows).splitlines()[1] == "'=a,-1.5,,-2"
    assert to_csv(["n", "x", "y", "z"], rows, raw=True).splitlines()[1] == "=a,-1.5,,-2"


def test_for_excel():
    text = to_csv(["name"], [["Möwe"]], excel=True)
    assert text == "\ufeffname\r\nMöwe\r\n"
