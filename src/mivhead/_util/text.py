"""Text for people: names that may come from a stranger, numbers, and progress bars."""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from importlib.util import find_spec
from typing import Any

MAX_CELL = 48  # characters of a name in a table
DELAY = 2.0  # seconds before a progress bar appears


def one_line(text: str) -> str:
    r"""Replace line breaks and control characters, which file names may contain.

    >>> one_line("a\nb")
    'a b'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return a known name that differs in case, or in one letter that is not a digit.

    >>> near_name("Wrem", ["robin", "wren"]), near_name("wren2", ["wren"])
    ('wren', None)
    """
    folded = name.casefold()
    return next((other for other in known if _differ_little(folded, other.casefold())), None)


def _differ_little(name: str, other: str) -> bool:
    changes = [
        (name[a:b], other[c:d])
        for kind, a, b, c, d in SequenceMatcher(None, name, other).get_opcodes()
        if kind != "equal"
    ]
    if len(changes) != 1 or max(len(name), len(other)) < 4:
        return name == other
    return max(map(len, changes[0])) == 1 and not "".join(changes[0]).isdigit()


def percent(share: float, digits: int = 0) -> str:
    """Format a share as a percentage that is 100% or 0% only if it is exactly that.

    >>> percent(0.947), percent(0.9999), percent(1.0), percent(float("nan"))
    ('95%', '>99%', '100%', '-')
    """
    if math.isnan(share):
        return "-"
    step = 10.0**-digits
    if 100 - step / 2 <= 100 * share < 100:
        return f">{100 - step:.{digits}f}%"
    if 0 < 100 * share < step / 2:
        return f"<{step:.{digits}f}%"
    return f"{100 * share:.{digits}f}%"


def width(text: str) -> int:
    """Count the columns that a string occupies in a terminal.

    >>> width("cat"), width("猫"), width("e\u0301")
    (3, 2, 1)
    """
    shown = [c for c in text if not unicodedata.combining(c)]
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown)


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
        room -= width(c)
        if room < 0:
            break
        kept.append(c)
    return "".join(kept)


@contextmanager
def progress_bar(
    description: str, total: int | None, *, show: bool | None = None, unit: str = "image"
) -> Iterator[Callable[[float], Any]]:
    """Yield a function that advances a progress bar by a number of items.

    Unless `show` is False, it appears after two seconds: in a notebook, and on stderr if that is a
    terminal. `unit` is the name of an item; bytes, `B`, are shown in MB and GB.

    >>> with progress_bar("counting", 3) as advance:
    ...     for _ in range(3):
    ...         _ = advance(1)
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    notebook = hasattr(shell, "kernel")
    if show is False or not (terminal or notebook):
        yield lambda _: None
        return
    if notebook and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    how: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B", "delay": DELAY, "leave": False}
    with tqdm(total=total, desc=description, **how) as bar:
        done = 0.0

        def advance(steps: float) -> None:  # perhaps a fraction of one
            nonlocal done
            done += steps
            bar.update(round(done) - bar.n)

        yield advance
