"""Why a model gives an image its name: where it looked, which shots are close, who voted how.

`Explanation` holds plain values and no presentation. `mivhead.diagnostics.pictures` draws
it, `mivhead.diagnostics.pages` makes HTML of it, and `as_json` is for services and programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mivhead._util.arrays import Floats
from mivhead._util.text import percent, shorten
from mivhead.classifier import MIVClassifier
from mivhead.decision import NONE
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.features import Features, FeatureTable
from mivhead.images.imageset import ImageSet
from mivhead.images.sources import as_image_set
from mivhead.model.model import Model
from mivhead.model.shots import Shots
from mivhead.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOTS = 3  # per class that an explanation names
LETTERS = 26  # of a class in a title
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
    # points to the runner-up. The sum over all members is the log-odds. None if the recipe does
    # not add up votes.
    separates: float | None


@dataclass(frozen=True)
class CloseShot:
    """A shot that an image was compared with."""

    name: str
    label: Any  # its class
    # Its share of the attention to its class; None with the recipe `experts`
    weight: float | None
    similarity: float  # cosine of the mean vectors of the two images in the deepest block
    picture: bytes | None = field(default=None, repr=False)  # a small one, if the model has it


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention of one block for some images.

    Parameters
    ----------
    patches : array of shape (image, H, W) or None
        Weight of every patch; the weights of an image sum to 1. None if the block has no map.
    shots : array of shape (image, shot) or None
        Weight of every shot within its class, averaged over the attention heads, in the order of
        `MIVClassifier.support_`. None for a head without cross-attention.
    """

    patches: Floats | None
    shots: Floats | None


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
        Where the model looked: weights of the patches that sum to 1. None with the recipe
        `experts`, which has no attention.
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
    heat: Floats | None
    blocks: dict[int, Floats]
    shots: tuple[CloseShot, ...]
    votes: tuple[Vote, ...]
    image: Image.Image | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<Explanation of {self.prediction!r}>"

    @property
    def totals(self) -> dict[str, float]:
        """The votes of members that look at the same thing, in all blocks, added up."""
        totals: dict[str, float] = {}
        for vote in self.votes:
            kind = vote.member.partition(" (")[0]
            totals[kind] = totals.get(kind, 0.0) + (vote.separates or 0.0)
        return totals

    @property
    def title(self) -> str:
        """The two most probable classes, unless it is none of these."""
        best = self.prediction
        if best.decision == NONE:
            return f"{NONE}: {best.unlike}"
        decided = "" if best.decision == best.label else f" ({best.decision})"
        second = percent(best.probabilities[self.runner_up])
        names = [shorten(str(name), LETTERS) for name in (best.label, self.runner_up)]
        return f"{names[0]} {percent(best.probability)}{decided}, then {names[1]} {second}"

    @property
    def words(self) -> str:
        """What separates the predicted class from the runner-up, in a sentence; empty if unknown.

        What hardly counts is left out.
        """
        totals = {kind: total for kind, total in self.totals.items() if kind != BALANCE}
        least = NOTABLE * sum(map(abs, totals.values()))
        ranked = sorted(totals, key=lambda kind: -abs(totals[kind]))
        telling = [kind for kind in ranked if abs(totals[kind]) >= least > 0]
        parts = []
        for sign, label in ((1, self.prediction.label), (-1, self.runner_up)):
            if kinds := [kind for kind in telling if sign * totals[kind] > 0]:
                listed = " and ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
                verb = "point" if len(kinds) > 1 or kinds == ["details"] else "points"
                parts.append(f"{listed} {verb} to {label}")
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}." if text else ""

    def other_attention(self, label: Any) -> float | None:
        """Return how much of the attention to a class its other shots have; None without attention.

        Together with the weights of those in `shots`, it is 1.
        """
        weights = [shot.weight for shot in self.shots if shot.label == label]
        known = [weight for weight in weights if weight is not None]
        return max(0.0, 1 - sum(known)) if known else None

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document, without pictures."""
        second = self.prediction.probabilities[self.runner_up]
        facts = self.prediction.as_json(0)
        del facts["top"]
        return {
            **facts,
            "runner_up": {"label": self.runner_up, "probability": second},
            "votes": [vars(vote) for vote in self.votes],
            "shots": [
                {k: v for k, v in vars(shot).items() if k != "picture"} for shot in self.shots
            ],
            "heat": None if self.heat is None else _rounded(self.heat),
            "blocks": {str(i): _rounded(heat) for i, heat in self.blocks.items()},
        }

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the reasons, to a .png, .svg or .pdf file if a path is given."""
        from mivhead.diagnostics.pictures import draw_reasons

        return draw_reasons(self, path)


def explain_images(
    model: Model, images: Any, *, pictures: bool = True, **decision: Any
) -> Iterator[Explanation]:
    """Explain the predictions for any number of images, in bounded memory.

    Parameters
    ----------
    model : FewShotClassifier
        A fitted model.
    images : images or FeatureTable
        What `FewShotClassifier.predict` takes.
    pictures : bool, default=True
        Whether explanations hold the images.
    **decision : dict
        Thresholds, as for `FewShotClassifier.classify`.

    Yields one explanation per image, in their order.
    """
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
    model: Model, table: FeatureTable, images: ImageSet | None, decision: Any
) -> Iterator[Explanation]:
    """Explain the predictions of some features, with their images if there are any."""
    classifier, shots = model.classifier_, model.shots_
    features = classifier.as_features(table.features)
    attention = attention_of(classifier, features)
    names, weights, scores = _members(classifier, features)
    block_weights = dict(zip(classifier.head_.taken, weights.tolist(), strict=False))
    heats = {  # (image, H, W) by block
        number: block.patches
        for number, block in zip(classifier.head_.taken, attention, strict=True)
        if block.patches is not None
    }
    of_shots = [block.shots for block in attention if block.shots is not None]
    to_shots = np.mean(of_shots, axis=0) if of_shots else None  # (image, shot)
    vectors = mean_vectors(features.blocks[-1])
    similarity = vectors @ mean_vectors(shots.features.blocks[-1]).T if shots else None
    for row, prediction in enumerate(model.classify(table, **decision)):
        runner_up = next(name for name in prediction.probabilities if name != prediction.label)
        pair = [prediction.label, runner_up]
        blocks = {number: heat[row] for number, heat in heats.items()}
        close: list[CloseShot] = []
        if shots is not None and similarity is not None:
            to_row = None if to_shots is None else to_shots[row]
            for name in pair:
                close += _closest(shots, name, similarity[row], to_row)
        yield Explanation(
            prediction,
            runner_up,
            _combine(blocks, block_weights),
            blocks,
            tuple(close),
            _votes(classifier, names, weights, scores[:, row], pair),
            None if images is None else images.load(row),
        )


