"""The files in deploy/ have the same command and port as the service."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mivhead.cli.serve import DEFAULT_PORT
from tests.helpers.commands import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
WORKFLOWS = DEPLOY.parent / ".github" / "workflows"


def test_the_container_runs_the_command_that_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
    given = parse([*entry[1:], "/models/birds.miv"])
    assert (given["host"], given["key"], given["port"]) == ("0.0.0.0", "MIV_KEY", DEFAULT_PORT)
    assert f"EXPOSE {DEFAULT_PORT}" in text
    assert f"127.0.0.1:{DEFAULT_PORT}:{DEFAULT_PORT}" in (DEPLOY / "compose.yaml").read_text()
    copied = re.search(r"^COPY (pyproject.*) \./$", text, re.MULTILINE)[1].split()  # type: ignore[index]
    assert all((DEPLOY.parent / name).exists() for name in copied)


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_pin_actions_and_may_only_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: *(.+)", text)
    for action in used:
        pinned = re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", action)
        assert pinned or action.startswith("./.github/workflows/"), action
    assert "\npermissions:\n  contents: read\n" in text
