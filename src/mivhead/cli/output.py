"""What commands print - numbers, tables, JSON - and whether they can write to a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import MAX_CELL, one_line, percent, shorten, width
from mivhead.cli.loading import kind_of
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from mivhead.images.imageset import Skipped
    from mivhead.model.base import ImageClassifier
    from mivhead.model.info import Estimate
    from mivhead.model.prediction import DecisionCounts, Prediction

MAX_ERRORS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)  # settings whose effect is worth knowing


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: str = "",
    limit: int = MAX_CELL,
) -> str:
    """Format a table. Columns named in `right`, separated by spaces, are right-aligned.

    Cells longer than `limit` are shortened.

    >>> print(table(["class", "shots"], [["cat", 5], ["goldfinch", 12]], right="shots"))
    class      shots
    cat            5
    goldfinch     12
    """
    cells = [[shorten(one_line(str(cell)), limit) for cell in row] for row in (header, *rows)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    to_right = [name in right.split() for name in header]
    lines = []
    for row in cells:
        parts = []
        for cell, size, flag in zip(row, widths, to_right, strict=True):
            space = " " * (size - width(cell))
            parts.append(space + cell if flag else cell + space)
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def interval(bounds: tuple[float, float]) -> str:
    """Format an interval of shares.

    >>> interval((0.71, 0.92))
    '71 % to 92 %'
    """
    return f"{percent(bounds[0])} to {percent(bounds[1])}"


def expected_accuracy(estimate: Estimate, shots: Iterable[int | None]) -> str:
    """Format the accuracy to expect, with its interval; `shots` are the numbers of each class.

    >>> from mivhead.model.info import Estimate
    >>> expected_accuracy(Estimate(0.83, 0.7, 0.91, 15, 12, (0.8, 0.86)), [7, 8])
    '83 % (95 % interval 70 % to 91 %)'
    >>> expected_accuracy(Estimate(0.83, 0.7, 0.91, 15, 12, (0.8, 0.86, None)), [7, 8, 0])
    '83 % (95 % interval 70 % to 91 %) for the 2 classes with shots'
    """
    counts = list(shots)
    if estimate.accuracy is None or estimate.low is None or estimate.high is None:
        return "unknown, because fewer than two classes have two shots"
    bounds = interval((estimate.low, estimate.high))
    text = f"{percent(estimate.accuracy)} (95 % interval {bounds})"
    if not (unseen := counts.count(0)):
        return text
    return f"{text} for the {plural(len(counts) - unseen, 'class')} with shots"


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
    """Describe how many images got a name.

    >>> from mivhead.model.prediction import DecisionCounts
    >>> describe_decisions(DecisionCounts(12, 9, 2, 1))
    '9 of 12 images were named, 2 are unsure, 1 is none of these'
    """
    all_of = counts.images > 1 and counts.named == counts.images
    named = f"{'all' if all_of else f'{counts.named:,} of'} {plural(counts.images, 'image')} "
    named += "was named" if counts.named == 1 else "were named"
    if counts.wrong is not None and counts.named:
        named += f" ({counts.wrong:,} wrongly, {percent(counts.wrong / counts.named)})"
    parts = [named]
    for count, decision in ((counts.unsure, "unsure"), (counts.none, "none of these")):
        parts += [f"{count:,} {'is' if count == 1 else 'are'} {decision}"] * bool(count)
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def other_max_errors(
    model: ImageClassifier, found: Sequence[Prediction], chosen: float | None
) -> dict[str, int]:
    """Return how many images other values of --max-errors would name, if not as many as now.

    `found` was made with the value `chosen`; None: the default.
    """
    from mivhead.model.decision import MAX_ERRORS as USUAL
    from mivhead.model.decision import NONE, UNSURE

    if model.calibration is None:
        return {}
    known = [each for each in found if each.decision != NONE]
    now = sum(each.decision != UNSURE for each in known)
    counts: dict[str, int] = {}
    for share in MAX_ERRORS:
        least = model.thresholds(max_errors=share).probability
        count = sum(each.probability >= least for each in known)
        if share != (USUAL if chosen is None else chosen) and count not in (now, *counts.values()):
            counts[f"{100 * share:g}%"] = count
    return counts


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object, in ASCII if the terminal does not take UTF-8."""
    print(as_json(document))


def as_json(document: Mapping[str, Any], *, ascii_only: bool | None = None) -> str:
    """Format a JSON object; None: in ASCII if the terminal does not take UTF-8."""
    if ascii_only is None:
        ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    return json.dumps(document, indent=2, ensure_ascii=ascii_only, allow_nan=False)


def report_skipped(skipped: Sequence[Skipped]) -> None:
    """List on stderr the images that `--skip-bad` left out."""
    if skipped:
        print(f"Skipped {plural(len(skipped), 'image')}:", file=sys.stderr)
    for each in skipped:
        print(f"  {one_line(each.reason)}", file=sys.stderr)


def announce(text: str, args: argparse.Namespace) -> None:
    """Print on a terminal what the next seconds are for."""
    if sys.stdout.isatty() and not args.quiet and not args.json:
        print(text, flush=True)


def check_output(path: str | Path, *, replaces: str | None = None) -> None:
    """Raise an error if a file cannot be written; called before any expensive work.

    Only a file of the kind `replaces` may be overwritten; None allows any.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"The output {path} is a folder; give the name of a file.")
    if path.exists() and not path.is_file():
        raise InputError(f"The output {path} is not a regular file.")
    if replaces and path.exists() and kind_of(path) != replaces:
        raise InputError(
            f"The output {path} exists and is not a mivhead {replaces} file, so it is not "
            "overwritten: choose another name or remove it."
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise NotAvailableError(f"The output {path} is write-protected.")
    check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Raise an error if no file can be created in a folder."""
    if not folder.is_dir():
        raise InputError(f"The output folder {folder} does not exist; create it first.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotAvailableError(f"Cannot write to {folder}: {error.strerror}.") from error
