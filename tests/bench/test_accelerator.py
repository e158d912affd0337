"""The head and the tuning methods on a simulated accelerator: mixing devices is an error."""

import subprocess
import sys
from pathlib import Path

import pytest

METHODS = ("miv", "miv-paper", "miv-mean", "tsa", "ett", "ln-tune", "finetune")


@pytest.mark.slow
def test_the_same_on_the_accelerator() -> None:
    command = [sys.executable, "-m", "tests.bench.accelerator", *METHODS]
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    differences = dict(line.split() for line in answer.stdout.splitlines())
    assert differences.keys() == set(METHODS), answer.stderr
    assert max(map(float, differences.values())) < 1e-4
