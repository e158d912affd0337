"""Tables, charts and sections of a report, and how each format renders them.

A report is a list of `ReportSection`. `render_html` returns one page that needs no network,
`render_latex` the tables in the layout of the paper (package booktabs), `render_markdown` the
tables for a page under version control.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html

from mivhead._util.page import make_page
from mivhead._util.text import one_line


@dataclass(frozen=True)
class Entry:
    """One entry of a table."""

    text: str
    bold: bool = False
    underlined: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first column holds names and whose other columns hold numbers."""

    title: str  # one line
    header: tuple[str, ...]  # names of the columns
    rows: tuple[tuple[Entry, ...], ...]  # one entry per column
    # Titles that span several columns, with their widths; the first spans the names.
    groups: tuple[tuple[str, int], ...] = ()
    rules: frozenset[int] = frozenset()  # rows that are preceded by a line
    notes: tuple[str, ...] = ()  # sentences below the table


@dataclass(frozen=True)
class Chart:
    """A picture as SVG with a caption, and the same in other formats, by suffix."""

    caption: str
    svg: str
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name for files: the caption in lower case, with hyphens."""
        return re.sub("[^a-z0-9]+", "-", self.caption.lower()).strip("-")[:100]


@dataclass(frozen=True)
class ReportSection:
    """A part of a report: tables followed by charts."""

    title: str
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


def entries(values: Iterable[object]) -> tuple[Entry, ...]:
    """Make a row of plain entries."""
    return tuple(Entry(str(value)) for value in values)


def plain_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[object]], *notes: str
) -> Table:
    """Make a table without special formatting; columns that are empty in all rows are omitted."""
    cells = [[str(value) for value in row] for row in rows]
    kept = [i for i in range(len(header)) if not cells or any(row[i] for row in cells)]
    return Table(
        title,
        tuple(header[i] for i in kept),
        tuple(entries(row[i] for i in kept) for row in cells),
        notes=notes,
    )


def number(value: float) -> str:
    """Format a number with three significant digits, NaN as unknown.

    >>> number(1234.5), number(12.345), number(0.01234), number(0), number(math.nan)
    ('1,234', '12.3', '0.0123', '0', 'unknown')
    """
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """Format a ratio as a percentage.

    >>> share(1, 8), share(1, 0), share(math.nan, 1)
    ('12.5%', '-', '-')
    """
    return f"{100 * part / whole:.1f}%" if whole and not math.isnan(part / whole) else "-"


def p_value(p: float) -> str:
    """Format a p-value.

    >>> p_value(0.0312), p_value(2e-9)
    ('0.031', '<1e-6')
    """
    return "<1e-6" if p < 1e-6 else f"{p:.2g}"


# HTML

_STYLE = """
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .8rem 0; }
a { color: var(--accent); text-decoration: none; }
p, figcaption { max-width: 56rem; }
.note { color: var(--soft); font-size: .87rem; margin: .3rem 0; }
.scroll { overflow: auto; max-height: 44rem; margin: .4rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; white-space: nowrap; }
th, td { padding: .22rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--page); }
thead th { border-bottom: 1px solid var(--ink); }
tr.group th { border-bottom: 1px solid var(--line); text-align: center; }
tr.rule td { border-top: 1px solid var(--ink); }
tbody tr:hover td { background: var(--sunken); }
td b { color: var(--accent); }
figure { margin: 1.4rem 0; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .4rem; }
figure img { max-width: 100%; height: auto; background: #fff; }
"""


def render_html(
    title: str, sections: Sequence[ReportSection], origin: Mapping[str, str] | None = None
) -> str:
    """Render a report as one HTML page, with its charts inside; `origin` says how it was made."""
    links = "".join(f'<a href="#{_anchor(s.title)}">{_html(s.title)}</a>' for s in sections)
    parts = [f"<h1>{_html(title)}</h1>\n<nav>{links}</nav>"]
    for section in sections:
        parts.append(f'<h2 id="{_anchor(section.title)}">{_html(section.title)}</h2>')
        parts += map(html_table, section.tables)
        parts += map(_html_chart, section.charts)
    if origin:
        rows = (f"<dt>{_html(k)}</dt><dd>{_html(v)}</dd>" for k, v in origin.items())
        parts.append(f'<h2 id="origin">How this was made</h2>\n<dl>{"".join(rows)}</dl>')
    return make_page(one_line(title), "\n".join(parts), _STYLE)


def html_table(table: Table) -> str:
    """Render one table with its notes."""
    head = "".join(f"<th>{_html(name)}</th>" for name in table.header)
    groups = ""
    if len([title for title, _ in table.groups if title]) > 1:
        cells = (f'<th colspan="{width}">{_html(title)}</th>' for title, width in table.groups)
        groups = f'<tr class="group">{"".join(cells)}</tr>'
    rows = "\n".join(
        ('<tr class="rule">' if place in table.rules else "<tr>")
        + "".join(f"<td>{_html_entry(entry)}</td>" for entry in row)
        + "</tr>"
        for place, row in enumerate(table.rows)
    )
    notes = "".join(f'<p class="note">{_html(note)}</p>' for note in table.notes)
    return (
        f'<div class="scroll"><table><caption>{_html(table.title)}</caption>'
        f"<thead>{groups}<tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>{notes}"
    )


def _html(text: str) -> str:
    return escape_html(one_line(text))


def _html_entry(entry: Entry) -> str:
    return _marked(entry, _html(entry.text), "<b>{}</b>", "<u>{}</u>")


def _marked(entry: Entry, text: str, bold: str, underlined: str) -> str:
    """Put the markup of an entry around its escaped text."""
    text = bold.format(text) if entry.bold else text
    return underlined.format(text) if entry.underlined else text


def _html_chart(chart: Chart) -> str:
    """Embed a chart as an image, so that its ids cannot clash with those of other charts."""
    data = base64.b64encode(chart.svg.encode()).decode()
    caption = _html(chart.caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}"></figure>'
    )


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.casefold()).strip("-")


# LaTeX

_SPECIAL = {
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
    # At the start of a row these would become options of the \\ that ends the row above.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}


def render_latex(sections: Iterable[ReportSection]) -> str:
    """Render all tables, for a document to include."""
    parts = ["% Tables of a mivhead benchmark; needs \\usepackage{booktabs}."]
    parts += [latex_table(table) for section in sections for table in section.tables]
    return "\n\n".join(parts) + "\n"


def latex_table(table: Table) -> str:
    r"""Render one table.

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
        lines += _latex_groups(table)
    lines += [_latex_row(map(escape_latex, table.header)), r"\midrule"]
    for place, row in enumerate(table.rows):
        if place in table.rules:
            lines.append(r"\midrule")
        lines.append(_latex_row(map(_latex_entry, row)))
    caption = " ".join([f"{escape_latex(table.title)}.", *map(escape_latex, table.notes)])
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}"]
    return "\n".join(lines)


