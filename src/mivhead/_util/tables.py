"""CSV files: read from anyone, and written so that a spreadsheet runs none of their text."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import IO

from mivhead._util.text import one_line
from mivhead.errors import InputError, reading

PATHS = ("path", "file", "image", "filename", "file_name")  # names of a column of image files
LABELS = ("label", "class")
MAX_LINE = 2**20  # characters
BYTE_ORDER_MARK = "\ufeff"  # by which Excel recognises UTF-8
# What a spreadsheet takes for a formula, also where it takes semicolons for separators.
_FORMULA = re.compile(r"(^|;)(\s*[=+\-@＝＋－＠])")  # noqa: RUF001  # full-width forms


def read_csv(file: IO[bytes], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, with their line numbers; cells are stripped.

    The separator is a comma, semicolon or tab, and the encoding UTF-8, or UTF-16 with a mark.
    """
    marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    file.seek(0)
    text = io.TextIOWrapper(file, "utf-16" if marked else "utf-8-sig", newline="")
    try:
        with reading(name, csv.Error):
            first = text.readline(MAX_LINE)
            lines = itertools.chain([first], iter(partial(text.readline, MAX_LINE), ""))
            reader = csv.reader(lines, delimiter=max(",;\t", key=first.count), strict=True)
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield reader.line_num, cells
    except UnicodeError:
        raise InputError(f"{name} is not encoded in UTF-8: save it as CSV in UTF-8.") from None
    finally:
        with suppress(ValueError):  # the file is closed already
            text.detach()


def find_column(header: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the place of the first column that has one of these names, in any case.

    >>> find_column(["ID", "Path"], ("path", "file"))
    1
    """
    known = {name.casefold() for name in names}
    return next((i for i, cell in enumerate(header) if cell.casefold() in known), None)


def read_columns(
    file: IO[bytes],
    name: str,
    *columns: Sequence[str],
    optional: Sequence[str] = (),
    is_data: Callable[[str], bool] | None = None,
    option: str | None = None,
) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of these columns, which a header names, with the number of their line.

    If there is no header, because the first cell is data, they are the first columns. A cell of an
    optional column, the last one, may be empty. `option` is what names a column on a command line.
    """
    rows = read_csv(file, name)
    line, header = next(rows, (0, []))
    places = [find_column(header, names) for names in columns]
    if None in places:
        if not header or is_data is None or not is_data(header[0]):
            wanted = " and ".join("/".join(names) for names in columns)
            hint = f": name one with {option}" if option else ""
            raise InputError(
                f"{name} needs the columns {wanted}; it has {', '.join(header)}{hint}."
            )
        places, rows = [*range(len(columns))], itertools.chain([(line, header)], rows)
    if optional:
        places.append(find_column(header, optional))
    for line, row in rows:
        cells = ["" if i is None or i >= len(row) else row[i] for i in places]
        if not all(cells[: len(columns)]):
            raise InputError(f"{name}, line {line}: a cell is missing in {row}.")
        yield line, cells


def number(value: float) -> Decimal:
    """Return a number with six digits, as all tables of predictions show them."""
    return Decimal(f"{value:.6f}")


def to_csv(header: Sequence[str], rows: Iterable[Sequence[object]], *, excel: bool = False) -> str:
    r"""Format rows as CSV; text is neither a formula in a spreadsheet nor a command to a terminal.

    With `excel`, it starts with a mark and has the line ends of Windows. None is an empty cell.

    >>> to_csv(["file", "score"], [["=a.jpg", -1.5], ["red \x1b[31m", None]])
    "file,score\n'=a.jpg,-1.5\nred ?[31m,\n"
    """
    out = io.StringIO(newline="")
    out.write(BYTE_ORDER_MARK * excel)
    writer = csv.writer(out, lineterminator="\r\n" if excel else "\n")
    for row in (header, *rows):
        writer.writerow([_plain(cell) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()


def _plain(text: str) -> str:
    return _FORMULA.sub(r"\1'\2", one_line(text))