def attention_of(classifier: MIVClassifier, X: Any) -> list[BlockAttention]:
    """Compute the attention of a fitted classifier for some images.

    Returns one `BlockAttention` per block, shallow to deep.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import MIVClassifier
    >>> X = np.random.default_rng(0).normal(size=(6, 8, 4, 4)).astype(np.float32)
    >>> classifier = MIVClassifier(random_state=0).fit(X, [0, 0, 0, 1, 1, 1])
    >>> attention_of(classifier, X[:2])[0].patches.shape
    (2, 4, 4)
    """
    features = classifier.as_features(X)
    head = classifier.head_
    attention = []
    rows = np.arange(len(features))
    for i, (layer, number) in enumerate(zip(head.layers, head.taken, strict=True)):
        sizes = layer.config.candidate_sizes
        embedded, tape = layer.embed(layer.prepare(features.blocks[number]), rows)
        patches = None
        if sizes and tape.weights is not None:
            height, width = sizes[0]
            patches = tape.weights[:, : height * width].reshape(-1, height, width)
        comparison = layer.comparison(embedded, classifier.embedded_[i], classifier.starts_)
        shots = comparison.attention().mean(axis=0)  # (image, shot)
        attention.append(BlockAttention(patches, shots))
    return attention


def _members(classifier: MIVClassifier, features: Features) -> tuple[list[str], Floats, Floats]:
    """Return the names of the members, their weights, and scores (member, image, class)."""
    ensemble = classifier.ensemble_
    names = [f"{MEMBERS['head']} (block {number + 1})" for number in classifier.head_.taken]
    scores = classifier.cosines(features)
    if ensemble is None:
        return names, np.ones(len(scores)), scores
    experts = ensemble.experts
    names += [f"{MEMBERS[expert.kind]} (block {expert.block + 1})" for expert in experts.ridges]
    weights = ensemble.weights
    scores = np.concatenate([scores, experts(features)])
    scores = scores * (ensemble.weights_by_class / weights[:, None])[:, None]  # by 1 if balanced
    if ensemble.offsets is not None:
        names.append(BALANCE)
        weights = np.append(weights, np.float32(1))
        offsets = np.broadcast_to(ensemble.offsets, scores.shape[1:])
        scores = np.concatenate([scores, offsets[None]])
    if ensemble.names is not None and ensemble.names.used:
        names.append(MEMBERS["names"])
        weights = np.append(weights, ensemble.names.weight)
        scores = np.concatenate([scores, ensemble.names.cosines(features)[None]])
    return names, weights, scores


def _combine(blocks: dict[int, Floats], weights: dict[int, float]) -> Floats | None:
    """Average the heat maps of the blocks by their weights, on the finest grid."""
    if not blocks:
        return None
    shape = max((heat.shape for heat in blocks.values()), key=lambda s: s[0] * s[1])
    total = np.zeros(shape)
    for number, heat in blocks.items():
        picture = Image.fromarray(heat.astype(np.float32))
        enlarged = np.asarray(picture.resize(shape[::-1], Image.Resampling.BILINEAR))
        total += weights[number] * enlarged / max(float(enlarged.sum()), 1e-12)
    combined: Floats = total / max(float(total.sum()), 1e-12)
    return combined


def _votes(
    classifier: MIVClassifier,
    names: Sequence[str],
    weights: Floats,
    scores: Floats,
    pair: Sequence[Any],
) -> tuple[Vote, ...]:
    """Return how the members vote on one image, the most decisive first; scores (member, class)."""
    classes = classifier.classes_.tolist()
    first, second = (classes.index(name) for name in pair)
    adds_up = classifier.ensemble_ is not None
    votes = [
        Vote(
            name,
            weight,
            classes[int(row.argmax())],
            float(weight * (row[first] - row[second])) if adds_up else None,
        )
        for name, weight, row in zip(names, weights.tolist(), scores, strict=True)
    ]
    return tuple(sorted(votes, key=lambda vote: -abs(vote.separates or 0.0)))


def _closest(
    shots: Shots,
    label: Any,
    similarity: Floats,
    attention: Floats | None,
) -> list[CloseShot]:
    """Return the closest shots of a class; similarity and attention are (shot,)."""
    rows = shots.rows_of(label)
    closeness = similarity if attention is None else attention
    return [
        CloseShot(
            shots.names[row],
            label,
            None if attention is None else float(attention[row]),
            float(similarity[row]),
            shots.pictures[row],
        )
        for row in rows[np.argsort(-closeness[rows], kind="stable")[:SHOTS]]
    ]


def _rounded(heat: Floats) -> list[list[float]]:
    """Return the rows of a heat map for JSON."""
    values: list[list[float]] = np.round(heat.astype(np.float64), 5).tolist()
    return values
