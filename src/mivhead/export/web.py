"""A page that classifies images in the browser, in one file: page, model and onnxruntime-web.

Browsers load no scripts or data from other files when a page is opened by double-click, so the page
contains everything: the style, the scripts, and the model and the runtime as compressed text. It
loads nothing from elsewhere, which its Content-Security-Policy also forbids.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from mivhead._util.files import write_text
from mivhead._version import __version__
from mivhead.errors import InputError, NotAvailableError
from mivhead.export.fetch_runtime import FILES as RUNTIME
from mivhead.export.fetch_runtime import FOLDER, PACKAGE
from mivhead.export.model import Export, export_model
from mivhead.export.storage import Storage
from mivhead.model.exported import ExportedClassifier
from mivhead.model.fewshot import FewShotClassifier

STYLES = ("palette.css", "page.css")
SCRIPTS = ("texts.js", "resize.js", "page.js")
NOTICE = "onnxruntime-license.txt"
PAGE = "index.html"
MARK = '<meta name="generator" content="mivhead">'  # by which an earlier export is recognised
EARLIER = (  # files of earlier versions, which wrote a page of several files
    *("model.json", "model.onnx", "palette.css", "page.css", "page.js", "resize.js"),
    *(f"runtime/{name}" for name in RUNTIME),
)
POLICY = (
    "default-src 'none'; script-src {scripts} blob: 'wasm-unsafe-eval'; style-src {styles}; "
    "img-src blob: data:; media-src blob:; connect-src blob: data:; base-uri 'none'; "
    "form-action 'none'"
)


def export_web(
    model: FewShotClassifier,
    folder: str | Path,
    *,
    runtime: str | Path | None = None,
    title: str = "Image classifier",
    storage: Storage = "float32",
) -> Export:
    """Write a page that works by double-click and on any static web host.

    Parameters
    ----------
    model : FewShotClassifier
        A fitted model with a backbone that can be exported.
    folder : str or Path
        The folder to write `index.html` to; it is created. An earlier export in it is replaced.
    runtime : str, Path or None, default=None
        Folder of the npm package onnxruntime-web. None: the one that came with mivhead, or
        `node_modules` of the current folder or of one above it.
    title : str, default="Image classifier"
        Title of the page.
    storage : {"float32", "half", "int8"}, default="float32"
        How weights are stored.

    Returns
    -------
    Export
        Size of the page, and how far its model is from the original.
    """
    folder, source = Path(folder), find_runtime(runtime)
    check_folder(folder)
    with TemporaryDirectory() as place:
        file = Path(place, "model.onnx")
        export = export_model(model, file, input="images", storage=storage)
        page = make_page(file, source, title)
    write_text(folder / PAGE, page)
    for name in EARLIER:
        (folder / name).unlink(missing_ok=True)
    if (folder / "runtime").is_dir() and not any((folder / "runtime").iterdir()):
        (folder / "runtime").rmdir()
    return replace(export, bytes=(folder / PAGE).stat().st_size)


def make_page(model: Path, runtime: Path, title: str) -> str:
    """Return the page of an exported model that takes images.

    `runtime` is the folder with the files of onnxruntime-web.
    """
    own = files("mivhead.export") / "web_page"
    style = "".join((own / name).read_text("utf-8") for name in STYLES)
    scripts = [
        _inline((runtime / RUNTIME[0]).read_text("utf-8")),
        _inline("".join((own / name).read_text("utf-8") for name in SCRIPTS)),
    ]
    glue, wasm = runtime / RUNTIME[1], runtime / RUNTIME[2]
    parts = [
        f"<!--\n{(own / NOTICE).read_text('utf-8')}-->",
        _block("document", "application/json", _as_json(_describe(model))),
        *(
            _block(f"part-{name}", "text/plain", _packed(path))
            for name, path in (("glue", glue), ("wasm", wasm), ("model", model))
        ),
    ]
    values = {
        "policy": POLICY.format(scripts=" ".join(map(_hash, scripts)), styles=_hash(style)),
        "title": escape(title),
        "style": style,
        "parts": "\n".join(parts),
        "runtime": scripts[0],
        "script": scripts[1],
    }
    template = (own / PAGE).read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _describe(model: Path) -> dict[str, object]:
    """Return what the page must know about a model."""
    loaded = ExportedClassifier(model)
    assert loaded.identity_ is not None, "it takes images"
    thresholds = None if loaded.no_decision else loaded.thresholds()
    return {
        "classes": [str(name) for name in loaded.classes_.tolist()],
        "backbone": loaded.identity_.name,
        "preprocessing": loaded.identity_.as_json()["preprocessing"],
        "thresholds": thresholds
        and {
            "unknown": thresholds.unknown if math.isfinite(thresholds.unknown) else None,
            "probability": thresholds.probability,
            "other": thresholds.other,
        },
        "version": __version__,
    }


def _as_json(document: object) -> str:
    """Return JSON that contains no `<`, so that it cannot end its script element."""
    return json.dumps(document).replace("<", "\\u003c")


def _packed(path: Path) -> str:
    return base64.b64encode(gzip.compress(path.read_bytes(), 6, mtime=0)).decode()


def _block(id_: str, kind: str, text: str) -> str:
    return f'<script id="{id_}" type="{kind}">{text}</script>'


def _inline(script: str) -> str:
    """Return a script that can stand in a page, without its reference to a source map."""
    script = re.sub(r"^//# sourceMappingURL=.*$", "", script, flags=re.MULTILINE)
    return script.replace("</script", "<\\/script").replace("\r\n", "\n")


def _hash(text: str) -> str:
    """Return the name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def find_runtime(given: str | Path | None) -> Path:
    """Return the folder with the files of onnxruntime-web."""
    here = Path.cwd()
    found = (each / "node_modules" / PACKAGE for each in (here, *here.parents))
    places = [Path(given)] if given else [FOLDER, *found]
    for place in places:
        for folder in (place, place / "dist", place / "node_modules" / PACKAGE / "dist"):
            if all((folder / name).is_file() for name in RUNTIME):
                return folder
    where = f"{given} does not contain it" if given else "this installation came without it"
    raise NotAvailableError(
        f"The page needs the npm package {PACKAGE}, and {where}: run `npm install {PACKAGE}` here "
        "(in a clone of mivhead, `make web-runtime`), or give its folder with --runtime."
    )


def check_folder(folder: Path) -> None:
    """Raise an error if a folder contains anything but an earlier export."""
    if folder.is_file():
        raise InputError(f"The output {folder} is a file; --web needs a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_export(folder):
        raise InputError(
            f"The folder {folder} is not empty and was not written by `miv export --web`: choose "
            "another folder."
        )


def _is_export(folder: Path) -> bool:
    if (folder / "model.json").is_file():  # by an earlier version
        return True
    try:
        with (folder / PAGE).open(encoding="utf-8") as file:
            return MARK in file.read(500)
    except (OSError, UnicodeDecodeError):
        return False
