"""The files that the app offers: the model, its exports, names as a table, sorted folders."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mivhead._util.files import replacing
from mivhead._util.tables import number, to_csv
from mivhead.app.history import HIDDEN
from mivhead.app.learner import NO_MODEL, Learner
from mivhead.app.project import Photo, Project
from mivhead.errors import InputError, NotAvailableError
from mivhead.images.imageset import free_name, safe_name, safe_names
from mivhead.prediction import Prediction

NAMES = {  # of downloads, after the name of the project
    "model": ".miv",
    "csv": ".csv",
    "sorted": " sorted.zip",
    "onnx": ".onnx",
    "web": " page.zip",
}
UNNAMED = "not named yet"


def make(kind: str, project: Project, learner: Learner) -> Path:
    """Make one of the downloads, or find it, once nothing is being learned; return the file."""
    from mivhead.export.model import export_model
    from mivhead.export.web import export_web

    path = project.folder / HIDDEN / f"download{NAMES[kind]}"
    with learner.busy:
        if kind == "csv":
            path.write_text(names_csv(project, learner), "utf-8", newline="")
        elif kind == "sorted":
            _zip(path, _sorted_entries(project, learner))
        elif kind == "onnx":
            export_model(learner.model, path)
        elif kind == "web":
            with TemporaryDirectory() as folder:
                page = Path(folder, "page")
                title, max_errors = project.folder.name, project.max_errors
                export_web(learner.model, page, title=title, max_errors=max_errors)
                _zip(path, [(file, file.name) for file in sorted(page.iterdir())])
        elif learner.file is None:
            raise InputError(NO_MODEL)
        else:
            path = learner.file
    return path


def _zip(path: Path, entries: Iterable[tuple[Path, str]]) -> None:
    # Photos and graphs are compressed already.
    with replacing(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
        for file, name in entries:
            with suppress(FileNotFoundError):  # moved or deleted meanwhile
                archive.write(file, name)


def can_export_web() -> bool:
    """Return whether a web page can be exported: it carries onnxruntime-web."""
    from mivhead.export.web import find_runtime

    with suppress(NotAvailableError):
        find_runtime()
        return True
    return False


def names_csv(project: Project, learner: Learner) -> str:
    """Return one row per photo: what the new ones are named, and the shots with their classes."""
    rows: list[list[object]] = []
    for photo, decision, prediction in _named_photos(project, learner):
        if prediction is not None:
            values = map(number, (prediction.probability, prediction.unknown or 0.0))
            rows.append([photo.name, decision, str(prediction.label), *values, "new"])
        elif decision is not None:
            rows.append([photo.path, decision, decision, None, None, "shot"])
        else:
            problem = project.problems.get(photo.id, UNNAMED)
            rows.append([photo.name, problem, None, None, None, "new"])
    header = ["file", "decision", "closest", "probability", "unknown", "kind"]
    return to_csv(header, rows, excel=True)


def _sorted_entries(project: Project, learner: Learner) -> Iterator[tuple[Path, str]]:
    """Yield every photo, with a name in the folder of its class."""
    placed = [
        (photo, decision or UNNAMED) for photo, decision, _ in _named_photos(project, learner)
    ]
    folders = safe_names(decision for _, decision in placed)
    taken: set[str] = set()
    for photo, decision in placed:
        name = f"{folders[decision]}/{safe_name(photo.name)}"
        name = free_name(name, lambda path: path.casefold() in taken)
        taken.add(name.casefold())
        yield project.folder / photo.path, name


def _named_photos(
    project: Project, learner: Learner
) -> Iterator[tuple[Photo, str | None, Prediction | None]]:
    """Yield new photos, what they are named and why, and the shots with their classes."""
    snapshot, predictions = project.snapshot, learner.predictions
    for photo in snapshot.new:
        prediction = predictions.get(photo.id)
        decision = None if prediction is None else str(prediction.decision)
        yield photo, decision, prediction
    for label, photos in snapshot.classes.items():
        for photo in photos:
            yield photo, label, None
