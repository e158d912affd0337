"""What the demo's picture shows: one card per class, and the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mivhead.classifier import MIVClassifier
from mivhead.cli.demo.compare import METHODS
from mivhead.data.images import load_image
from mivhead.explain import explain
from mivhead.pictures.report import Bar, Card, draw_report

if TYPE_CHECKING:
    from mivhead.cli.demo.steps import Demo


MISTAKES = 5  # shown at most


def draw_demo(demo: Demo, path: Path) -> None:
    """Draw the first new image of every class, some mistakes, and the comparison."""
    labels = demo.new_labels
    firsts = [int(np.flatnonzero(labels == name)[0]) for name in demo.names]
    wrong = [row for row, each in enumerate(demo.predictions) if each.label != labels[row]]
    mistakes = [row for row in wrong if row not in firsts][:MISTAKES]
    result = demo.comparison
    total = len(labels)
    draw_report(
        {
            "The first new image of every class": _cards(demo, firsts),
            "Mistakes": _cards(demo, mistakes) if mistakes else [],
        },
        [Bar(name, result.mean(key), result.half_width(key)) for key, name in METHODS.items()],
        path,
        title=f"{len(demo.names)} classes learned from {demo.scale.shots} images each",
        subtitle=f"{total - len(wrong)} of {total} new images are named right. Orange: what the "
        "MIV-head looked at. Closest shot: the training image it paid most attention to.",
        chart_title=f"Accuracy over {result.tasks} random tasks on the same features "
        "(mean, 95 % interval)",
    )


def _cards(demo: Demo, rows: list[int]) -> list[Card]:
    classifier = demo.classifier.classifier_
    if not isinstance(classifier, MIVClassifier):
        raise TypeError("only the MIV-head has attention to draw")
    attention = explain(classifier, demo.new.features[rows])
    labels = np.asarray(demo.shots.labels)
    order = np.argsort(labels, kind="stable")  # the classifier keeps its shots ordered by class
    cards = []
    for place, row in enumerate(rows):
        prediction = demo.predictions[row]
        weights = np.sum([b.shots[place] for b in attention if b.shots is not None], axis=0)
        of_class = np.where(labels[order] == prediction.label, weights, -1.0)
        closest = demo.shots.ids[order[of_class.argmax()]]
        cards.append(
            Card(
                image=load_image(demo.new.ids[row]),
                heats=[b.patches[place] for b in attention if b.patches is not None],
                shot=load_image(demo.folders.shots / closest),
                truth=str(demo.new_labels[row]),
                probabilities=prediction.probabilities,
            )
        )
    return cards
