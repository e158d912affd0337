"""An example to start from: handwritten digits, some to learn and some to try."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from uuid import uuid4

from mivhead.app.project import Project
from mivhead.errors import InputError

CLASSES = {0: "zero", 1: "one", 2: "two", 3: "three"}
FOREIGN = (5, 8)  # digits that are not taught: the model should say "none of these"
SHOTS, NEW = 6, 2  # per digit


def has_example() -> bool:
    """Return whether the package that carries the digits is installed."""
    return find_spec("sklearn") is not None


def add_example(project: Project) -> None:
    """Fill a project without classes, in one step that can be undone."""
    from mivhead.datasets.bundled import enlarge_scan, load_scans

    found = project.snapshot()
    if found.classes or found.new:
        raise InputError("The example is for an empty project, and this one has classes or photos.")
    scans, labels = load_scans()
    batch = uuid4().hex[:16]
    for label in CLASSES.values():
        project.add_class(label, batch)
    for digit in (*CLASSES, *FOREIGN):
        rows = (labels == digit).nonzero()[0][: SHOTS + NEW].tolist()
        for number, row in enumerate(rows):
            name = CLASSES.get(digit) if number < SHOTS else None
            if digit in FOREIGN and number >= NEW:
                break
            buffer = BytesIO()
            enlarge_scan(scans[row]).save(buffer, "PNG")
            title = f"{name} {number + 1}.png" if name else f"digit {row}.png"
            project.add_photo(buffer.getvalue(), title, name, batch)
