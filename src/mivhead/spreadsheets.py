r"""Text in CSV files: neither a formula in a spreadsheet nor a command to a terminal.

Names of files and classes may come from strangers. A spreadsheet runs a cell such as
`=HYPERLINK(...)`, and a terminal obeys escape sequences. `neutralise` makes both harmless, and
`restore` returns the original text:

1. A backslash becomes two.
2. Control characters, characters that reverse the direction of text, line separators, and `=`, `+`,
   `-` and `@` after a semicolon become `\xNN` or `\uNNNN`, as in Python.
3. Text that then starts with `=`, `+`, `-`, `@`, one of their full-width forms, or an apostrophe
   gets an apostrophe in front, which spreadsheets take as "this is text".
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from io import StringIO

__all__ = ["neutralise", "number", "restore", "to_csv"]

BYTE_ORDER_MARK = "\ufeff"  # by which Excel recognises UTF-8
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "'")  # noqa: RUF001  # full-width forms
_AFTER_SEMICOLON = re.compile(r"(?<=;)[=+\-@＝＋－＠]")  # noqa: RUF001  # where Excel takes semicolons for separators
_UNSAFE = ("Cc", "Cs", "Zl", "Zp")  # control, surrogate, line and paragraph separators
_DIRECTIONS = range(0x202A, 0x202F), range(0x2066, 0x206A)
_ESCAPE = re.compile(r"\\(\\|x[0-9a-f]{2}|u[0-9a-f]{4})")


def neutralise(text: str) -> str:
    r"""Return text that is safe in a cell of a CSV file, by the rule of this module.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    str

    Examples
    --------
    >>> neutralise("=1+1"), neutralise("red \x1b[31m"), neutralise("photos/cat.jpg")
    ("'=1+1", 'red \\x1b[31m', 'photos/cat.jpg')
    """
    safe = "".join(_escape(c) if c == "\\" or _is_unsafe(c) else c for c in text)
    safe = _AFTER_SEMICOLON.sub(lambda found: _escape(found[0]), safe)
    return f"'{safe}" if safe.startswith(_FORMULA) else safe


def restore(cell: str) -> str:
    r"""Return the text that `neutralise` was given.

    Parameters
    ----------
    cell : str
        A cell of a CSV file that mivhead wrote.

    Returns
    -------
    str

    Examples
    --------
    >>> restore("'=1+1"), restore("red \\x1b[31m") == "red \x1b[31m"
    ('=1+1', True)
    """
    cell = cell.removeprefix("'")
    return _ESCAPE.sub(lambda found: "\\" if found[1] == "\\" else chr(int(found[1][1:], 16)), cell)


def _is_unsafe(character: str) -> bool:
    directions = any(ord(character) in each for each in _DIRECTIONS)
    return directions or unicodedata.category(character) in _UNSAFE


def _escape(character: str) -> str:
    if character == "\\":
        return r"\\"
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def number(value: float) -> Decimal:
    """Return a number with six digits, as all tables of predictions show them.

    Parameters
    ----------
    value : float
        Such as a probability.

    Returns
    -------
    Decimal

    Examples
    --------
    >>> str(number(1 / 3))
    '0.333333'
    """
    return Decimal(f"{value:.6f}")


def to_csv(
    header: Sequence[str] | None,
    rows: Iterable[Sequence[object]],
    *,
    raw: bool = False,
    excel: bool = False,
) -> str:
    r"""Format rows as CSV; strings are neutralised, numbers are not touched.

    Parameters
    ----------
    header : sequence of str or None
        Names of the columns; None for rows that follow others.
    rows : iterable of sequences
        The rows. None is an empty cell.
    raw : bool, default=False
        Write strings unchanged.
    excel : bool, default=False
        Start with a byte-order mark and end lines as on Windows, so that Excel opens the file with
        the right characters.

    Returns
    -------
    str

    Examples
    --------
    >>> to_csv(["file", "score"], [["=a.jpg", -1.5]])
    "file,score\n'=a.jpg,-1.5\n"
    """
    out = StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n" if excel else "\n")
    if header is not None:
        out.write(BYTE_ORDER_MARK * excel)
        rows = [header, *rows]
    for row in rows:
        writer.writerow([neutralise(v) if isinstance(v, str) and not raw else v for v in row])
    return out.getvalue()
