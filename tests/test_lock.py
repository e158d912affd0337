"""The lock: one exact version of every package."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "constraints.txt"


def pins() -> list[Requirement]:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert lines
    return [Requirement(line) for line in lines]


def requirements() -> list[Requirement]:
    """Return everything that pyproject.toml asks for, to build, to run and in its extras."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    texts = [*document["build-system"]["requires"], *project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    return [each for each in map(Requirement, texts) if each.name != project["name"]]


def test_the_lock_holds_exact_versions_and_names_no_host() -> None:
    text = LOCK.read_text()
    assert not re.search(r"//|@|^\s*-|\.(com|org|net)\b", text, re.MULTILINE)
    for pin in pins():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), pin
        assert not pin.extras


def test_the_lock_serves_every_requirement() -> None:
    versions = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins()
        if pin.marker is None or pin.marker.evaluate()
    }
    for wanted in requirements():
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            found = versions.get(canonicalize_name(wanted.name))
            assert found is not None, f"{wanted.name} is missing: run `make lock UPGRADE=`"
            assert wanted.specifier.contains(found), f"{wanted}: run `make lock`"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["demo", "test", "test-all"])
def test_every_install_of_a_target_uses_the_lock(target: str) -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.replace("\\\n", " ")
    installs = [line for line in printed.splitlines() if "pip install" in line]
    assert installs
    for line in installs:
        assert " -c constraints.txt" in line
        # What builds the package: the first is for pip before 25.3, the second for later ones.
        assert "PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt " in line
