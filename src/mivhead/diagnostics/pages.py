"""HTML of results: one self-contained file each, to open in a browser or to send to somebody.

`write_results` shows predictions with their reasons, `write_suggestions` images to label next.
Names that are entered on a page are downloaded as CSV, for `miv add`.

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
from PIL import Image

from mivhead._util.files import write_text
from mivhead._version import __version__
from mivhead.decision import NONE, UNSURE
from mivhead.diagnostics.explanation import CloseShot, Explanation
from mivhead.diagnostics.suggestion import Suggestion
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet

SIDE, SHOT_SIDE = 192, 72  # pixels of the longer side of an image, and of a shot
QUALITY = 72  # of JPEG
TOP = 3  # probabilities on a card
GROUPS = {"none": NONE, "unsure": UNSURE, "named": "named"}  # in the order of the page

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
    explanations: Iterable[Explanation], path: str | Path, *, title: str, classes: Sequence[Any]
) -> None:
    """Write a page of predictions: first what the model could not name, then the least certain.

    The explanations are from `explain_images`; only thumbnails are kept.
    """
    gallery = _Gallery()
    cards = [_card(reasons, gallery) for reasons in explanations]
    cards.sort(key=lambda card: (list(GROUPS).index(card["group"]), card["top"][0][1]))
    text = "Least certain first. Where a name is wrong or missing, click the right one."
    document = {
        "groups": [["all", "all"], *([key, name] for key, name in GROUPS.items())],
        "nothing": "There are no photos.",
        "shots": gallery.shots,
    }
    _write(path, title, text, classes, cards, document)


def write_suggestions(
    suggestions: Sequence[Suggestion],
    images: ImageSet,
    path: str | Path,
    *,
    title: str,
    classes: Sequence[Any],
) -> None:
    """Write a page of images to label next, which takes their names: `classes`, or others."""
    rows = dict(zip(images.ids, range(len(images)), strict=True))
    cards: list[dict[str, Any]] = [
        {
            "file": image.id,
            "group": "named" if image.new_class is None else "none",
            "label": "" if image.label is None else str(image.label),
            "title": image.reason,
            "note": "" if image.label is None else f"looks like {image.label}",
            "top": [],
            "src": _thumbnail(images.load(rows[image.id]), SIDE),
            "near": [],
        }
        for image in suggestions
    ]
    text = "The model learns most from these photos. What do they show? Click a class, or type one."
    document = {"groups": [["all", "all"]], "nothing": "There are no photos.", "shots": []}
    _write(path, title, text, classes, cards, document)


def _card(reasons: Explanation, gallery: _Gallery) -> dict[str, Any]:
    """Return what the card of a prediction shows."""
    best = reasons.prediction
    group = "named"
    if best.decision != best.label:
        group = "none" if best.decision == NONE else "unsure"
    others = [shot for shot in reasons.shots if shot.label != best.label]
    near = [shot for shot in reasons.shots if shot.label == best.label] + others[:1]
    card: dict[str, Any] = {
        "file": best.id,
        "group": group,
        "label": str(best.label),
        "title": str(best.decision),
        "note": best.unlike if group == "none" else "",
        "top": [[str(label), p] for label, p in best.top(TOP)],
        "src": None if reasons.image is None else _thumbnail(reasons.image, SIDE),
        "near": [
            [gallery.place(shot), shot.weight if shot.label == best.label else None]
            for shot in near
        ],
    }
    if any(vote.separates is not None for vote in reasons.votes):
        card["why"] = reasons.words
    if (rest := reasons.other_attention(best.label)) is not None:
        card["rest"] = rest
    if (heat := reasons.heat) is not None and reasons.image is not None:
        scaled = np.round(255 * heat / max(float(heat.max()), 1e-12)).astype(np.uint8)
        card["heat"] = base64.b64encode(scaled.tobytes()).decode()
        card["grid"] = list(heat.shape)
    return card


class _Gallery:
    """Thumbnails of shots, each once in the page."""

    def __init__(self) -> None:
        self.shots: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    def place(self, shot: CloseShot) -> int:
        """Return the place of a shot in the list."""
        if shot.name not in self._places:
            self._places[shot.name] = len(self.shots)
            source = None
            if shot.picture is not None:
                source = _thumbnail(load_image(shot.picture), SHOT_SIDE)
            self.shots.append({"file": shot.name, "label": str(shot.label), "src": source})
        return self._places[shot.name]


def _thumbnail(image: Image.Image, side: int) -> str:
    """Encode a thumbnail as a data URI."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _write(
    path: str | Path,
    title: str,
    text: str,
    classes: Sequence[Any],
    cards: Sequence[dict[str, Any]],
    document: dict[str, Any],
) -> None:
    """Write a page; `text` is HTML, everything else is not."""
    listed = "\n".join(card["file"] for card in cards)
    document |= {
        "classes": [str(name) for name in classes],
        "folder": Path.cwd().as_posix(),  # so that the saved file works from any folder
        "items": cards,
        "key": hashlib.sha256(listed.encode("utf-8", "replace")).hexdigest()[:16],
    }
    data = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # so that nothing in the data ends the script element
        data = data.replace(character, f"\\u{ord(character):04x}")
    assets = files("mivhead.diagnostics") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = (assets / "page.js").read_text(encoding="utf-8")
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
    """Return the name of an inline script or style in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
