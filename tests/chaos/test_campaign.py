"""The campaign of faults in its short form, and what its program promises itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.campaign import Case, Trial, markdown, merge, run, run_case
from tests.chaos.damage import damage

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the campaign needs Unix")


@contextmanager
def breaks_sometimes(_folder: Path) -> Iterator[Trial]:
    def trial(rng: np.random.Generator) -> str:
        assert rng.random() < 0.5, "broken"
        return "held"

    yield trial


def test_failures_are_counted_and_shown(tmp_path: Path, capsys) -> None:
    report = tmp_path / "chaos.json"
    case = Case("breaks sometimes", breaks_sometimes, 1.0, goal=100)
    (tally,) = run([case], 1.0, 0, report)
    assert tally.tried == 100
    assert 30 < tally.failed < 70
    assert tally.outcomes["held"] == 100 - tally.failed
    assert json.loads(report.read_text())["cases"][0]["failed"] == tally.failed
    assert "AssertionError: broken" in capsys.readouterr().err
    assert run_case(case, 60, 0).failed == tally.failed  # the same seed, the same faults


def test_damage_always_changes_something() -> None:
    data = bytes(range(256)) * 3
    assert all(damage(data, np.random.default_rng(seed)) != data for seed in range(500))


def test_a_run_is_resumed_and_reports_are_added(tmp_path: Path) -> None:
    report = tmp_path / "chaos.json"
    part = Case("breaks sometimes", breaks_sometimes, 1.0, goal=40)
    whole = Case("breaks sometimes", breaks_sometimes, 1.0, goal=100)
    run([part], 1.0, 0, report)
    (resumed,) = run([whole], 1.0, 0, report, resume=True)
    expected = run_case(whole, 60, 0)  # in one go: no fault is repeated
    assert (resumed.tried, resumed.failed) == (100, expected.failed)
    (total,) = merge([report, report])
    assert (total.tried, total.failed) == (200, 2 * expected.failed)
    assert "| breaks sometimes | 200 |" in markdown([total])


def test_a_case_that_reaches_its_goal_leaves_its_time_to_others() -> None:
    short = Case("short", breaks_sometimes, 1.0, goal=1)
    rest = Case("rest", breaks_sometimes, 1.0)
    _, tally = run([short, rest], 0.02, 0, None)
    assert tally.seconds > 0.9


def test_every_case_has_one_trial_at_least() -> None:
    cases = [Case(name, breaks_sometimes, 1.0) for name in ("first", "second")]
    assert [tally.tried for tally in run(cases, 0.0, 0, None)] == [1, 1]


@pytest.mark.slow
def test_two_minutes_of_faults(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "2", "--json", "chaos.json"]
    root = Path(__file__).parents[2]
    command[-1] = str(tmp_path / "chaos.json")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    cases = json.loads((tmp_path / "chaos.json").read_text())["cases"]
    assert all(case["tried"] for case in cases)
