"""Tables and sections as plain values, which every format of a report is written from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A cell of a table."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A table; the first column holds names, the others numbers.

    Parameters
    ----------
    title
        One line.
    header
        Names of the columns.
    rows
        Cells, as many as columns.
    groups
        Titles over runs of columns with their widths; the first is over the names.
    rules
        Rows before which a line is drawn.
    notes
        Sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    groups: tuple[tuple[str, int], ...] = ()
    rules: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A picture as SVG, with a caption."""

    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Part of a report: text, tables, charts."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


def entries(values: Iterable[object]) -> tuple[Entry, ...]:
    """Make a row of plain cells."""
    return tuple(Entry(str(value)) for value in values)


def plain_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[object]], *notes: str
) -> Table:
    """Make a table without anything special; columns that are empty everywhere are left out."""
    cells = [[str(value) for value in row] for row in rows]
    kept = [i for i in range(len(header)) if not cells or any(row[i] for row in cells)]
    return Table(
        title,
        tuple(header[i] for i in kept),
        tuple(entries(row[i] for i in kept) for row in cells),
        notes=notes,
    )


def number(value: float) -> str:
    """Write a number with three digits that matter, NaN as unknown.

    >>> number(1234.5), number(12.345), number(0.01234), number(0), number(math.nan)
    ('1,234', '12.3', '0.0123', '0', 'unknown')
    """
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """Write a share as a percentage.

    >>> share(1, 8), share(1, 0), share(math.nan, 1)
    ('12.5 %', '-', '-')
    """
    return f"{100 * part / whole:.1f} %" if whole and not math.isnan(part / whole) else "-"


def p_value(p: float) -> str:
    """Write a p-value.

    >>> p_value(0.0312), p_value(2e-9)
    ('0.031', '<1e-6')
    """
    return "<1e-6" if p < 1e-6 else f"{p:.2g}"
