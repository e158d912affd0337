"""The tables of a report as LaTeX, in the layout of the paper (package booktabs)."""

from __future__ import annotations

from collections.abc import Iterable

from mivhead.benchmark.report.model import Entry, Section, Table

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
    lines += [_row(map(escape, table.header)), r"\midrule"]
    for place, row in enumerate(table.rows):
        if place in table.rules:
            lines.append(r"\midrule")
        lines.append(_row(map(_cell, row)))
    caption = " ".join([f"{escape(table.title)}.", *(escape(note) for note in table.notes)])
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}"]
    return "\n".join(lines)


def _groups(table: Table) -> list[str]:
    """Titles over their columns, each with a line below."""
    cells, lines, column = [], [], 1
    for title, width in table.groups:
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(title)}}}" if title else "")
        if title:
            lines.append(rf"\cmidrule(lr){{{column}-{column + width - 1}}}")
        column += width
    return [_row(cells), "".join(lines)]


def _cell(entry: Entry) -> str:
    text = escape(entry.text)
    return rf"\textbf{{{text}}}" if entry.bold else text


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape(text: str) -> str:
    r"""Write a text so that LaTeX prints it as it is.

    >>> print(escape("50 % of my_set"))
    50 \% of my\_set
    """
    return " ".join("".join(SPECIAL.get(letter, letter) for letter in text).split())
