"""The README, followed by copy and paste in a fresh virtualenv."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = {".git", ".venv", ".venv-light", ".cache", "node_modules", "_build", "__pycache__"}
STEPS = ("Install", "On the command line", "In Python", "Into production")
WAITS = ("miv app", "miv serve digits.miv")  # until Ctrl-C


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {title!r}"
    return found[1]


def script(port: int) -> str:
    """Join the blocks of the first sections; what waits for Ctrl-C runs until it answers."""
    lines = ["set -eu"]
    for title in STEPS:
        for kind, code in BLOCK.findall(section(title)):
            if kind == "python":
                lines += ["python - <<'END'", code, "END"]
                continue
            for line in (commented.partition("  #")[0].rstrip() for commented in code.splitlines()):
                if line in WAITS:
                    browser = " --no-browser" if "app" in line else ""
                    lines += [f"{line} --port {port}{browser} > waiting.txt 2>&1 &", "waiting=$!"]
                    lines += [f"wait_for {port}"]
                    if "app" in line:
                        lines += ["kill $waiting; wait $waiting || true"]
                elif line.startswith("curl"):
                    lines += [line.replace("8765", str(port)), "kill $waiting"]
                else:
                    lines += [line]
    return "\n".join([WAIT_FOR, *lines])


WAIT_FOR = """
wait_for() {
  for _ in $(seq 300); do
    python -c "import socket; socket.create_connection(('127.0.0.1', $1), 1)" 2>/dev/null && return
    sleep 0.2
  done
  cat waiting.txt; return 1
}
"""


@pytest.mark.slow
def test_the_first_steps_in_a_fresh_virtualenv(tmp_path: Path) -> None:
    for tool in ("bash", "curl", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    clone = tmp_path / "mivhead"
    shutil.copytree(ROOT, clone, ignore=lambda _, names: LEFT_OUT & {*names})
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    lock = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "MIV_CACHE": str(tmp_path / "cache")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = subprocess.run(
        ["bash", "-c", script(port)],
        cwd=clone,
        env={**kept, **lock},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Of 100 new photos" in done.stdout
    assert "none of these" in done.stdout
    assert (clone / "demo-output" / "results.html").stat().st_size > 100_000
    assert (clone / "demo-output" / "digits.onnx").stat().st_size > 1_000_000
    assert (clone / "demo-output" / "page" / "index.html").stat().st_size > 1_000_000


def test_every_command_of_the_readme_exists() -> None:
    from mivhead_bench.cli.main import bench
    from tests.helpers.commands import parse

    found = 0
    for kind, code in BLOCK.findall(TEXT):
        for line in code.splitlines() if kind == "sh" else ():
            command = line.partition("  #")[0].split()
            if command[:1] == ["miv"]:
                if command[1] == "bench":
                    parse(command[2:], bench)
                else:
                    parse(command[1:])
                found += 1
    assert found > 12


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not anchor


def test_nothing_needs_an_index_that_does_not_have_it() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"(pip|pipx|uv) install \"?mivhead", page.read_text()), page
