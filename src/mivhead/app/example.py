"""An example to start from: handwritten digits, some to learn and some to try."""

from __future__ import annotations

from io import BytesIO
from uuid import uuid4

from mivhead.app.project import Project
from mivhead.errors import InputError
from mivhead.images.example import enlarge_scan, load_scans

CLASSES = {0: "zero", 1: "one", 2: "two", 3: "three"}
FOREIGN = (6, 8)  # digits that are not taught: the model should say "none of these"
SHOTS, NEW = 6, 2  # per digit


def add_example(project: Project) -> None:
    """Fill a project without classes, in one step that can be undone."""
    snapshot = project.snapshot
    if snapshot.classes or snapshot.new:
        raise InputError("The example is for an empty project, and this one has classes or photos.")
    scans, labels = load_scans()
    batch = uuid4().hex[:16]
    for label in CLASSES.values():
        project.add_class(label, batch)
    for digit in (*CLASSES, *FOREIGN):
        shots = SHOTS if digit in CLASSES else 0
        rows = (labels == digit).nonzero()[0][: shots + NEW].tolist()
        for number, row in enumerate(rows):
            name = CLASSES[digit] if number < shots else None
            buffer = BytesIO()
            enlarge_scan(scans[row]).save(buffer, "PNG")
            title = f"{name} {number + 1}.png" if name else f"digit {row}.png"
            project.add_photo(buffer.getvalue(), title, name, batch)
