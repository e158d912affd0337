"""Text that may come from a stranger, such as names of files and classes."""

from __future__ import annotations


def one_line(text: str) -> str:
    r"""Replace line breaks and control characters, which file names may contain.

    >>> one_line("a\nb")
    'a b'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
