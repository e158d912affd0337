"""Run cases for their share of the time, count outcomes, and show them as a table and as JSON."""

from __future__ import annotations

import json
import platform
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

MEMORY = Path("/dev/shm")
MAX_SHOWN = 5  # failures of a case that are reported in full

Trial: TypeAlias = "Callable[[np.random.Generator], str]"  # tries one fault; names the outcome
Setup: TypeAlias = "Callable[[Path], AbstractContextManager[Trial]]"


@dataclass(frozen=True)
class Case:
    """One kind of fault.

    `setup` gets an empty folder and yields the trial. A trial raises an exception if the promise is
    broken. `share` is its part of the time.
    """

    name: str
    setup: Setup
    share: float
    most: int | None = None  # trials after which it ends
    on_disk: bool = True  # else in memory, where writing the damaged file takes no time


@dataclass
class Tally:
    """What became of a case."""

    name: str
    tried: int = 0
    failed: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, number: int, error: BaseException) -> None:
        self.failed += 1
        if len(self.failures) < MAX_SHOWN:
            text = "".join(traceback.format_exception(error))
            self.failures.append(f"trial {number}: {text[-2000:]}")


def run_case(case: Case, seconds: float, seed: int) -> Tally:
    """Try one kind of fault until the time is over."""
    tally = Tally(case.name)
    where = None if case.on_disk or not MEMORY.is_dir() else MEMORY
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(prefix="chaos-", dir=where)
            trial = stack.enter_context(case.setup(Path(stack.enter_context(scratch))))
            began = time.monotonic()
            while tally.tried < (case.most or sys.maxsize):
                _try(trial, tally, seed)
                if time.monotonic() - began > seconds:
                    break
    # Of the preparation, such as a fit that is the reference.
    except Exception as error:
        tally.fail(tally.tried, error)
    tally.seconds = time.monotonic() - began
    return tally


def _try(trial: Trial, tally: Tally, seed: int) -> None:
    rng = np.random.default_rng((seed, tally.tried))  # a trial can be repeated alone
    try:
        tally.outcomes[trial(rng)] += 1
    # Whatever escapes is a finding.
    except Exception as error:
        tally.fail(tally.tried, error)
    tally.tried += 1


def run(cases: Iterable[Case], minutes: float, seed: int, report: Path | None) -> list[Tally]:
    """Run all cases, one after the other, and write the report after each of them."""
    cases = list(cases)
    total = sum(case.share for case in cases)
    tallies = []
    for number, case in enumerate(cases):
        tallies.append(run_case(case, 60 * minutes * case.share / total, seed + number))
        print(_row(tallies[-1]), flush=True)
        for failure in tallies[-1].failures:
            print(failure, file=sys.stderr, flush=True)
        if report is not None:
            report.write_text(json.dumps(_document(tallies, minutes, seed), indent=2) + "\n")
    return tallies


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


HEADER = f"{'case':34} {'tried':>10} {'failed':>7} {'per second':>11}  outcomes"


def _row(tally: Tally) -> str:
    rate = tally.tried / max(tally.seconds, 1e-9)
    outcomes = ", ".join(f"{name} {count:,}" for name, count in tally.outcomes.most_common())
    return f"{tally.name:34} {tally.tried:10,} {tally.failed:7,} {rate:11,.1f}  {outcomes}"
