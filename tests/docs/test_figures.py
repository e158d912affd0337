"""Figures of the documentation: from the results files, and each in one place."""

import re
import runpy
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = re.compile(r"<!-- figures: \w+ -->.*?<!-- end of [^>]*-->", re.S)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Percentages and areas under curves, not seconds; intervals of differences from 3 points on.
NUMBER = r"(?:\d\d\.\d|0\.\d{3})(?!\d|\.\d| m?s\b| [MG]B\b)"
INTERVAL = re.compile(r"(?<![\d.])-?(?:[3-9]|\d\d)\.\d ± \d+\.\d")
PAIR = re.compile(rf"(?=(?<![\d.])({NUMBER})(?:[^\d\n]{{1,40}})({NUMBER}))")


def figures(text: str) -> set[str]:
    """Return what cannot be the same by chance: intervals, and two numbers next to each other."""
    pairs = {f"{a} and {b}" for a, b in PAIR.findall(text)}
    return pairs | {" ".join(found.split()) for found in INTERVAL.findall(text)}


def places(pages: dict[str, str]) -> dict[str, list[str]]:
    """Return where each figure stands; what is generated may repeat what is generated."""
    found: dict[str, list[str]] = defaultdict(list)
    generated: dict[str, set[str]] = defaultdict(set)
    for name, text in pages.items():
        text = CODE.sub("", text)
        for block in GENERATED.findall(text):
            for figure in figures(block):
                if "±" not in figure:  # of hundreds of intervals, some are the same by chance
                    generated[figure].add(name)
        for paragraph in GENERATED.sub("", text).split("\n\n"):
            for figure in figures(paragraph):
                found[figure].append(name)
    return {f: [*where, *generated.get(f, ())] for f, where in found.items()}


def test_a_figure_stands_in_one_place():
    pages = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
        for page in PAGES
        if "_build" not in page.parts and page.name != "changelog.md"
    }
    twice = {figure: where for figure, where in places(pages).items() if len(where) > 1}
    assert not twice


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("| birds | 73.4 | 65.9 |", "reaches 73.4% with five shots and 65.9% with one", True),
        ("+3.1 ± 1.2", "the gain is 3.1 ± 1.2 points", True),
        ("| birds | 73.4 | 65.9 |", "reaches 73.4% with five shots and 62.0% with one", False),
        ("takes 12.0 s and 11.5 s", "takes 12.0 s, and 11.5 s", False),  # seconds are not figures
    ],
)
def test_the_search_finds_copies(first, second, found):
    where = places({"a.md": first, "b.md": second})
    assert any(len(each) > 1 for each in where.values()) == found


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("scipy")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_tables_and_chart_show_the_results_file(script):
    found = script["read"]()
    for page in script["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert "<!-- figures:" in text
        assert script["renew"](text, found) == text, "run python benchmarks/figures.py"
    assert script["chart"](found["10-way 5-shot"]) == script["CHART"].read_text(encoding="utf-8")


def test_the_lead_is_paired_and_its_interval_students(script):
    scores = {"a": {"miv": [0.9, 0.7], "ncc": [0.8, 0.5]}, "b": {"miv": [0.6], "ncc": [0.6]}}
    difference = script["lead"](scores, "ncc", ["a", "b"]).difference
    assert difference.signed == "+10.0 ± 24.8"  # 4.303 * 10 / sqrt(3)
    assert script["mean"](scores, "miv", ["a", "b"]) == pytest.approx(70)
