"""Where there are no kernels (macOS on Intel, Windows, a pure wheel), everything works without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = (
    "tests/head",
    "tests/ensemble",
    "tests/test_classifier.py",
    "tests/methods/test_formulas.py",
)
OFF = {**os.environ, "MIVHEAD_KERNELS": "off"}


def test_the_switch() -> None:
    code = "from mivhead.engine.library import library; assert library() is None"
    subprocess.run([sys.executable, "-c", code], check=True, env=OFF)


@pytest.mark.slow
def test_the_core_without_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CORE]
    done = subprocess.run(command, cwd=ROOT, env=OFF, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
