"""The lock: one exact version of every package, for every system that we support."""

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
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SYSTEMS = {
    "Linux": {"sys_platform": "linux", "os_name": "posix", "platform_machine": "x86_64"},
    "macOS": {"sys_platform": "darwin", "os_name": "posix", "platform_machine": "arm64"},
    "Windows": {"sys_platform": "win32", "os_name": "nt", "platform_machine": "AMD64"},
}


def pins() -> list[Requirement]:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert lines
    return [Requirement(line) for line in lines]


def environment(python: str, system: str) -> dict[str, str]:
    """Return what markers see there; `extra` is empty, as for a plain install."""
    return {
        **SYSTEMS[system],
        "python_version": python,
        "python_full_version": f"{python}.9",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_system": "Darwin" if system == "macOS" else system,
        "extra": "",
    }


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


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_serves_every_requirement_on_every_system(python: str, system: str) -> None:
    there = environment(python, system)
    versions: dict[str, str] = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate(there):
            name = canonicalize_name(pin.name)
            assert name not in versions, f"{name} has two versions on {system}, Python {python}"
            versions[name] = str(pin.specifier).removeprefix("==")
    for wanted in requirements():
        if wanted.marker is not None and not wanted.marker.evaluate(there):
            continue
        found = versions.get(canonicalize_name(wanted.name))
        assert found is not None, f"constraints.txt lacks {wanted.name}: run `make lock UPGRADE=`"
        assert wanted.specifier.contains(found), (
            f"{wanted} does not allow {found} of constraints.txt: run `make lock`"
        )


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["demo", "test", "docs", "test-all", "wheel", "bench-small"])
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