def _latex_groups(table: Table) -> list[str]:
    """Return the titles over their columns, each with a line below."""
    cells, lines, column = [], [], 1
    for title, width in table.groups:
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(title)}}}" if title else "")
        if title:
            lines.append(rf"\cmidrule(lr){{{column}-{column + width - 1}}}")
        column += width
    return [_latex_row(cells), "".join(lines)]


def _latex_entry(entry: Entry) -> str:
    return _marked(entry, escape_latex(entry.text), r"\textbf{{{}}}", r"\underline{{{}}}")


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    r"""Escape a string so that LaTeX prints it literally.

    >>> print(escape_latex("50% of my_set"))
    50\% of my\_set
    """
    letters = (_SPECIAL.get(letter, letter) for letter in one_line(text))
    return " ".join("".join(letters).split())


# Markdown


def render_markdown(title: str, sections: Iterable[ReportSection]) -> str:
    """Render all tables under their headings."""
    parts = [f"# {_escape_markdown(title)}"]
    for section in sections:
        parts += [f"## {section.title}", *map(markdown_table, section.tables)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    r"""Render one table; the titles of groups become part of the column names.

    >>> print(markdown_table(plain_table("Scores", ["set", "miv"], [["a|b", 1.5]])))
    **Scores**
    <BLANKLINE>
    | set | miv |
    | --- | ---: |
    | a\|b | 1.5 |
    """
    header = list(table.header)
    if len([title for title, _ in table.groups if title]) > 1:
        groups = [title for title, width in table.groups for _ in range(width)]
        pairs = zip(groups, table.header, strict=True)
        header = [f"{group}: {name}" if group else name for group, name in pairs]
    rows = [
        [_marked(e, _escape_markdown(e.text), "**{}**", "<u>{}</u>") for e in row]
        for row in table.rows
    ]
    lines = [map(_escape_markdown, header), ["---"] + ["---:"] * (len(header) - 1), *rows]
    notes = [f"\n{_escape_markdown(note)}" for note in table.notes]
    title = f"**{_escape_markdown(table.title)}**"
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), *notes])


def _escape_markdown(text: str) -> str:
    """Make a name inert: it is no tag, link, heading or table, whatever it holds."""
    return " ".join(re.sub(r"([\\|*_<>`~#!&\[\]])", r"\\\1", one_line(text)).split())
