"""A static folder that classifies images in the browser: page, model and onnxruntime-web.

The runtime's files are copied from the npm package `onnxruntime-web`, so that the page loads
nothing from elsewhere.
"""

from __future__ import annotations

import json
import math
import shutil
from importlib.resources import files
from pathlib import Path

from mivhead._util.files import write_text
from mivhead._version import __version__
from mivhead.errors import InputError, NotAvailableError
from mivhead.export.model import Export, export_model
from mivhead.export.storage import Storage
from mivhead.model.exported import ExportedClassifier
from mivhead.model.fewshot import FewShotClassifier

PAGE = ("index.html", "palette.css", "page.css", "page.js", "resize.js")
RUNTIME = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
PACKAGE = "onnxruntime-web"


def export_web(
    model: FewShotClassifier,
    folder: str | Path,
    *,
    runtime: str | Path | None = None,
    title: str = "Image classifier",
    storage: Storage = "float32",
) -> Export:
    """Write a folder that any static web host can serve.

    Parameters
    ----------
    model : FewShotClassifier
        A fitted model with a backbone that can be exported.
    folder : str or Path
        The folder to write; it is created. An earlier export in it is replaced.
    runtime : str, Path or None, default=None
        Folder of the npm package onnxruntime-web. None: `node_modules` of the current folder or
        of one above it.
    title : str, default="Image classifier"
        Title of the page.
    storage : {"float32", "half", "int8"}, default="float32"
        How weights are stored.

    Returns
    -------
    Export
        Size of the model, and how far it is from the original.
    """
    folder, source = Path(folder), find_runtime(runtime)
    check_folder(folder)
    (folder / "runtime").mkdir(parents=True, exist_ok=True)
    export = export_model(model, folder / "model.onnx", input="images", storage=storage)
    loaded = ExportedClassifier(folder / "model.onnx")
    assert loaded.identity_ is not None, "it takes images"
    thresholds = None if loaded.no_decision else loaded.thresholds()
    document = {
        "title": title,
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
    write_text(folder / "model.json", json.dumps(document, indent=1, ensure_ascii=False))
    own = files("mivhead.export") / "web_page"
    for name in PAGE:
        write_text(folder / name, (own / name).read_text(encoding="utf-8"))
    for name in RUNTIME:
        shutil.copyfile(source / name, folder / "runtime" / name)
    return export


def find_runtime(given: str | Path | None) -> Path:
    """Return the folder with the files of onnxruntime-web."""
    here = Path.cwd()
    places = (
        [Path(given)] if given else [p / "node_modules" / PACKAGE for p in (here, *here.parents)]
    )
    for place in places:
        for folder in (place, place / "dist", place / "node_modules" / PACKAGE / "dist"):
            if all((folder / name).is_file() for name in RUNTIME):
                return folder
    where = f"{given} does not contain it" if given else "it is not in node_modules"
    raise NotAvailableError(
        f"The page needs the npm package {PACKAGE}, and {where}: run `npm install {PACKAGE}` here, "
        "or give its folder with --runtime."
    )


def check_folder(folder: Path) -> None:
    """Raise an error if a folder contains anything but an earlier export."""
    if folder.is_file():
        raise InputError(f"The output {folder} is a file; --web needs a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "model.json").is_file():
        raise InputError(
            f"The folder {folder} is not empty and was not written by `miv export --web`: choose "
            "another folder."
        )
