"""What packages export exists, the docs import nothing else, and a name means one thing."""

import ast
import re
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import mivhead

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mivhead"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("backbones", "benchmark", "datasets", "diagnostics", "export", "extraction", "images")
PUBLIC_MODULES = {
    *(
        "features",
        "support",
        "preset",
        "classifier",
        "fewshot",
        "prediction",
        "decision",
        "model_file",
    ),
    *("client", "errors", "spreadsheets"),
}
SHARED_MODULES = {  # modules of the same name in several rooms, and why
    "__init__": "a room",
    "app": "the room and the command that starts it",
    "backbone": "exported to ONNX, and served to other machines: the same thing",
    "backbones": "the room and the command group",
    "base": "what all modules of a room have in common",
    "cache": "the feature cache and the command group",
    "changes": "of a model: made, and asked for over HTTP",
    "engine": "the room that trains heads, and what answers requests",
    "export": "the room and the command",
    "head": "the head, and its export",
    "http": "the client of all that ask servers, and backbones behind an address",
    "info": "what a model's file says: read, and printed",
    "methods": "the room, the command, and the export of methods",
    "model": "the room, and the export of a model",
    "output": "what commands print, and what jobs write",
    "ridge": "the regression, and the method that consists of it alone",
    "sources": "where images come from, for a model and for a job",
    "text": "the text tower of a backbone, and text for people",
    "training": "of heads: in NumPy, and by the formulas in PyTorch",
}
SHARED_CLASSES = {  # in NumPy (`engine`) and as the formulas in PyTorch (`head`)
    *("Bags", "Candidates", "HeadBlock", "Projected"),
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
        assert hasattr(home, name) or (SOURCE / name).is_dir(), (page, name)


def test_no_two_modules_have_a_public_class_of_the_same_name():
    homes = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert shared.keys() == SHARED_CLASSES, shared


def test_modules_of_the_same_name_mean_the_same_thing():
    paths = [*SOURCE.rglob("*.py"), *(init.parent for init in SOURCE.rglob("__init__.py"))]
    counts = Counter(path.stem for path in paths)
    assert {name for name, count in counts.items() if count > 1} == SHARED_MODULES.keys()


def test_the_top_of_the_package_stays_small():
    public = {path.stem for path in SOURCE.glob("*.py") if not path.name.startswith("_")}
    assert public <= PUBLIC_MODULES, "move it into a room, or make it private"


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
