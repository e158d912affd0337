"""What packages export exists, and the docs import nothing else."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import mivhead

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mivhead"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("backbones", "diagnostics", "extraction", "images")
IMPORT = re.compile(r"^(?:>>> )?from (mivhead[\w.]*) import (.+)$", re.MULTILINE)


@pytest.mark.parametrize("room", [*PACKAGES, "service"])
def test_every_exported_name_exists(room):
    package = import_module(f"mivhead.{room}")
    assert dir(package)
    for name in dir(package):
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"'mivhead.{room}' has no attribute 'nothing'"):
        _ = package.nothing


def test_the_package_exports_what_it_lists():
    assert {*dir(mivhead), "__version__"} == set(mivhead.__all__)
    for name in mivhead.__all__:
        assert getattr(mivhead, name) is not None


def test_docs_import_only_from_the_package_and_its_rooms():
    found = [
        (page.name, module, name.strip())
        for page in PAGES
        for module, names in IMPORT.findall(page.read_text(encoding="utf-8"))
        for name in names.partition("#")[0].split(",")
    ]
    assert len(found) > 20
    for page, module, name in found:
        assert module.count(".") <= 1, f"{page} imports from the inner module {module}"
        home = import_module(module)
        assert hasattr(home, name) or (SOURCE / name).is_dir(), (page, name)


@pytest.mark.parametrize("room", ["cli", "service", "app", "export"])
def test_front_doors_use_no_private_members(room):
    found = [
        f"{path.name}: {ast.unparse(node)}"
        for path in sorted((SOURCE / room).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert found == []
