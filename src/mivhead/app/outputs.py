"""The files that the app offers: the model, its exports, names, sorted folders, a report."""

from __future__ import annotations

import zipfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import quote

from starlette.responses import FileResponse, Response, StreamingResponse

from mivhead._util.files import replacing
from mivhead._util.text import html_table, percent
from mivhead.app.journal import HIDDEN
from mivhead.app.learner import Learner
from mivhead.app.project import MODEL, Photo, Project
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.imageset import numbered
from mivhead.model.decision import NONE, UNSURE
from mivhead.spreadsheets import to_csv

SLOW = ("onnx", "web")  # made by `prepare`, before they are downloaded
KINDS = ("model", "csv", "sorted", "report", *SLOW)
UNNAMED = "not named yet"

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#1c2024, #eceef0); background: light-dark(#fff, #111518) }
table { border-collapse: collapse } td, th { padding: .3rem .6rem;
  overflow-wrap: anywhere; border-bottom: 1px solid light-dark(#e3e6ea, #2c3238) }
figure { display: inline-block; margin: 0 .8rem .8rem 0; width: 10rem; vertical-align: top }
figure img { width: 10rem; height: 10rem; object-fit: cover; border-radius: 8px }
figcaption { font-size: .85rem; overflow-wrap: anywhere } .big { font-size: 2rem; font-weight: 650 }
"""


def make(kind: str, project: Project, learner: Learner) -> Response:
    """Return the answer that downloads one of `KINDS`."""
    stem = project.folder.name or "project"
    if kind == "model":
        path = project.folder / MODEL
        if learner.known.model is None or not path.exists():
            raise InputError("There is no model yet: give at least two classes some photos.")
        return FileResponse(path, filename=f"{stem}.miv", media_type="application/octet-stream")
    if kind == "csv":
        return _attachment(names_csv(project, learner), f"{stem}.csv", "text/csv")
    if kind == "report":
        return _attachment(report(project, learner), f"{stem} report.html", "text/html")
    if kind in SLOW:
        path = prepare(kind, project, learner)
        name = f"{stem}.onnx" if kind == "onnx" else f"{stem} page.zip"
        return FileResponse(path, filename=name, media_type="application/octet-stream")
    file = TemporaryFile(dir=project.folder / HIDDEN)  # noqa: SIM115  # closed after the answer
    try:
        sort_into_zip(project, learner, file)
    except BaseException:
        file.close()
        raise
    size = file.tell()
    headers = _headers(f"{stem} sorted.zip") | {"Content-Length": str(size)}
    return StreamingResponse(_chunks(file), media_type="application/zip", headers=headers)


def prepare(kind: str, project: Project, learner: Learner) -> Path:
    """Write one of `SLOW`, once per model; return the file."""
    hidden = project.folder / HIDDEN
    if kind == "onnx":
        learner.export(kind, hidden / "model.onnx")
        return hidden / "model.onnx"
    learner.export(kind, hidden / "page")
    path = hidden / "page.zip"
    with replacing(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
        for each in sorted((hidden / "page").iterdir()):
            archive.write(each, each.name)
    return path


def can_export_web() -> bool:
    """Return whether a web page can be exported: it carries onnxruntime-web."""
    from mivhead.export.web import find_runtime

    try:
        find_runtime(None)
    except NotAvailableError:
        return False
    return can_export()


def can_export() -> bool:
    """Return whether the packages that an exported classifier needs are installed."""
    return all(find_spec(each) is not None for each in ("onnx", "onnxscript"))


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        file.seek(0)
        while chunk := file.read(2**20):
            yield chunk


def _headers(name: str) -> dict[str, str]:
    return {"Content-Disposition": f"attachment; filename*=utf-8''{quote(name)}"}


def _attachment(text: str, name: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers=_headers(name))


def names_csv(project: Project, learner: Learner) -> str:
    """Return one row per photo: the shots with their classes, and what the new ones are named."""
    found, named = project.snapshot(), learner.known.predictions
    rows: list[list[object]] = []
    for photo in found.new:
        each = named.get(photo.id)
        if each is None:
            rows.append([photo.name, project.problem(photo) or UNNAMED, None, None, "new"])
        else:
            decision, label = str(each.decision), str(each.label)
            rows.append([photo.name, decision, label, round(each.probability, 4), "new"])
    for name, photos in found.classes.items():
        rows += [[photo.path, name, name, None, "shot"] for photo in photos]
    header = ["file", "decision", "label", "probability", "kind"]
    return to_csv(header, rows, excel=True)


def sort_into_zip(project: Project, learner: Learner, file: IO[bytes]) -> None:
    """Write a zip with a folder per class: the shots, and the new photos that were named so."""
    found, named = project.snapshot(), learner.known.predictions
    placed: list[tuple[str, Photo]] = []
    for name, photos in found.classes.items():
        placed += [(name, each) for each in photos]
    for photo in found.new:
        prediction = named.get(photo.id)
        placed.append((UNNAMED if prediction is None else str(prediction.decision), photo))
    taken: set[str] = set()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # photos are compressed already
        for folder, photo in placed:
            name = next(
                full
                for each in numbered(photo.name)
                if (full := f"{folder}/{each}").casefold() not in taken
            )
            taken.add(name.casefold())
            with suppress(FileNotFoundError):  # moved or deleted meanwhile
                archive.write(project.folder / photo.path, name)


def report(project: Project, learner: Learner) -> str:
    """Return a page about the model that needs no other file."""
    found, known = project.snapshot(), learner.known
    parts = [f"<h1>{escape(project.folder.name)}</h1>"]
    estimate = known.estimate
    if estimate is None or estimate["accuracy"] is None:
        parts.append("<p>There is no estimate of the accuracy yet.</p>")
    else:
        low, high = map(percent, estimate["interval"])
        parts.append(
            f'<p><span class="big">{percent(estimate["accuracy"])}</span> of new photos like these '
            f"should be named correctly ({low} to {high} are plausible). This is an estimate, in "
            "which every class counts the same. It comes from a model that had not seen them: it "
            f"named {estimate['right']} of {estimate['tested']} photos correctly.</p>"
        )
    checked: dict[str, Any] = {} if estimate is None else estimate["classes"]
    rows = []
    for name, photos in found.classes.items():
        _, tested, right = checked.get(name, (0, 0, 0))
        rows.append((name, len(photos), f"{right} of {tested}" if tested else "not tested"))
    header = ("Class", "Photos", "Named correctly")
    parts.append(f"<h2>Classes</h2>{html_table(header, rows, right=header[1:])}")
    if estimate is not None and estimate["confusions"]:
        header = ("Photos", "Class", "Taken for")
        table = html_table(header, estimate["confusions"], right=("Photos",))
        parts.append(f"<h2>Confusions</h2>{table}")
    suspects = [] if estimate is None else [s for s in estimate["suspects"] if s["likely"]]
    if suspects:
        parts.append("<h2>Photos to check</h2>")
        parts += [_figure(project, each) for each in suspects]
    counts: dict[str, int] = {}
    for each in found.new:
        prediction = known.predictions.get(each.id)
        name = UNNAMED if prediction is None else str(prediction.decision)
        counts[name] = counts.get(name, 0) + 1
    if counts:
        last = (UNSURE, NONE, UNNAMED)
        ordered = sorted(
            counts, key=lambda name: (last.index(name) + 1 if name in last else 0, name)
        )
        named = ((name, counts[name]) for name in ordered)
        table = html_table(("Name", "Photos"), named, right=("Photos",))
        parts.append(f"<h2>New photos</h2>{table}")
    title = escape(project.folder.name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<body><main>{''.join(parts)}</main></body></html>"
    )


def _figure(project: Project, suspect: dict[str, Any]) -> str:
    """Return a photo that looks mislabelled, or nothing if it is gone."""
    try:
        _, photo = project.find(suspect["id"])
        data = b64encode(project.thumbnail(photo).read_bytes()).decode()
    except (InputError, ImageError, OSError):
        return ""
    label, best = escape(suspect["label"]), escape(suspect["predicted"])
    return (
        f'<figure><img alt="" src="data:image/jpeg;base64,{data}"><figcaption>'
        f"{escape(photo.name)}: {label}, looks like {best} "
        f"({percent(suspect['probability'])})</figcaption></figure>"
    )
