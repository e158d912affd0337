"""Plain text for people."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from mivhead.cli.output import interval, one_line, percent, shorten, table, width


@given(st.text(max_size=80), st.integers(8, 60))
def test_shortened_texts_fit_and_keep_their_ends(text, limit):
    short = shorten(text, limit)
    assert width(short) <= limit
    if width(text) <= limit:
        assert short == text
    else:
        head, _, tail = short.partition("...")
        assert text.startswith(head)
        assert text.endswith(tail)


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
