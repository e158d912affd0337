"""CONTRIBUTING.md stays true: its map lists every room, and its recipes work when followed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mivhead"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r'(\w+)="([^"]*)"')

# section of CONTRIBUTING.md -> what the commands of its recipe print, as patterns
RECIPES = {
    "Add a method": ["first-shot"],
    "Add a backbone": ["resnet26 ", "grid.miv"],
    "Add a command": ["birds +2", '"birds": 2'],
}


def section(title: str) -> str:
    found = re.search(rf"^##+ {title}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md has no section {title!r}"
    return found[1]


def rooms() -> set[str]:
    modules = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    return modules | {path.name for path in PACKAGE.glob("*.py") if path.name != "__main__.py"}


def test_the_map_lists_every_room_and_nothing_else():
    lines = section("Map of rooms").splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed == rooms()


def test_answers_and_walks_name_things_that_exist():
    walks = re.search(r"^### Where is(.*?)^## Recipes", TEXT, re.MULTILINE | re.DOTALL)[1]
    named = re.findall(r"`((?:\.\./)?(?:\w+/)*\w+\.py)(?::([\w.]+))?`", walks)
    assert len(named) > 40
    for file, name in named:
        path = PACKAGE / file
        assert path.is_file(), file
        if name:
            last = name.rpartition(".")[2]
            assert re.search(
                rf"^\s*(?:async )?(?:def|class) {last}\b|^{last}\b", path.read_text(), re.M
            ), name


@pytest.mark.slow
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_followed_literally_works(title, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.pyc"))
    output = ""
    for language, options, content in BLOCK.findall(section("Recipes") + section(title)):
        given = dict(OPTION.findall(options))
        if language == "sh":
            output += run(content, tmp_path)
        elif "after" in given:
            insert(tmp_path / given["file"], given["after"], content)
        elif "file" in given:
            path = tmp_path / given["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    for printed in RECIPES[title]:
        assert re.search(printed, output), output


def insert(path: Path, after: str, content: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.strip() == after]
    assert len(places) == 1, f"{path.name} has the line {after!r} {len(places)} times"
    lines.insert(places[0] + 1, content)
    path.write_text("".join(lines), encoding="utf-8")


def run(script: str, folder: Path) -> str:
    python = f'python() {{ "{sys.executable}" "$@"; }}'
    shell = f'set -e\n{python}\nmiv() {{ python -m mivhead "$@"; }}\n{script}'
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "MIV_CACHE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
