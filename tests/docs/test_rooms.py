"""What the docstrings of the rooms say of their modules is true."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ROOMS = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
# Rooms of the product whose modules are so many, or so different, that a reader needs a list.
LISTS = (
    "app",
    "diagnostics",
    "ensemble",
    "export",
    "jobs",
    "model",
    "service",
)


def names_in(room: Path) -> set[str]:
    """Return the modules of a room, the rooms in and next to it, and what they define."""
    names = {path.stem for path in [*room.iterdir(), *room.parent.iterdir()]}
    for path in room.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for definition in [node, *getattr(node, "body", [])]:  # also the methods of classes
                if isinstance(definition, ast.FunctionDef | ast.ClassDef):
                    names.add(definition.name)
    return names


def test_room_docstrings_name_what_exists() -> None:
    for room in ROOMS:
        docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        named = set(re.findall(r"`([a-z_]\w*)`", docstring)) - {"miv", "mivhead"}
        assert named <= names_in(room), room


@pytest.mark.parametrize("name", LISTS)
def test_rooms_that_list_their_modules_list_all(name: str) -> None:
    room = SOURCE / "mivhead" / name
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    modules = {path.stem for path in room.glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)`", docstring))


def test_an_absent_module_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("def make(): ...")
    assert {"here", "make"} <= names_in(tmp_path)
    assert "downloads" not in names_in(tmp_path)
