"""Why a model gives an image its name: where it looked, which shots are close, who voted how.

`Explanation` holds plain values and no presentation. `mivhead.diagnostics.reasons_picture` draws
it, `mivhead.diagnostics.pages` makes HTML of it, and `as_json` is for services and programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.attention import explain as attention_of
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.errors import InputError
from mivhead.features import Features, FeatureTable
from mivhead.images.imageset import ImageSet
from mivhead.images.sources import as_image_set
from mivhead.model.fewshot import FewShotClassifier
from mivhead.model.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOTS = 3  # per class that an explanation names
NOTABLE = 0.1  # share of all votes from which on a reason is named
# What the members of the ensemble look at, in a reader's words.
MEMBERS = {
    "head": "details",
    "second_order": "texture",
    "layout": "layout",
    "mean": "overall look",
    "names": "class name",
}
BALANCE = "the correction for unequal shots"


@dataclass(frozen=True)
class Vote:
    """The vote of one member of the ensemble."""

    member: str  # what it looks at, and in which block of the backbone
    weight: float  # its weight in the ensemble
    label: Any  # the class that it prefers
    # How much it adds to the log-odds of the predicted class against the runner-up; negative if it
    # speaks for the runner-up. The sum over all members is the log-odds. None if the recipe does
    # not add up votes.
    separates: float | None


@dataclass(frozen=True)
class CloseShot:
    """A shot that an image was compared with."""

    # The shot and its class
    name: str
    label: Any
    # Its share of the attention to its class; None for methods without attention
    weight: float | None
    similarity: float  # cosine of the mean vectors of the two images in the deepest block
    # A small picture of it, if the model has one
    picture: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Explanation:
    """The reasons for one prediction.

    Parameters
    ----------
    prediction : Prediction
        What is explained.
    runner_up : object
        The second most probable class.
    heat : array of shape (H, W) or None
        Where the model looked: weights of the patches that sum to 1. None for a method without
        attention to patches.
    blocks : dict of int to array of shape (H, W)
        The same for each block of the features that has patches, by its number.
    shots : tuple of CloseShot
        The closest shots of the predicted class, then of the runner-up.
    votes : tuple of Vote
        The members of the ensemble, those that separate the two classes most first.
    image : PIL.Image.Image or None, default=None
        The image itself; None if only its features were given.

    Examples
    --------
    >>> from mivhead import FewShotClassifier
    >>> dark, light = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    >>> classifier = FewShotClassifier(threshold=0).fit([dark, light], ["night", "day"])
    >>> reasons = classifier.explain(light - 20)
    >>> reasons.prediction.label, reasons.runner_up, reasons.shots[0].label
    ('day', 'night', 'day')
    >>> reasons.heat.shape
    (14, 14)
    """

    prediction: Prediction
    runner_up: Any
    heat: NDArray[np.floating[Any]] | None
    blocks: dict[int, NDArray[np.floating[Any]]]
    shots: tuple[CloseShot, ...]
    votes: tuple[Vote, ...]
    image: Image.Image | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<Explanation of {self.prediction!r}>"

    @property
    def totals(self) -> dict[str, float]:
        """The votes of members that look at the same thing, in all blocks, added up."""
        found: dict[str, float] = {}
        for vote in self.votes:
            kind = vote.member.partition(" (")[0]
            found[kind] = found.get(kind, 0.0) + (vote.separates or 0.0)
        return found

    @property
    def words(self) -> str:
        """What separates the predicted class from the runner-up, in a sentence; empty if unknown.

        What hardly counts is left out.
        """
        totals = self.totals
        least = NOTABLE * sum(map(abs, totals.values()))
        ranked = sorted(totals, key=lambda kind: -abs(totals[kind]))
        speaking = [kind for kind in ranked if abs(totals[kind]) >= least > 0]
        sides = (
            ([kind for kind in speaking if totals[kind] > 0], self.prediction.label),
            ([kind for kind in speaking if totals[kind] < 0], self.runner_up),
        )
        parts = []
        for kinds, label in sides:
            verb = "speak" if len(kinds) > 1 or kinds == ["details"] else "speaks"
            parts += [f"{_listed(kinds)} {verb} for {label}"] if kinds else []
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}." if text else ""

    def other_attention(self, label: Any) -> float | None:
        """Return the share of the attention to a class that its other shots have.

        Parameters
        ----------
        label : object
            The class.

        Returns
        -------
        float or None
            Together with the weights of those in `shots`, it is 1. None for methods without
            attention.
        """
        weights = [shot.weight for shot in self.shots if shot.label == label]
        known = [weight for weight in weights if weight is not None]
        return max(0.0, 1 - sum(known)) if known else None

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document, without pictures.

        Returns
        -------
        dict
        """
        best = self.prediction
        facts = best.as_json(0)
        del facts["top"]
        return {
            **facts,
            "runner_up": {
                "label": self.runner_up,
                "probability": best.probabilities[self.runner_up],
            },
            "votes": [vars(vote) for vote in self.votes],
            "shots": [
                {k: v for k, v in vars(shot).items() if k != "picture"} for shot in self.shots
            ],
            "heat": None if self.heat is None else _rounded(self.heat),
            "blocks": {str(i): _rounded(heat) for i, heat in self.blocks.items()},
        }

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the reasons.

        Parameters
        ----------
        path : str or Path, default=None
            Where to write the drawing: a .png, .svg or .pdf file. None writes nothing.

        Returns
        -------
        matplotlib.figure.Figure
        """
        from mivhead.diagnostics.pictures import save_figure
        from mivhead.diagnostics.reasons_picture import draw_reasons

        figure = draw_reasons(self)
        if path is not None:
            save_figure(figure, path)
        return figure

    def _repr_html_(self) -> str:
        """Show the reasons in a notebook."""
        from mivhead.diagnostics.pages import explanation_html

        return explanation_html(self)


def explain_images(
    model: FewShotClassifier, images: Any, *, pictures: bool = True, **decision: Any
) -> Iterator[Explanation]:
    """Explain the predictions for any number of images, in bounded memory.

    Parameters
    ----------
    model : FewShotClassifier
        A fitted model of a method on features.
    images : images or FeatureTable
        What `FewShotClassifier.predict` takes.
    pictures : bool, default=True
        Whether explanations hold the images.
    **decision : dict
        Thresholds, as for `FewShotClassifier.classify`.

    Yields
    ------
    Explanation
        One per image, in their order.
    """
    if model.needs_images:
        raise InputError(
            f"{model.method} tunes the backbone; only methods on features can be explained."
        )
    if isinstance(images, FeatureTable):
        yield from _explain(model, images, None, decision)
        return
    image_set = as_image_set(images)
    start = 0
    for features in model.read_parts(image_set):
        rows = range(start, start + len(features))
        part = image_set.take(rows)
        table = FeatureTable(features, part.ids)
        yield from _explain(model, table, part if pictures else None, decision)
        start += len(features)


def _explain(
    model: FewShotClassifier, table: FeatureTable, images: ImageSet | None, decision: Any
) -> Iterator[Explanation]:
    predictions = model.classify(table, **decision)
    members = _Members(model, table.features)
    near = _Near(model, table.features)
    for row, prediction in enumerate(predictions):
        rest = (label for label in prediction.probabilities if label != prediction.label)
        runner_up = next(rest)
        labels = [prediction.label, runner_up]
        blocks = {i: heat[row] for i, heat in members.heats.items()}
        yield Explanation(
            prediction,
            runner_up,
            members.combine(blocks),
            blocks,
            tuple(shot for label in labels for shot in near.shots(row, label, members.attention)),
            members.votes(row, labels),
            None if images is None else images.load(row),
        )


class _Members:
    """What the members of a fitted MIV-head do with some images; nothing for other methods."""

    def __init__(self, model: FewShotClassifier, X: Features) -> None:
        self.classes = model.classes_.tolist()
        self.heats: dict[int, NDArray[np.floating[Any]]] = {}  # (image, H, W) by block
        self.attention: NDArray[np.floating[Any]] | None = None  # (image, shot)
        self._names: list[str] = []
        self._weights: NDArray[np.floating[Any]] = np.empty(0)
        self._block_weights: dict[int, float] = {}
        self._predictions: NDArray[np.floating[Any]] = np.empty((0, len(X), len(self.classes)))
        self._additive = False
        classifier = model.classifier_
        if isinstance(classifier, MIVClassifier):
            self._read(classifier, X)

    def _read(self, classifier: MIVClassifier, X: Features) -> None:
        head, ensemble = classifier.head_, classifier.ensemble_
        found = attention_of(classifier, X)
        self.heats = {
            i: block.patches
            for i, block in zip(head.taken, found, strict=True)
            if block.patches is not None
        }
        weights = [block.shots for block in found if block.shots is not None]
        self.attention = np.mean(weights, axis=0) if weights else None
        self._names = [f"{MEMBERS['head']} (block {i + 1})" for i in head.taken]
        features = classifier._as_features(X)
        predictions = classifier._cosines(features)
        self._weights = np.ones(len(predictions))
        if ensemble is not None:
            experts = ensemble.experts.ridges
            self._names += [f"{MEMBERS[e.kind]} (block {e.block + 1})" for e in experts]
            predictions = np.concatenate([predictions, ensemble.experts(features)])
            self._weights = ensemble.weights
            shares = ensemble.weights_by_class / self._weights[:, None]  # 1, if shots are equal
            predictions = predictions * shares[:, None]
            if ensemble.offsets is not None:
                self._names.append(BALANCE)
                self._weights = np.append(self._weights, np.float32(1))
                offsets = np.broadcast_to(ensemble.offsets, predictions.shape[1:])
                predictions = np.concatenate([predictions, offsets[None]])
            if ensemble.names is not None and ensemble.names.used:
                self._names.append(MEMBERS["names"])
                by_name = ensemble.names.cosines(features)
                predictions, self._weights = ensemble.names.votes(
                    predictions, self._weights, by_name
                )
            self._additive = True
        self._predictions = predictions  # (member, image, class)
        self._block_weights = dict(zip(head.taken, self._weights.tolist(), strict=False))

    def combine(
        self, blocks: dict[int, NDArray[np.floating[Any]]]
    ) -> NDArray[np.floating[Any]] | None:
        """Average the heat maps of the blocks by their weights, on the finest grid."""
        if not blocks:
            return None
        shape = max((heat.shape for heat in blocks.values()), key=lambda s: s[0] * s[1])
        total = np.zeros(shape)
        for i, heat in blocks.items():
            picture = Image.fromarray(heat.astype(np.float32))
            enlarged = np.asarray(picture.resize(shape[::-1], Image.Resampling.BILINEAR))
            total += self._block_weights[i] * enlarged / max(float(enlarged.sum()), 1e-12)
        combined: NDArray[np.floating[Any]] = total / max(float(total.sum()), 1e-12)
        return combined

    def votes(self, row: int, labels: Sequence[Any]) -> tuple[Vote, ...]:
        """Return how the members vote, the most decisive first."""
        places = [self.classes.index(label) for label in labels]
        found = []
        for name, weight, all_rows in zip(
            self._names, self._weights.tolist(), self._predictions, strict=True
        ):
            scores = all_rows[row]
            separates = None
            if self._additive:
                separates = float(weight * (scores[places[0]] - scores[places[1]]))
            found.append(Vote(name, weight, self.classes[int(scores.argmax())], separates))
        return tuple(sorted(found, key=lambda vote: -abs(vote.separates or 0.0)))


class _Near:
    """Which shots are close to some images."""

    def __init__(self, model: FewShotClassifier, X: Features) -> None:
        self._shots = model.shots_
        if self._shots is not None:
            mine, theirs = (
                mean_vectors(each.blocks[-1]).astype(np.float64)
                for each in (X, self._shots.features)
            )
            self._similarity = mine @ theirs.T  # (image, shot)

    def shots(
        self, row: int, label: Any, attention: NDArray[np.floating[Any]] | None
    ) -> list[CloseShot]:
        """Return the closest shots of a class."""
        shots = self._shots
        if shots is None:
            return []
        members = shots.rows_of(label)
        similarity = self._similarity[row, members]
        weights = None if attention is None else attention[row, members]
        order = np.argsort(-(similarity if weights is None else weights), kind="stable")[:SHOTS]
        return [
            CloseShot(
                shots.names[members[i]],
                label,
                None if weights is None else float(weights[i]),
                float(similarity[i]),
                shots.pictures[members[i]],
            )
            for i in order
        ]


def _listed(names: Sequence[str]) -> str:
    """Join names.

    >>> _listed(["texture"]), _listed(["texture", "layout", "details"])
    ('texture', 'texture, layout and details')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _rounded(heat: NDArray[np.floating[Any]]) -> list[list[float]]:
    values: list[list[float]] = np.round(heat.astype(np.float64), 5).tolist()
    return values
