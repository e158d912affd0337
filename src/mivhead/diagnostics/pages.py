"""HTML of results: one self-contained file each, to open in a browser or to send to somebody.

`write_results` shows predictions with their reasons, `write_suggestions` images to label next.
Names that are entered on a page are downloaded as CSV, for `miv add`.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mivhead._util.files import write_text
from mivhead._util.page import SHARED, make_page
from mivhead.decision import NONE, UNSURE
from mivhead.diagnostics.explanation import CloseShot, Explanation
from mivhead.diagnostics.suggestion import Suggestion
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet

SIDE, SHOT_SIDE = 192, 72  # pixels of the longer side of an image, and of a shot
QUALITY = 72  # of JPEG
TOP = 3  # probabilities on a card
GROUPS = {"none": NONE, "unsure": UNSURE, "named": "named"}  # in the order of the page

ASSETS = Path(__file__).parent / "assets"
_BODY = """<header><h1>{title}</h1><p>{text}</p></header>
<nav class="bar" aria-label="filters"><div></div></nav>
<main>
<noscript>This page needs JavaScript, which your browser has switched off.</noscript>
</main>"""


def write_results(
    explanations: Iterable[Explanation],
    path: str | Path,
    *,
    title: str,
    classes: Sequence[Any],
    model: str | Path,
) -> None:
    """Write a page of predictions: first what the model could not name, then the least certain.

    The explanations are from `explain_images`; only thumbnails are kept. `model` is the file that
    learns from corrections.
    """
    gallery = _Gallery()
    cards = [_card(reasons, gallery) for reasons in explanations]
    cards.sort(key=lambda card: (list(GROUPS).index(card["group"]), card["top"][0][1]))
    text = "Least certain first. Where a name is wrong or missing, click the right one."
    _write(
        path, title, text, cards, classes=classes, model=model, groups=GROUPS, shots=gallery.shots
    )


def write_suggestions(
    suggestions: Sequence[Suggestion],
    images: ImageSet,
    path: str | Path,
    *,
    title: str,
    classes: Sequence[Any],
    model: str | Path | None,
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
    _write(path, title, text, cards, classes=classes, model=model, groups={}, shots=[])


def learning_command(model: str | Path | None) -> str:
    """Return the command by which a model learns from the downloaded file; None: a new model.

    >>> learning_command("my birds.miv")
    "miv add 'my birds.miv' corrections.csv"
    """
    command = ["fit"] if model is None else ["add", str(model)]
    return shlex.join(["miv", *command, "corrections.csv"])


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
    small = ImageOps.contain(small, (side, side))  # tiny images are enlarged
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _write(
    path: str | Path,
    title: str,
    text: str,
    cards: Sequence[dict[str, Any]],
    *,
    classes: Sequence[Any],
    model: str | Path | None,
    **more: Any,
) -> None:
    """Write a page; `text` is HTML, everything else is not."""
    listed = "\n".join(card["file"] for card in cards)
    document = (
        more
        | {
            "learn": learning_command(model),
            "classes": [str(name) for name in classes],
            "folder": Path.cwd().as_posix(),  # so that the saved file works from any folder
            "items": cards,
            "key": hashlib.sha256(listed.encode("utf-8", "replace")).hexdigest()[:16],
        }
    )
    style, *scripts = (
        path.read_text("utf-8") for path in (ASSETS / "page.css", SHARED, ASSETS / "page.js")
    )
    body = _BODY.format(title=escape(title), text=text)
    write_text(path, make_page(title, body, style, ["".join(scripts)], data=document))
