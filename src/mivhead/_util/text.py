"""Text for people: names that may come from a stranger, and numbers, the same everywhere."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape

MAX_CELL = 48  # characters of a name in a table


def one_line(text: str) -> str:
    r"""Replace line breaks and control characters, which file names may contain.

    >>> one_line("a\nb")
    'a b'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def reason_of(error: Exception) -> str:
    r"""Return the first line of an error of a library, without a full stop, or its type.

    >>> reason_of(OSError("no such file.\nTraceback")), reason_of(KeyError())
    ('no such file', 'KeyError')
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def list_reasons(reasons: Mapping[str, str]) -> str:
    """List names and what is said of each; what is said of several is printed once, of NAME.

    >>> print(list_reasons({"a": "a is gone: see a.x.", "b": "b is gone: see b.x.", "c": "No."}))
    - a, b: NAME is gone: see NAME.x.
    - No.
    """
    shared: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        general = re.sub(rf"\b{re.escape(name)}\b", lambda _: "NAME", reason)
        shared.setdefault(general, []).append(name)
    return "\n".join(
        f"- {', '.join(names)}: {reason}" if len(names) > 1 else f"- {reasons[names[0]]}"
        for reason, names in shared.items()
    )


def percent(share: float, digits: int = 0) -> str:
    """Format a share as a percentage that is 100 % or 0 % only if it is exactly that.

    >>> percent(0.947), percent(0.9999), percent(1.0), percent(float("nan"))
    ('95 %', '>99 %', '100 %', '-')
    """
    if math.isnan(share):
        return "-"
    step = 10.0**-digits
    if 100 - step / 2 <= 100 * share < 100:
        return f">{100 - step:.{digits}f} %"
    if 0 < 100 * share < step / 2:
        return f"<{step:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def width(text: str) -> int:
    """Count the columns that a string occupies in a terminal.

    >>> width("cat"), width("猫"), width("e\u0301")
    (3, 2, 1)
    """
    return sum(map(_columns, text))


def _columns(c: str) -> int:
    return 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1


def shorten(text: str, limit: int = MAX_CELL) -> str:
    """Cut the middle out of a long string, because names differ at their ends.

    >>> shorten("photos/2024/birds/img_0001.jpg", 20)
    'photos/2..._0001.jpg'
    """
    if width(text) <= limit:
        return text
    room = limit - 3
    tail = _begin(reversed(text), room - room // 2)[::-1]
    return f"{_begin(text, room // 2)}...{tail}"


def _begin(text: Iterable[str], room: int) -> str:
    """Return as many of the first characters as fit; the rest, maybe megabytes, is not read."""
    kept = []
    for c in text:
        room -= _columns(c)
        if room < 0:
            break
        kept.append(c)
    return "".join(kept)


class Html(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def html_table(
    header: Sequence[str], rows: Iterable[Iterable[object]], right: Container[str] = ()
) -> str:
    """Make a table, of which the columns in `right` are aligned right; all but `Html` is escaped.

    >>> html_table(["name"], [["<b>"]]).partition("<tbody>")[2]
    '<tr><td style="text-align:left">&lt;b&gt;</td></tr></tbody></table>'
    """
    sides = ["right" if name in right else "left" for name in header]

    def row(tag: str, cells: Iterable[object]) -> str:
        texts = (cell if isinstance(cell, Html) else escape(str(cell)) for cell in cells)
        found = (
            f'<{tag} style="text-align:{side}">{text}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )
        return f"<tr>{''.join(found)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><thead>{row('th', header)}</thead><tbody>{body}</tbody></table>"
