"""A report as one HTML page that needs no network: tables, and charts inside the page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape

from mivhead.benchmark.report.model import Chart, Entry, Section, Table

STYLE = """
:root { --ink: #22303c; --pale: #66737f; --line: #dde3e8; --back: #fff; --best: #1f7a5c; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; color: var(--ink);
  background: var(--back); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .8rem 0; }
a { color: #2b6399; text-decoration: none; }
p, figcaption { max-width: 56rem; }
.note { color: var(--pale); font-size: .87rem; margin: .3rem 0; }
.scroll { overflow: auto; max-height: 44rem; margin: .4rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; white-space: nowrap; }
th, td { padding: .22rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--back); }
thead th { border-bottom: 1px solid var(--ink); }
tr.group th { border-bottom: 1px solid var(--line); text-align: center; }
tr.rule td { border-top: 1px solid var(--ink); }
tbody tr:hover td { background: #f2f6f9; }
td b { color: var(--best); }
figure { margin: 1.4rem 0; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .4rem; }
figure img { max-width: 100%; height: auto; background: #fff; }
"""


def write_html(title: str, sections: Sequence[Section]) -> str:
    """Write the whole page."""
    links = "".join(f'<a href="#{_anchor(s.title)}">{escape(s.title)}</a>' for s in sections)
    body = "\n".join(map(_section, sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f'<h2 id="{_anchor(section.title)}">{escape(section.title)}</h2>']
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    parts += [html_table(table) for table in section.tables]
    parts += [_chart(chart) for chart in section.charts]
    return "\n".join(parts)


def html_table(table: Table) -> str:
    """Write one table with its notes."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    groups = ""
    if len([title for title, _ in table.groups if title]) > 1:
        cells = (f'<th colspan="{width}">{escape(title)}</th>' for title, width in table.groups)
        groups = f'<tr class="group">{"".join(cells)}</tr>'
    rows = "\n".join(
        ('<tr class="rule">' if place in table.rules else "<tr>")
        + "".join(f"<td>{_html_cell(entry)}</td>" for entry in row)
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption>'
        f"<thead>{groups}<tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>{notes}"
    )


def _html_cell(entry: Entry) -> str:
    return f"<b>{escape(entry.text)}</b>" if entry.bold else escape(entry.text)


def _chart(chart: Chart) -> str:
    """Put a picture into the page; as an image of its own, its names cannot clash with others."""
    data = base64.b64encode(chart.svg.encode()).decode()
    caption = escape(chart.caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}"></figure>'
    )


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.casefold()).strip("-")


# The tables of a report as LaTeX, in the layout of the paper (package booktabs).


SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
    # At the beginning of a row they would belong to the \\ of the row above.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}


def write_latex(sections: Iterable[Section]) -> str:
    """Write all tables, for a document to include."""
    parts = ["% Tables of a mivhead benchmark; needs \\usepackage{booktabs}."]
    parts += [latex_table(table) for section in sections for table in section.tables]
    return "\n\n".join(parts) + "\n"


def latex_table(table: Table) -> str:
    r"""Write one table.

    >>> from mivhead.benchmark.report.model import plain_table
    >>> print(latex_table(plain_table("Scores", ["set", "miv"], [["my_set", "76.5 ± 1.2"]])))
    \begin{table}[t]
    \centering
    \begin{tabular}{@{}lc@{}}
    \toprule
    set & miv \\
    \midrule
    my\_set & 76.5 $\pm$ 1.2 \\
    \bottomrule
    \end{tabular}
    \caption{Scores.}
    \end{table}
    """
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\begin{{tabular}}{{@{{}}l{'c' * (len(table.header) - 1)}@{{}}}}",
        r"\toprule",
    ]
    if any(title for title, _ in table.groups):
        lines += _groups(table)
    lines += [_row(map(escape_latex, table.header)), r"\midrule"]
    for place, row in enumerate(table.rows):
        if place in table.rules:
            lines.append(r"\midrule")
        lines.append(_row(map(_latex_cell, row)))
    caption = " ".join(
        [f"{escape_latex(table.title)}.", *(escape_latex(note) for note in table.notes)]
    )
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}"]
    return "\n".join(lines)


def _groups(table: Table) -> list[str]:
    """Titles over their columns, each with a line below."""
    cells, lines, column = [], [], 1
    for title, width in table.groups:
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(title)}}}" if title else "")
        if title:
            lines.append(rf"\cmidrule(lr){{{column}-{column + width - 1}}}")
        column += width
    return [_row(cells), "".join(lines)]


def _latex_cell(entry: Entry) -> str:
    text = escape_latex(entry.text)
    return rf"\textbf{{{text}}}" if entry.bold else text


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    r"""Write a text so that LaTeX prints it as it is.

    >>> print(escape_latex("50 % of my_set"))
    50 \% of my\_set
    """
    return " ".join("".join(SPECIAL.get(letter, letter) for letter in text).split())


# A report as Markdown: the tables, for a page under version control.


def write_markdown(title: str, sections: Iterable[Section]) -> str:
    """Write a whole report."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        parts += [markdown_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    r"""Write one table; the names of backbones join those of their columns.

    >>> from mivhead.benchmark.report.model import plain_table
    >>> print(markdown_table(plain_table("Scores", ["set", "miv"], [["a|b", 1.5]])))
    **Scores**
    <BLANKLINE>
    | set | miv |
    | --- | ---: |
    | a\|b | 1.5 |
    """
    lines = [_line(_header(table)), _line(["---"] + ["---:"] * (len(table.header) - 1))]
    lines += [_line([_markdown_cell(entry) for entry in row]) for row in table.rows]
    notes = [f"\n{_escape(note)}" for note in table.notes]
    return "\n".join([f"**{_escape(table.title)}**", "", *lines, *notes])


def _header(table: Table) -> list[str]:
    groups = [title for title, width in table.groups for _ in range(width)]
    if len({title for title in groups if title}) < 2:
        return [_escape(name) for name in table.header]
    pairs = zip(groups, table.header, strict=True)
    return [_escape(f"{group}: {name}" if group else name) for group, name in pairs]


def _markdown_cell(entry: Entry) -> str:
    text = _escape(entry.text)
    return f"**{text}**" if entry.bold else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    for letter in "\\|*_<`":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())
