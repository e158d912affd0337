"""Everything that computes, on a simulated accelerator: as on a GPU, mixing devices is an error.

The checks are in `tests/helpers/on_accelerator.py`, which runs in processes of its own, because the
simulation changes PyTorch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mivhead.benchmark.config import list_tables, load_config
from mivhead.methods.registry import METHODS
from tests.helpers.extras import needs
from tests.helpers.few_shots import RIVALS

pytestmark = needs("timm", "timm")

ROOT = Path(__file__).parents[2]
CHECKS = [
    *(f"on features: {name}" for name in ("miv", "miv-paper", *RIVALS)),
    *(f"tuning: {name}" for name, method in METHODS.items() if method.needs == "images"),
    *("extraction", "saving and loading", "explanations and plots", "benchmark"),
    *("memory of the device", "batch sizes", "table: main"),
]
TABLES = [f"table: {n}" for n in list_tables() if load_config(n).benchmark and n != "main"]
CLOSE = 1e-5


def run_checks(names: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.helpers.on_accelerator", *names]
    given = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    answer = subprocess.run(
        command, cwd=ROOT, env=os.environ | given, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(names), answer.stderr
    return {each["name"]: each for each in lines}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run_checks(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_same_on_the_accelerator(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name]["error"] is None, outcomes[name]["error"]
    assert outcomes[name]["difference"] < CLOSE


@pytest.mark.slow
def test_every_table_of_the_paper_runs_on_the_accelerator() -> None:
    failed = {name: each["error"] for name, each in run_checks(TABLES).items() if each["error"]}
    assert not failed
