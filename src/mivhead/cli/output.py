"""What commands print: numbers, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mivhead._util.text import MAX_CELL, one_line, percent, shorten, width

if TYPE_CHECKING:
    from mivhead.images.imageset import Skipped
    from mivhead.prediction import DecisionCounts


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: str = "",
    limit: int = MAX_CELL,
    most: int = sys.maxsize,
) -> str:
    """Format a table. Columns named in `right`, separated by spaces, are right-aligned.

    Cells longer than `limit` are shortened, and only so many rows as `most` are shown.

    >>> print(table(["class", "shots"], [["cat", 5], ["goldfinch", 12]], right="shots"))
    class      shots
    cat            5
    goldfinch     12
    """
    rows = list(rows)
    shown = (header, *rows[:most])
    cells = [[shorten(one_line(str(cell)), limit) for cell in row] for row in shown]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    to_right = [name in right.split() for name in header]
    lines = []
    for row in cells:
        parts = []
        for cell, size, flag in zip(row, widths, to_right, strict=True):
            space = " " * (size - width(cell))
            parts.append(space + cell if flag else cell + space)
        lines.append("  ".join(parts).rstrip())
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most:,} more (--json lists all)")
    return "\n".join(lines)


def interval(bounds: tuple[float, float]) -> str:
    """Format an interval of shares.

    >>> interval((0.71, 0.92))
    '71% to 92%'
    """
    return f"{percent(bounds[0])} to {percent(bounds[1])}"


def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(3.21), seconds(75)
    ('3.2 s', '1 min 15 s')
    """
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def size(count: int) -> str:
    """Format a number of bytes.

    >>> size(532), size(5_600_000)
    ('532 bytes', '5.6 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "image"), plural(3, "class"), plural(1200, "image")
    ('1 image', '3 classes', '1,200 images')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def describe_decisions(counts: DecisionCounts) -> str:
    """Describe how many photos got a name.

    >>> from mivhead.prediction import DecisionCounts
    >>> describe_decisions(DecisionCounts(12, 9, 2, 1))
    'Named 9 of 12 photos; 2 unsure, 1 none of these.'
    """
    named = f"Named {counts.named:,} of {plural(counts.images, 'photo')}"
    if counts.wrong is not None and counts.named:
        named += f" ({counts.wrong:,} wrongly, {percent(counts.wrong / counts.named)})"
    return f"{named}; {counts.unsure:,} unsure, {counts.none:,} none of these."


@dataclass(frozen=True)
class Output:
    """What a command prints: one JSON object, or text for people."""

    json: bool = False
    quiet: bool = False

    @property
    def verbose(self) -> bool:
        """Whether progress is shown."""
        return not self.quiet

    def result(self, document: Mapping[str, Any], text: str) -> None:
        """Print what was asked for."""
        print(as_json(document) if self.json else _inert(text), flush=True)

    def report(self, document: Mapping[str, Any], text: str) -> None:
        """Print what was done: as text, people can do without it."""
        if self.json or not self.quiet:
            self.result(document, text)

    def say(self, text: str) -> None:
        """Print a message for people, who can do without it."""
        if not self.quiet and not self.json:
            print(_inert(text), flush=True)

    def note(self, text: str) -> None:
        """Print a message on stderr, because the result is on stdout."""
        if not self.quiet:
            print(_inert(text), file=sys.stderr)

    def skipped(self, images: Sequence[Skipped]) -> None:
        """List on stderr the images that `--skip-bad` left out."""
        if images:
            print(f"Skipped {plural(len(images), 'image')}:", file=sys.stderr)
        for image in images:
            print(f"  {one_line(image.reason)}", file=sys.stderr)


def _inert(text: str) -> str:
    """Replace what would control a terminal, in any line."""
    return "\n".join(map(one_line, text.split("\n")))


def as_json(document: Mapping[str, Any], *, ascii_only: bool | None = None) -> str:
    """Format a JSON object; None: in ASCII if the terminal does not take UTF-8."""
    if ascii_only is None:
        ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    text = json.dumps(document, indent=2, ensure_ascii=ascii_only, allow_nan=False)
    # Names may hold characters that reverse or hide what a terminal shows.
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
