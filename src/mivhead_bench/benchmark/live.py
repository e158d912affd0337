"""Live progress of a run: finished results and accuracy so far.

On a terminal this is a progress bar; elsewhere, as in the log of a cluster, a line every now and
then.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from tqdm import tqdm

from mivhead_bench.benchmark.results import Result

EVERY = 15.0  # seconds between two lines
MOST = 4  # methods shown in the bar
MOST_FAILURES = 3  # different errors of a method, including the note about further ones
MORE = ""  # stands for all others


class LiveView:
    """Shows the progress of a run, on stderr."""

    def __init__(self, *, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._title = ""
        self._failures: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._clear()

    def _clear(self) -> None:
        self._printed = time.monotonic()
        self._total = self._done = self._errors = 0
        self._accuracies: dict[str, list[float]] = defaultdict(list)

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def extracting(self, total: int) -> Iterator[Callable[[int], Any]]:
        """Show how many images and views passed the backbone; yields a function that adds some."""
        if self._quiet:
            yield lambda _: None
            return
        bar = self._make_bar("backbone", total, "image")
        try:
            yield bar.update
        finally:
            bar.close()

    def start(self, title: str, results: int) -> None:
        """Start a data set, of which this many results are to come."""
        self._close_bar()
        self._clear()
        self._title, self._total = title, results
        if not self._quiet and self._is_terminal():
            self._bar = self._make_bar(title, self._total, "result")

    def show(self, result: Result, traceback: str | None = None) -> None:
        """Count a result; the first failures of a method are printed, with their traceback."""
        self._done += 1
        if result.accuracy is None:
            self._errors += 1
            self._show_failure(result, traceback)
        else:
            self._accuracies[result.method].append(result.accuracy)
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(self._accuracy_text(MOST), refresh=False)
            self._bar.update(1)
        elif time.monotonic() - self._printed > EVERY or self._done == self._total:
            self._printed = time.monotonic()
            print(self.line(), file=self._stream, flush=True)
        if self._done == self._total:
            self._close_bar()

    def _show_failure(self, result: Result, traceback: str | None) -> None:
        """Print a failure, unless the method failed in the same way before, or too often."""
        name, shown = f"{result.method} failed", self._failures[result.backbone, result.method]
        where = f"{result.set}, task {result.task}"
        if result.error in shown or len(shown) == MOST_FAILURES:
            if MORE not in shown:
                shown.add(MORE)
                self.note(f"{where}, {name} again; further failures are counted, but not shown")
            return
        shown.add(str(result.error))
        text = f"{where}, {name}: {result.error}"
        if traceback is not None:
            text += f"\n{textwrap.indent(traceback.rstrip(), '    ')}"
        self.note(text)

    def line(self) -> str:
        """Summarise the progress in one line."""
        errors = f", {self._errors} failed" if self._errors else ""
        return f"{self._title}: {self._done} of {self._total}{errors}: {self._accuracy_text()}"

    def _accuracy_text(self, most: int | None = None) -> str:
        parts = [
            f"{name} {100 * sum(values) / len(values):.1f}%"
            for name, values in sorted(self._accuracies.items())
        ]
        return ", ".join(parts[:most] + ["..."] * (most is not None and len(parts) > most))

    def _is_terminal(self) -> bool:
        return self._stream.isatty()

    def _make_bar(self, title: str, total: int, unit: str) -> Any:
        return tqdm(
            total=total,
            desc=title,
            unit=unit,
            file=self._stream,
            leave=False,
            disable=not self._is_terminal(),
        )

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            print(self.line(), file=self._stream, flush=True)
