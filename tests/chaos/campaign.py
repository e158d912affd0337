"""Run cases for their share of the time, count outcomes, and show them as a table and as JSON."""

from __future__ import annotations

import json
import platform
import resource
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

MEMORY = Path("/dev/shm")
MAX_SHOWN = 5  # failures of a case that are reported in full
SAVE_SECONDS = 10.0  # between two reports of a running case

# Tries one fault, or several at once, and names the outcome, or counts the outcomes.
Trial: TypeAlias = "Callable[[np.random.Generator], str | Counter[str]]"
Setup: TypeAlias = "Callable[[Path], AbstractContextManager[Trial]]"


@dataclass(frozen=True)
class Case:
    """One kind of fault.

    `setup` gets an empty folder and yields the trial. A trial raises an exception if the promise is
    broken. `share` is its part of the time; what is left when `goal` faults were tried is for the
    cases that follow.
    """

    name: str
    setup: Setup
    share: float
    goal: int = sys.maxsize
    on_disk: bool = True  # else in memory, where writing the damaged file takes no time


@dataclass
class Tally:
    """What became of a case."""

    name: str
    tried: int = 0
    failed: int = 0
    trials: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        self.failed += 1
        if len(self.failures) < MAX_SHOWN:
            text = "".join(traceback.format_exception(error))
            self.failures.append(f"trial {self.trials}: {text[-2000:]}")

    def add(self, other: Tally) -> None:
        """Add what another run counted."""
        self.tried += other.tried
        self.failed += other.failed
        self.trials += other.trials
        self.seconds += other.seconds
        self.outcomes.update(other.outcomes)
        self.failures = (self.failures + other.failures)[:MAX_SHOWN]


def run_case(
    case: Case,
    seconds: float,
    seed: int,
    tally: Tally | None = None,
    save: Callable[[], None] = lambda: None,
) -> Tally:
    """Try one kind of fault until the time is over, or the goal reached; continue a tally."""
    tally = tally or Tally(case.name)
    where = None if case.on_disk or not MEMORY.is_dir() else MEMORY
    before, began = tally.seconds, time.monotonic()
    saved = began
    try:
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(prefix="chaos-", dir=where)
            trial = stack.enter_context(case.setup(Path(stack.enter_context(scratch))))
            began = time.monotonic()
            while tally.tried < case.goal:  # at least one
                _try(trial, tally, seed)
                tally.seconds = before + time.monotonic() - began
                if time.monotonic() - saved > SAVE_SECONDS:
                    saved = time.monotonic()
                    save()
                if time.monotonic() - began > seconds:
                    break
    # Of the preparation, such as a fit that is the reference, or of what is checked at the end.
    except Exception as error:
        tally.fail(error)
    return tally


def _try(trial: Trial, tally: Tally, seed: int) -> None:
    # A trial can be repeated alone, and a resumed run does not repeat the earlier ones.
    rng = np.random.default_rng((seed, zlib.crc32(tally.name.encode()), tally.trials))
    try:
        found = trial(rng)
    # Whatever escapes is a finding.
    except Exception as error:
        tally.fail(error)
        tally.tried += 1
    else:
        outcomes = found if isinstance(found, Counter) else Counter([found])
        tally.outcomes.update(outcomes)
        tally.tried += outcomes.total()
    tally.trials += 1


def run(
    cases: Iterable[Case], minutes: float, seed: int, report: Path | None, *, resume: bool = False
) -> list[Tally]:
    """Run all cases, one after the other, and write the report all the time."""
    cases = list(cases)
    earlier = read_report(report) if resume and report is not None and report.exists() else {}
    tallies = dict(earlier)
    end = time.monotonic() + 60 * minutes

    def save() -> None:
        if report is not None:
            document = _document(list(tallies.values()), minutes, seed)
            report.write_text(json.dumps(document, indent=2) + "\n")

    for number, case in enumerate(cases):
        left = sum(each.share for each in cases[number:])
        seconds = (end - time.monotonic()) * case.share / left
        tally = tallies.setdefault(case.name, Tally(case.name))
        shown = len(tally.failures)
        run_case(case, seconds, seed, tally, save)
        print(_row(tally), flush=True)
        for failure in tally.failures[shown:]:
            print(failure, file=sys.stderr, flush=True)
        save()
    return [tallies[case.name] for case in cases]


def _document(tallies: list[Tally], minutes: float, seed: int) -> dict[str, object]:
    import torch

    return {
        "minutes": minutes,
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "cases": [vars(tally) for tally in tallies],
    }


def read_report(path: Path) -> dict[str, Tally]:
    """Read the tallies of a report, by name."""
    cases = json.loads(path.read_text())["cases"]
    tallies = (Tally(**{**case, "outcomes": Counter(case["outcomes"])}) for case in cases)
    return {tally.name: tally for tally in tallies}


def merge(reports: Iterable[Path]) -> list[Tally]:
    """Add the tallies of several reports."""
    total: dict[str, Tally] = {}
    for report in reports:
        for tally in read_report(report).values():
            total.setdefault(tally.name, Tally(tally.name)).add(tally)
    return list(total.values())


def markdown(tallies: Iterable[Tally]) -> str:
    """Return the table of the documentation."""
    rows = ["| case | tried | failed | minutes | outcomes |", "|---|---:|---:|---:|---|"]
    rows += [
        f"| {each.name} | {each.tried:,} | {each.failed:,} | {each.seconds / 60:.1f} "
        f"| {_outcomes(each)} |"
        for each in tallies
    ]
    return "\n".join(rows)


HEADER = f"{'case':34} {'tried':>10} {'failed':>7} {'per second':>11}  outcomes"


def _row(tally: Tally) -> str:
    rate = tally.tried / max(tally.seconds, 1e-9)
    return f"{tally.name:34} {tally.tried:10,} {tally.failed:7,} {rate:11,.1f}  {_outcomes(tally)}"


def _outcomes(tally: Tally) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in tally.outcomes.most_common())
