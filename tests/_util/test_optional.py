"""The default path needs no extra, and whatever needs one names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mivhead._util.optional import need
from mivhead.errors import NotAvailableError

ROOT = Path(__file__).parents[2]
EXTRAS = {"timm": "timm", "torchvision": "timm", "matplotlib": "plot", "httpx": "http"}
# Runs commands, one after the other, where the packages above cannot be imported.
RUN = f"""
import json, sys
from tests.helpers.extras import block
block{tuple(EXTRAS)}
from mivhead.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        code = main(command)
    except SystemExit as stop:
        code = stop.code
    print(json.dumps([command[0], code]), file=sys.stderr)
"""


def run_without_extras(*commands: list[str]) -> tuple[list[int], str, str]:
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
    fit = ["fit", str(shots), "-o", model, "--threshold", "4", "--param", "steps=2", "--no-check"]
    commands = [
        [*fit, "--quiet"],
        ["predict", model, image],
        ["evaluate", model, str(queries)],
        ["info", model],
        ["backbones", "list"],
        ["methods"],
    ]
    codes, output, errors = run_without_extras(*commands)
    assert codes == [0] * len(commands), errors
    assert "accuracy" in output.lower()


def test_commands_name_the_extra_that_they_need(shots: Path, tmp_path: Path) -> None:
    model, picture = str(tmp_path / "model.miv"), str(tmp_path / "picture.png")
    fit = ["fit", str(shots), "-o", model]
    commands = {
        "plot": [
            ["evaluate", model, str(shots), "--picture", picture],
            ["plot", "tsne", model, str(next(shots.glob("*/*.png"))), "-o", picture],
        ],
        "timm": [
            [*fit, "--backbone", "resnet50"],
            [*fit, "--backbone", "timm:test_resnet", "--weights", "random"],
        ],
        "http": [[*fit, "--backbone", "http://127.0.0.1:9"]],
    }
    listed = [command for group in commands.values() for command in group]
    codes, _, errors = run_without_extras(*listed)
    assert codes == [2] * len(listed), errors
    extras = [extra for extra, group in commands.items() for _ in group]
    for extra, line in zip(extras, errors.splitlines(), strict=True):
        assert f'pip install "mivhead[{extra}]"' in line


def test_a_broken_package_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        need("broken_package", "onnx")
    with pytest.raises(NotAvailableError, match=r'pip install "mivhead\[onnx\]"'):
        need("no_such_package_at_all.part", "onnx")
