"""Text for people: names that may come from a stranger, and numbers, the same everywhere."""

from __future__ import annotations

import math


def one_line(text: str) -> str:
    r"""Replace line breaks and control characters, which file names may contain.

    >>> one_line("a\nb")
    'a b'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


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
