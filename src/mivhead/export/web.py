"""A page that classifies images in the browser, in one file: page, model and onnxruntime-web.

Browsers load no scripts or data from other files when a page is double-clicked, so the page
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
from mivhead.decision import MAX_ERRORS
from mivhead.errors import InputError, NotAvailableError
from mivhead.export.fetch_runtime import FILES as RUNTIME
from mivhead.export.fetch_runtime import FOLDER, PACKAGE
from mivhead.export.model import Export, export_model
from mivhead.model.exported import ExportedClassifier
from mivhead.model.model import Model

STYLES = ("palette.css", "page.css")
SCRIPTS = ("texts.js", "resize.js", "page.js")
NOTICE = "onnxruntime-license.txt"
PAGE = "index.html"
MARK = '<meta name="generator" content="mivhead">'  # by which an earlier export is recognised
POLICY = (
    "default-src 'none'; script-src {scripts} blob: 'wasm-unsafe-eval'; style-src {styles}; "
    "img-src blob: data:; media-src blob:; connect-src blob: data:; base-uri 'none'; "
    "form-action 'none'"
)


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
        page = make_page(file, title, max_errors)
    write_text(folder / PAGE, page)
    return replace(export, bytes=(folder / PAGE).stat().st_size)


def make_page(model: Path, title: str, max_errors: float = MAX_ERRORS) -> str:
    """Return the page of an exported model that takes images."""
    assets, runtime = files("mivhead.export") / "web_page", find_runtime()
    style = "".join((assets / name).read_text("utf-8") for name in STYLES)
    runtime_script = _inline((runtime / RUNTIME[0]).read_text("utf-8"))
    script = _inline("".join((assets / name).read_text("utf-8") for name in SCRIPTS))
    packed = {"glue": runtime / RUNTIME[1], "wasm": runtime / RUNTIME[2], "model": model}
    # Without `<`, JSON cannot end its script element.
    document = json.dumps(_describe(model, max_errors)).replace("<", "\\u003c")
    parts = [
        f"<!--\n{(assets / NOTICE).read_text('utf-8')}-->",
        f'<script id="document" type="application/json">{document}</script>',
    ]
    for name, path in packed.items():
        text = base64.b64encode(gzip.compress(path.read_bytes(), 6, mtime=0)).decode()
        parts.append(f'<script id="part-{name}" type="text/plain">{text}</script>')
    scripts = f"{_hash(runtime_script)} {_hash(script)}"
    values = {
        "policy": POLICY.format(scripts=scripts, styles=_hash(style)),
        "title": escape(title),
        "style": style,
        "parts": "\n".join(parts),
        "runtime": runtime_script,
        "script": script,
    }
    template = (assets / PAGE).read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], template)


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


def _inline(script: str) -> str:
    """Return a script that can stand in a page, without its reference to a source map."""
    script = re.sub(r"^//# sourceMappingURL=.*$", "", script, flags=re.MULTILINE)
    return script.replace("</script", "<\\/script").replace("\r\n", "\n")


def _hash(text: str) -> str:
    """Return the name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
    earlier = page.is_file() and MARK.encode() in page.read_bytes()[:500]
    if folder.is_dir() and any(folder.iterdir()) and not earlier:
        raise InputError(
            f"The folder {folder} is not empty and was not written by `miv export --web`: choose "
            "another folder."
        )
