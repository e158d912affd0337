"""What packages export exists, the docs import nothing else, and a name means one thing."""

import ast
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import mivhead

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("backbones", "benchmark", "datasets", "diagnostics", "export", "extraction", "images")
SHARED_NAMES = {  # public classes that two modules may have, and why
    "Change": "of a model and of the app's folder: the app's journal is private to the app",
    "Client": "of a service for users, and of any JSON service for remote backbones",
    "Journal": "of the app's folder and of a run folder: no module uses both",
    "Keys": "of features in a cache, and of a service's users: no module uses both",
}
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
        assert hasattr(home, name) or (ROOT / "src" / "mivhead" / name).is_dir(), (page, name)


def test_no_two_modules_have_a_public_class_of_the_same_name():
    homes = defaultdict(list)
    for path in sorted((ROOT / "src" / "mivhead").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert shared.keys() == SHARED_NAMES.keys(), shared
    assert all(len(paths) == 2 for paths in shared.values()), shared
