"""The default path needs no optional package, and whatever needs one names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mivhead._util.imports import need
from mivhead.errors import NotAvailableError

ROOT = Path(__file__).parents[2]
OPTIONAL = ("timm", "torchvision", "matplotlib")
# Runs commands, one after the other, where the packages above cannot be imported.
RUN = f"""
import json, sys
from tests.helpers.extras import block
block{OPTIONAL}
from mivhead.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        code = main(command)
    except SystemExit as stop:
        code = stop.code
    print(json.dumps([command[0], code]), file=sys.stderr)
"""


def run_without_packages(*commands: list[str]) -> tuple[list[int], str, str]:
    """Exit codes, output and errors of commands."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.splitlines()
    codes = [json.loads(line)[1] for line in lines if line.startswith("[")]
    return codes, done.stdout, "\n".join(line for line in lines if not line.startswith("["))


def test_images_need_no_extra(shots: Path, queries: Path, tmp_path: Path) -> None:
    model, image = str(tmp_path / "model.miv"), str(next(queries.glob("*/*.png")))
    # Views are made, too; few steps keep it short.
    fit = ["fit", str(shots), "-o", model, "--no-check"]
    commands = [
        [*fit, "--quiet"],
        ["predict", model, image],
        ["evaluate", model, str(queries)],
        ["info", model],
        ["backbones", "list"],
    ]
    codes, output, errors = run_without_packages(*commands)
    assert codes == [0] * len(commands), errors
    assert "accuracy" in output.lower()


def test_commands_name_the_package_that_they_need(shots: Path, tmp_path: Path) -> None:
    model, picture = str(tmp_path / "model.miv"), str(tmp_path / "picture.png")
    fit = ["fit", str(shots), "-o", model]
    codes, _, errors = run_without_packages(
        ["evaluate", model, str(shots), "--picture", picture],
        [*fit, "--backbone", "timm:test_resnet", "--weights", "random"],
    )
    assert codes == [2, 2], errors
    for package, line in zip(("matplotlib", "timm torchvision"), errors.splitlines(), strict=True):
        assert f"pip install {package}`" in line


def test_a_broken_package_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        need("broken_package")
    with pytest.raises(NotAvailableError, match="pip install no_such_package_at_all"):
        need("no_such_package_at_all.part")
