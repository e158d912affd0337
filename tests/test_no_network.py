"""Once installed, the demo needs no network: it runs in a namespace that has none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.extras import needs

ROOT = Path(__file__).parents[1]
CUT = ("unshare", "--net", "--map-root-user")
CONNECT = "import socket; socket.create_connection(('192.0.2.1', 9), timeout=5)"
DEMO = """
import sys
from mivhead.cli import demo, main
demo.NAMES, demo.SHOTS, demo.NEW = demo.NAMES[:3], 3, 4
sys.exit(main.main(["demo", "-o", "demo"]))
"""


def without_network(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has no network and, in its home, nothing downloaded before."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*CUT, sys.executable, "-c", code],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def cannot_cut() -> str | None:
    """Return why this system cannot take the network away from a process, or None."""
    if shutil.which(CUT[0]) is None:
        return "there is no unshare on this system"
    done = subprocess.run([*CUT, "true"], capture_output=True, text=True, check=False)
    return f"this system does not allow it: {done.stderr.strip()}" if done.returncode else None


@needs("matplotlib", "plot")
def test_the_demo_runs_without_a_network(tmp_path: Path) -> None:
    if reason := cannot_cut():
        pytest.skip(reason)
    assert "unreachable" in without_network(CONNECT, tmp_path).stderr  # it is cut indeed
    done = without_network(DEMO, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "digits.miv").is_file()
    assert (tmp_path / "demo" / "results.html").is_file()
