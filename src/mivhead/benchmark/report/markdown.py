"""A report as Markdown: the tables, for a page under version control."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mivhead.benchmark.report.model import Entry, Section, Table


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
    lines += [_line([_cell(entry) for entry in row]) for row in table.rows]
    notes = [f"\n{_escape(note)}" for note in table.notes]
    return "\n".join([f"**{_escape(table.title)}**", "", *lines, *notes])


def _header(table: Table) -> list[str]:
    groups = [title for title, width in table.groups for _ in range(width)]
    if len({title for title in groups if title}) < 2:
        return [_escape(name) for name in table.header]
    pairs = zip(groups, table.header, strict=True)
    return [_escape(f"{group}: {name}" if group else name) for group, name in pairs]


def _cell(entry: Entry) -> str:
    text = _escape(entry.text)
    return f"**{text}**" if entry.bold else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    for letter in "\\|*_<`":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())
