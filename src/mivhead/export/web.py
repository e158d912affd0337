"""A page that classifies images in the browser, in one file: page, model and onnxruntime-web.

Browsers load no scripts or data from other files when a page is double-clicked, so the page
contains everything: the style, the scripts, and the model and the runtime as compressed text. It
loads nothing from elsewhere, which its Content-Security-Policy also forbids.
"""

from __future__ import annotations

import base64
import gzip
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mivhead._util.files import write_text
from mivhead._util.page import SHARED, make_page
from mivhead._version import __version__
from mivhead.decision import MAX_ERRORS
from mivhead.errors import InputError, NotAvailableError
from mivhead.export.fetch_runtime import FILES as RUNTIME
from mivhead.export.fetch_runtime import FOLDER, PACKAGE
from mivhead.export.model import Export, export_model
from mivhead.model.exported import ExportedClassifier
from mivhead.model.model import Model

ASSETS = Path(__file__).parent / "web_page"
BODY, STYLE, NOTICE = "body.html", "page.css", "onnxruntime-license.txt"
SCRIPTS = ("texts.js", "resize.js", "page.js")
PAGE = "index.html"
MARK = b'<script id="part-model"'  # by which an earlier export is recognised
ALLOWED = {
    "script-src": "blob: 'wasm-unsafe-eval'",
    "img-src": "blob: data:",
    "media-src": "blob:",
    "connect-src": "blob: data:",
}


def export_web(
    model: Model,
    folder: str | Path,
    *,
    title: str = "Image classifier",
    max_errors: float = MAX_ERRORS,
) -> Export:
    """Write a page that can be double-clicked, and works on any static web host.

    The folder is created, and an earlier export in it is replaced. The model needs a backbone that
    can be exported.
    """
    folder = Path(folder)
    check_folder(folder)
    with TemporaryDirectory() as place:
        file = Path(place, "model.onnx")
        export = export_model(model, file, input="images")
        page = render(file, title, max_errors)
    write_text(folder / PAGE, page)
    return replace(export, bytes=(folder / PAGE).stat().st_size)


def render(model: Path, title: str, max_errors: float) -> str:
    """Return the page of an exported model that takes images."""
    runtime = find_runtime()
    body, style, notice = ((ASSETS / name).read_text("utf-8") for name in (BODY, STYLE, NOTICE))
    parts = [f"{body}<!--\n{notice}-->"]
    packed = {"glue": runtime / RUNTIME[1], "wasm": runtime / RUNTIME[2], "model": model}
    for name, path in packed.items():
        text = base64.b64encode(gzip.compress(path.read_bytes(), 6, mtime=0)).decode()
        parts.append(f'<script id="part-{name}" type="text/plain">{text}</script>')
    scripts = [SHARED, *(ASSETS / name for name in SCRIPTS)]
    return make_page(
        title,
        "\n".join(parts),
        style,
        [
            (runtime / RUNTIME[0]).read_text("utf-8"),
            "".join(path.read_text("utf-8") for path in scripts),
        ],
        data=_describe(model, max_errors),
        allowed=ALLOWED,
    )


def _describe(model: Path, max_errors: float) -> dict[str, object]:
    """Return what the page must know about a model."""
    loaded = ExportedClassifier(model)
    identity, thresholds = loaded.identity_, loaded.thresholds(max_errors=max_errors)
    assert identity is not None, "it takes images"
    unknown = thresholds.unknown if math.isfinite(thresholds.unknown) else None
    limits = {"probability": thresholds.probability, "other": thresholds.other}
    return {
        "classes": [str(name) for name in loaded.classes_.tolist()],
        "backbone": identity.name,
        "preprocessing": identity.as_json()["preprocessing"],
        "thresholds": {"unknown": unknown, **limits},
        "version": __version__,
    }


def find_runtime() -> Path:
    """Return the folder of onnxruntime-web, which comes with mivhead."""
    if all((FOLDER / name).is_file() for name in RUNTIME):
        return FOLDER
    raise NotAvailableError(
        f"The page needs {PACKAGE}, and this installation came without it: install npm, then "
        "mivhead again (in a clone of it, run `make web-runtime`)."
    )


def check_folder(folder: Path) -> None:
    """Raise an error if a folder contains anything but an earlier export."""
    if folder.is_file():
        raise InputError(f"The output {folder} is a file; --web needs a folder.")
    page = folder / PAGE
    earlier = page.is_file() and MARK in page.read_bytes()
    if folder.is_dir() and any(folder.iterdir()) and not earlier:
        raise InputError(
            f"The folder {folder} is not empty and was not written by `miv export --web`: choose "
            "another folder."
        )
