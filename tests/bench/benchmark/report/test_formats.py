r"""LaTeX tables, read by the rules of TeX: whatever the names are, nothing breaks a document."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mivhead_bench.benchmark.report import write_report
from mivhead_bench.benchmark.report.formats import escape_latex, latex_table, plain_table
from tests.helpers.synthetic import cell, random_run

NASTY = r"[a*b] 5_1 & 50% #2 {x} \end{tabular} ~^$"
ESCAPED = re.compile(r"\\[\\&%$#_{}]")
RULES = (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule")


def bare(text: str) -> str:
    """Leave out what is escaped."""
    return ESCAPED.sub("", text)


def check_balance(text: str) -> None:
    """Braces, dollars and environments open and close in order."""
    depth = 0
    for letter in bare(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert bare(text).count("$") % 2 == 0
    open_: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_.append(name)
        else:
            assert open_.pop() == name
    assert open_ == []


def width(row: str) -> int:
    """Columns of a row."""
    spans = [re.match(r"\s*\\multicolumn\{(\d+)\}", c) for c in re.split(r"(?<!\\)&", row)]
    return sum(int(span[1]) if span else 1 for span in spans)


def check_tables(text: str) -> int:
    """Every row has as many cells as its table has columns; return the number of rows."""
    found = 0
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{@\{\}(l?c*)@\{\}\}\n(.*?)\n\\end\{tabular\}", text, re.DOTALL
    ):
        for line in body.split("\n"):
            if line.startswith(RULES):
                continue
            assert line.endswith(r" \\")
            assert not line.startswith(("[", "*")), r"it would belong to the \\ above"
            assert width(line.removesuffix(r" \\")) == len(columns)
            found += 1
    return found


def check_specials(text: str) -> None:
    """No letter is left that TeX would take for something else."""
    assert not set(bare(text)) & set('%#_^~"')
    outside = re.sub(r"\$[^$]*\$", "", bare(text))
    assert not set(outside) & set("<>|")


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    levels = {"ncc": 0.6, NASTY: 0.7, "miv": 0.8}
    run = random_run(["omniglot", "my_set #1", NASTY], levels)
    run += random_run(["omniglot", "my_set #1"], levels, backbone="dino_resnet50")
    run += cell("quickdraw", "miv", [0.5, 0.6]) + cell("quickdraw", NASTY, [None, 0.6])
    folder = tmp_path_factory.mktemp("report")
    write_report(run, folder, NASTY)
    return (folder / "tables.tex").read_text()


def test_a_whole_report(document):
    comment, _, rest = document.partition("\n")
    assert comment.startswith("% ")
    check_balance(rest)
    check_specials(rest)
    assert rest.count(r"\begin{table}") == rest.count(r"\begin{tabular}") >= 5
    assert check_tables(rest) > 20
    assert rest.isascii()


def test_the_papers_layout(document):
    """Backbones stand over their methods; significant results are bold."""
    first = document.split(r"\end{table}")[0]
    assert r"\multicolumn{3}{c}{resnet50} & \multicolumn{3}{c}{dino\_resnet50} \\" in first
    assert r"\cmidrule(lr){2-4}\cmidrule(lr){5-7}" in first
    assert re.search(r"^Omniglot & .*\\textbf\{[\d.]+ \$\\pm\$ [\d.]+\}", first, re.MULTILINE)
    assert "OOM" in first


@given(st.text(string.printable, max_size=30))
def test_any_text(text):
    table = latex_table(plain_table(text, ["set", text], [[text, "1"], [text, "2"]], text))
    check_balance(table)
    check_tables(table)
    check_specials(escape_latex(text))
