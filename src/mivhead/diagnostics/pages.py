"""HTML of results: one self-contained file each, to open in a browser or to send to somebody.

`write_results` shows predictions with their reasons, `write_suspects` the shots that look
mislabelled; on both pages corrections can be marked and downloaded as CSV, for `miv add` and
`miv relabel`. `explanation_html` is the display of one explanation in a notebook.

Names and files may come from anyone: they reach a page only as JSON that a script sets as text, or
escaped. A page loads nothing, and its Content-Security-Policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead._util.files import write_text
from mivhead._version import __version__
from mivhead.diagnostics.cross_validation import CrossValidation
from mivhead.diagnostics.explanation import CloseShot, Explanation
from mivhead.diagnostics.pictures import overlay
from mivhead.diagnostics.suggestion import Suggestion, labels_for
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet
from mivhead.model.decision import NONE, UNSURE
from mivhead.model.shots import Shots

SIDE, SHOT_SIDE = 192, 72  # pixels of the longer side of an image, and of a shot
QUALITY = 72  # of JPEG
TOP, WHY = 3, 3  # probabilities and votes on a card
ORDER = {"none": 0, "unsure": 1, "named": 2}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src '{style_hash}'; script-src '{script_hash}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="mivhead {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{text}</p></header>
<nav class="bar" aria-label="filters"><div></div></nav>
<main><noscript>This page needs JavaScript, which your browser has switched off.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_results(
    explanations: Iterable[Explanation],
    path: str | Path,
    *,
    title: str,
    classes: Sequence[Any],
) -> int:
    """Write a page of predictions: first what the model could not name, then the least certain.

    The explanations are from `explain_images`; only thumbnails are kept. Returns how many there
    are.
    """
    gallery = _Gallery()
    items = [_prediction(each, gallery) for each in explanations]
    items.sort(key=lambda item: (ORDER[item["group"]], item["top"][0][1]))
    document = {
        "groups": [["all", "all"], ["none", NONE], ["unsure", UNSURE], ["named", "named"]],
        "classes": [str(name) for name in classes],
        "ask": "wrong? the right name",
        "columns": "path,label",
        "folder": Path.cwd().as_posix(),  # so that the saved file works from any folder
        "nothing": "There are no predictions.",
        "shots": gallery.shots,
        "items": items,
    }
    text = (
        "Images that the model could not name come first, then the least certain names. Enter the "
        "right names, download the corrections, and teach the model with "
        "<code>miv add MODEL corrections.csv</code>."
    )
    _write(path, title, text, document)
    return len(items)


def write_suspects(result: CrossValidation, shots: Shots, path: str | Path, *, title: str) -> int:
    """Write a page of shots that look mislabelled, next to shots of both classes; count them."""
    gallery = _Gallery()
    rows = dict(zip(shots.names, range(len(shots)), strict=True))
    items = []
    for suspect in result.suspects:
        row = rows[suspect.id]
        probabilities = result.probabilities[result.ids.index(suspect.id)]
        ranked = np.argsort(-probabilities, kind="stable")[:TOP]
        neighbours = [
            other
            for label in (suspect.label, suspect.predicted)
            for other in np.flatnonzero(shots.labels.astype(str) == label).tolist()
            if other != row
        ]
        near = [n for n in neighbours if str(shots.labels[n]) == suspect.label][:TOP]
        near += [n for n in neighbours if str(shots.labels[n]) != suspect.label][:TOP]
        items.append(
            {
                "file": suspect.id,
                "group": "unsure",
                "label": suspect.label,
                "title": suspect.label,
                "note": f"{'mislabelled? ' * suspect.mislabelled}looks like {suspect.predicted}",
                "top": [[str(result.classes[c]), float(probabilities[c])] for c in ranked],
                "src": _thumbnail(shots.pictures[row], SIDE),
                "near": [
                    [gallery.place(shots.names[n], shots.labels[n], shots.pictures[n]), None]
                    for n in near
                ],
            }
        )
    document = {
        "groups": [["all", "all"]],
        "classes": [str(name) for name in shots.classes],
        "ask": "mislabelled? the right class",
        "columns": "shot,class",
        "nothing": "No shot looks mislabelled.",
        "shots": gallery.shots,
        "items": items,
    }
    text = (
        "Each of these shots was predicted as another class by a model that had not seen it. Those "
        "marked <i>mislabelled?</i> come first; the others are most likely just hard. Shots in "
        "dashed frames belong to the class that it looks like. If a class is wrong, enter the "
        "right one. Then download the corrections, and apply them with "
        "<code>miv relabel MODEL corrections.csv</code>."
    )
    _write(path, title, text, document)
    return len(items)


def write_suggestions(
    suggestions: Sequence[Suggestion],
    images: ImageSet,
    path: str | Path,
    *,
    title: str,
    classes: Sequence[Any],
) -> None:
    """Write a page of images to label next, which takes their names.

    Users can choose from `classes`, or enter others.
    """
    rows = dict(zip(images.ids, range(len(images)), strict=True))
    items: list[dict[str, Any]] = [
        {
            "file": each.id,
            "group": "named" if each.new_class is None else "none",
            "label": "" if each.label is None else str(each.label),
            "title": reason,
            "note": "" if each.label is None else f"looks like {each.label}",
            "top": [],
            "src": _jpeg(images.load(rows[each.id]), SIDE),
            "near": [],
        }
        for each, reason in zip(suggestions, labels_for(suggestions), strict=True)
    ]
    document = {
        "groups": [["all", "all"]],
        "classes": [str(name) for name in classes],
        "ask": "what is it?",
        "columns": "path,label",
        "folder": Path.cwd().as_posix(),  # so that the saved file works from any folder
        "nothing": "There is nothing to label.",
        "shots": [],
        "items": items,
    }
    text = (
        "Labels for these images help most. Enter their names, known or new, download them, and "
        "teach the model with <code>miv add MODEL corrections.csv</code>."
    )
    _write(path, title, text, document)


def explanation_html(reasons: Explanation) -> str:
    """Return an explanation as a fragment of HTML without scripts, for a notebook."""
    best = reasons.prediction
    name = str(best.label) if best.decision == best.label else f"{best.decision} ({best.label}?)"
    rows = "".join(
        f"<tr><td>{escape(str(label))}</td><td>{100 * p:.1f} %</td></tr>"
        for label, p in list(best.probabilities.items())[:TOP]
    )
    pictures = blocks = ""
    if reasons.image is not None:
        pictures += _figure(_jpeg(reasons.image, SIDE), "image")
        if reasons.heat is not None:
            pictures += _figure(_tinted(reasons.image, reasons.heat), "where it looked")
        blocks = "".join(
            _figure(_tinted(reasons.image, heat), f"block {i + 1}")
            for i, heat in reasons.blocks.items()
        )
    shots = ""
    for shot in reasons.shots:
        share = "" if shot.weight is None else f" {100 * shot.weight:.0f} %"
        shots += _figure(_thumbnail(shot.picture, SHOT_SIDE), f"{shot.label}{share}", shot.name)
    votes = "".join(
        f"<tr><td>{escape(vote.member)}</td><td>{escape(str(vote.label))}</td>"
        f"<td>{'' if vote.separates is None else f'{vote.separates:+.2f}'}</td></tr>"
        for vote in reasons.votes
    )
    return (
        f"<div><strong>{escape(name)}</strong> <small>{escape(best.id)}</small>"
        f"<table>{rows}</table><p>{escape(reasons.words)}</p><div>{pictures}</div>"
        f"<div>{shots}</div><details><summary>Details</summary><div>{blocks}</div>"
        f"<p>Members of the ensemble, what they vote for, and what they add to the log-odds of "
        f"{escape(str(best.label))} against {escape(str(reasons.runner_up))}:</p>"
        f"<table>{votes}</table></details></div>"
    )


def _tinted(image: Image.Image, heat: NDArray[np.floating[Any]]) -> str:
    return _jpeg(Image.fromarray((255 * overlay(image, [heat])).astype(np.uint8)), SIDE)


def _figure(source: str | None, caption: str, title: str = "") -> str:
    image = "" if source is None else f'<img src="{source}" alt="{escape(caption)}"><br>'
    return (
        f'<figure style="display:inline-block;margin:4px" title="{escape(title)}">{image}'
        f"<figcaption><small>{escape(caption)}</small></figcaption></figure>"
    )


def _prediction(reasons: Explanation, gallery: _Gallery) -> dict[str, Any]:
    """Return what the card of a prediction shows."""
    best = reasons.prediction
    group = {NONE: "none", UNSURE: "unsure"}.get(best.decision, "named")
    if best.decision == best.label:
        group = "named"
    decisive = [vote for vote in reasons.votes if vote.separates is not None][:WHY]
    item: dict[str, Any] = {
        "file": best.id,
        "group": group,
        "label": str(best.label),
        "title": str(best.decision),
        "note": "" if group == "named" else f"({best.label}?)",
        "top": [[str(label), p] for label, p in list(best.probabilities.items())[:TOP]],
        "src": None if reasons.image is None else _jpeg(reasons.image, SIDE),
        "near": [
            [gallery.place_close(shot), shot.weight if shot.label == best.label else None]
            for shot in _some(reasons.shots, best)
        ],
    }
    if decisive:
        votes = ", ".join(f"{vote.member} {vote.separates:+.1f}" for vote in decisive)
        item["why"] = reasons.words
        item["votes"] = f"Log-odds of {best.label} against {reasons.runner_up}: {votes}."
    if (rest := reasons.other_attention(best.label)) is not None:
        item["rest"] = rest
    if reasons.heat is not None and reasons.image is not None:
        item |= {"heat": _bytes(reasons.heat), "grid": list(reasons.heat.shape)}
    return item


def _some(shots: Sequence[CloseShot], best: Any) -> list[CloseShot]:
    """Return the closest shots of the predicted class, and the closest one of the runner-up."""
    own = [shot for shot in shots if shot.label == best.label]
    return own + [shot for shot in shots if shot.label != best.label][:1]


class _Gallery:
    """Thumbnails of shots, each once in the page."""

    def __init__(self) -> None:
        self.shots: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    def place(self, name: str, label: Any, picture: bytes | None) -> int:
        """Return the place of a shot in the list."""
        if name not in self._places:
            self._places[name] = len(self.shots)
            source = _thumbnail(picture, SHOT_SIDE)
            self.shots.append({"file": name, "label": str(label), "src": source})
        return self._places[name]

    def place_close(self, shot: CloseShot) -> int:
        return self.place(shot.name, shot.label, shot.picture)


def _thumbnail(picture: bytes | None, side: int) -> str | None:
    return None if picture is None else _jpeg(load_image(picture), side)


def _jpeg(image: Image.Image, side: int) -> str:
    """Encode a thumbnail as a data URI."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _bytes(heat: NDArray[np.floating[Any]]) -> str:
    """Encode a heat map as one byte per patch, the hottest being 255."""
    scaled = np.round(255 * heat / max(float(heat.max()), 1e-12)).astype(np.uint8)
    return base64.b64encode(scaled.tobytes()).decode()


def _write(path: str | Path, title: str, text: str, document: dict[str, Any]) -> None:
    """Write a page; `text` is HTML, everything else is not."""
    listed = "\n".join(each["file"] for each in document["items"])
    document["key"] = hashlib.sha256(listed.encode("utf-8", "replace")).hexdigest()[:16]
    assets = files("mivhead.diagnostics") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = (assets / "page.js").read_text(encoding="utf-8")
    data = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # so that nothing in the data ends the script element
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = _PAGE.format(
        title=escape(title),
        text=text,
        version=__version__,
        style=style,
        style_hash=_csp_hash(style),
        script=script,
        script_hash=_csp_hash(script),
        data=data,
    )
    write_text(path, page)


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
