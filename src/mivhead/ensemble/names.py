"""Class names as a member of the ensemble: how well the name of a class describes an image.

A text-and-image model (CLIP, SigLIP and their relatives) embeds names and images in one space. The
score of class c is the cosine of the image's vector and the class's vector t_c, minus CENTRED times
the mean of this cosine over the shots: some names are close to every image. Unlike the other
members, this one hardly learns from the shots, so every shot tests it, even a single one.

**Scale.** Cosines of text and image are close to each other, so they are multiplied by s:

    P(c | image) = softmax over c of (s score(image, t_c))

s is the posterior mean over `SPREADS`, divided by the spread of the cosines, under the shots. For
vectors that say nothing about the images, s is close to 0.

**Weight.** With n shots per class, the weight of the cosines is NAMES_WEIGHT s / n before stacking:
the better the shots describe a class, the less its name adds. With one shot per class it is final.

**Evidence.** Names are used if predictions of left-out shots are better with them or, with one shot
per class, if the labels of the shots are more likely with the names than without, by a factor of
exp(EVIDENCE).

References
----------
Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.
Zhou et al., "Test-Time Distribution Normalization for Contrastively Learned Vision-language
Models", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import EPS, log_softmax, softmax, unit
from mivhead._util.schema import from_json
from mivhead.ensemble.balance import shot_weights
from mivhead.ensemble.constants import CENTRED, NAMES_WEIGHT, SPREADS, UNIT
from mivhead.errors import InputError
from mivhead.features import Block, Features, image_vectors

Floats = NDArray[np.floating[Any]]

LEAST_WEIGHT = 1e-3  # before stacking


@dataclass(frozen=True, eq=False)
class Names:
    """The fitted member."""

    vectors: Floats  # (class, channel): text vectors of the classes, of length 1
    centres: Floats  # (class,): what is subtracted from the cosines
    weight: float  # factor of the cosines
    used: bool = True  # whether the member takes part, because it is useful

    def cosines(self, features: Features) -> Floats:
        """Compute centred cosines (image, class)."""
        return name_cosines(features.blocks[-1], self.vectors) - self.centres

    def add(self, logits: Floats, features: Features) -> Floats:
        """Add the member to the logits (image, class) of all others."""
        if not self.used:
            return logits
        return (logits + self.weight * self.cosines(features)).astype(logits.dtype)

    def state(self) -> tuple[dict[str, Any], dict[str, Floats]]:
        """Return the member for a model file: a JSON value and arrays."""
        document = {"weight": float(self.weight), "used": bool(self.used)}
        return document, {"vectors": self.vectors, "centres": self.centres}

    @classmethod
    def from_state(
        cls, document: Any, arrays: Mapping[str, Floats], classes: int, width: int
    ) -> Self:
        """Make the member from what `state` returned, checking everything."""
        saved = from_json(_Saved, document, "names")
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != {"vectors": (classes, width), "centres": (classes,)} or any(
            array.dtype != np.float32 for array in arrays.values()
        ):
            raise InputError("the tensors 'names.*' do not fit the model.")
        lengths = np.linalg.norm(arrays["vectors"].astype(np.float64), axis=1)
        if not (np.abs(lengths - 1) < 1e-3).all() or not (np.abs(arrays["centres"]) <= 1).all():
            raise InputError("the tensors 'names.*' hold no vectors of length 1 and cosines.")
        return cls(arrays["vectors"], arrays["centres"], saved.weight, saved.used)


@dataclass(frozen=True)
class _Saved:
    """The JSON value of a model file."""

    weight: float
    used: bool


def name_cosines(block: Block, vectors: Floats) -> Floats:
    """Compute cosines (image, class) of the images of a block with class vectors of length 1."""
    cosines: Floats = unit(image_vectors(block).astype(np.float64)) @ vectors.astype(np.float64).T
    return cosines


@dataclass(frozen=True, eq=False)
class NameScores:
    """The scores of the shots before stacking."""

    centres: NDArray[np.float32]  # (class,): what was subtracted
    cosines: Floats  # (image, class): centred cosines of the shots and class vectors
    spread: float  # their standard deviation over the classes
    scale: float  # the posterior mean of s
    evidence: float  # logarithm of how much more likely the labels are with the names than without

    @classmethod
    def fit(cls, cosines: Floats, labels: NDArray[np.int64]) -> Self:
        """Fit the scale to cosines (image, class) of images that the vectors have not seen.

        >>> labels = np.array([0, 1, 2])
        >>> right, wrong = (NameScores.fit(np.roll(np.eye(3), i, 1), labels) for i in (0, 1))
        >>> right.scale > 5 * wrong.scale, right.evidence > 0 > wrong.evidence
        (True, True)
        """
        counts, images = shot_weights(labels), np.arange(len(labels))
        centres = (CENTRED * np.average(cosines, axis=0, weights=counts)).astype(np.float32)
        cosines = cosines - centres
        deviations = cosines - cosines.mean(axis=1, keepdims=True)
        spread = max(float(np.sqrt(np.square(deviations).mean())), EPS)
        likelihoods = np.array(
            [counts @ log_softmax(s / spread * deviations)[images, labels] for s in SPREADS]
        )
        relative = likelihoods - likelihoods.max()
        evidence = float(np.log(np.exp(relative[1:]).mean()) - relative[0])
        scale = float(softmax(relative) @ SPREADS) / spread
        return cls(centres, cosines, spread, scale, evidence)

    @property
    def member(self) -> NDArray[np.float32]:
        """Scores (image, class) that spread like those of other members."""
        return (self.factor * self.cosines).astype(np.float32)

    @property
    def factor(self) -> float:
        """What `member` multiplies cosines by."""
        return UNIT / self.spread

    def prior_weight(self, shots: NDArray[np.int64]) -> float:
        """Return the weight of `member` before stacking, for numbers of shots (class,)."""
        weight = NAMES_WEIGHT * self.scale / self.factor * np.exp(-np.log(shots).mean())
        return max(float(weight), LEAST_WEIGHT)
