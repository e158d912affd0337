"""Class names as a member of the ensemble: how well the name of a class describes an image.

A text-and-image model (CLIP, SigLIP and their relatives) embeds names and images in one space. The
score of class c is the cosine of the image's vector and the class's vector t_c, minus CENTRED times
the mean of this cosine over the shots: some names are close to every image. Unlike the other
members, this one hardly learns from the shots, so every shot tests it, even a single one.

**Scale.** Cosines of text and image are close to each other, so they are multiplied by s:

    P(c | image) = softmax over c of (s score(image, t_c))

s is the posterior mean over `SPREADS`, divided by the spread of the cosines, under the shots. For
vectors that say nothing about the images, s is close to 0.

**Weight.** With n shots per class, the weight of the cosines is SHARE s / n before stacking: the
better the shots describe a class, the less its name adds. With one shot per class it is final. If
there are classes without shots, the share is 1: names are what all classes can be compared by.

**Classes without shots** have no scores of the other members, so their logit is a * cosine + b. The
classes with shots tell a and b, each playing a class without shots in turn (`fit_unseen`): a class
is neither preferred nor at a disadvantage because it has no shots.

**Names alone.** If fewer than two classes have shots, no other member can tell classes apart, and
nothing shows how far cosines can be trusted. Then s is ALONE, about what CLIP, SigLIP and their
relatives were trained with, nothing is subtracted, and the shots of a single class wait for those
of a second one.

**Evidence.** Names are used if predictions of left-out shots are better with them or, with one shot
per class, if the labels of the shots are more likely with the names than without, by a factor of
exp(EVIDENCE); and in any case if there are classes without shots.

References
----------
Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.
Zhou et al., "Test-Time Distribution Normalization for Contrastively Learned Vision-language
Models", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json
from mivhead.ensemble.balance import shot_weights
from mivhead.errors import InputError
from mivhead.features import Block, Features

Floats = NDArray[np.floating[Any]]

CENTRED = 0.5  # part of a name's mean cosine that is subtracted
SPREADS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # of logits over the classes, all equally likely before
SHARE = 0.4  # of the scale, that is the weight with one shot per class: names and shots agree
UNIT = 0.25  # spread of the scores of a usual member, which those of names get for stacking
HONEST = 0.5  # lead of the right class for a new image, compared with that for a single shot
EVIDENCE = 1.0  # evidence for names, with one shot per class
ALONE = 100.0  # the scale of names alone
SMALLEST = 1e-3  # prior weight
STRENGTH, WEAK, STEPS = 1.0, 1e-3, 50  # of `fit_unseen`: penalties on the slope and the level
EPS = 1e-12  # smallest length


@dataclass(frozen=True, eq=False)
class Names:
    """The fitted member."""

    vectors: Floats  # (class, channel): text vectors of all classes, of length 1
    centres: Floats  # (class,): what is subtracted from the cosines
    # (class with shots,): the numbers of the classes with shots; empty if only one has some
    seen: NDArray[np.int64]
    weight: float  # factor of the cosines of classes with shots
    # The logit of a class without shots is scale * cosine + offset
    scale: float
    offset: float
    # Whether the member takes part: if it is useful, or there are classes without shots
    used: bool = True
    # How much lower the logit of the right class is without its shots, compared with the energy of
    # all logits with them; decisions use it. Not in a model file.
    lift: float = 0.0

    @classmethod
    def alone(cls, vectors: Floats) -> Self:
        """Make the member of a model in which fewer than two classes have shots."""
        centres = np.zeros(len(vectors), np.float32)
        return cls(vectors, centres, np.empty(0, np.int64), ALONE, ALONE, 0.0)

    def cosines(self, features: Features) -> Floats:
        """Compute centred cosines (image, class)."""
        return name_cosines(features.blocks[-1], self.vectors) - self.centres

    def add(self, logits: Floats, found: Floats) -> Floats:
        """Add the member to the logits (image, class with shots) of all others.

        Parameters
        ----------
        logits : array of shape (image, class with shots)
            The sum of the other members.
        found : array of shape (image, class)
            What `cosines` returned for the same images.

        Returns
        -------
        array of shape (image, class)
        """
        if not self.used:
            return logits
        return self.widen(logits + self.weight * found[:, self.seen], found).astype(logits.dtype)

    def votes(self, others: Floats, weights: Floats, found: Floats) -> tuple[Floats, Floats]:
        """Split logits into the scores of all members, this one last.

        Parameters
        ----------
        others : array of shape (member, image, class with shots)
            Scores of the other members.
        weights : array of shape (member,)
            Their weights.
        found : array of shape (image, class)
            What `cosines` returned.

        Returns
        -------
        scores : array of shape (member + 1, image, class)
            About classes without shots, the others all say what adds up to `offset`.
        weights : array of shape (member + 1,)
        """
        weight = max(self.weight, EPS)
        level = self.offset / weights.sum() if len(weights) else 0.0
        scores = np.full((len(others) + 1, *found.shape), level)
        scores[:-1, :, self.seen] = others
        scores[-1] = found * self.factors / weight
        return scores, np.append(weights, weight)

    def fit_unseen(self, logits: Floats, found: Floats, labels: NDArray[np.int64]) -> Self:
        """Fit `scale` and `offset` to logits and cosines (image, class with shots)."""
        scale, offset = fit_unseen(logits, found, labels, self.scale)
        alone = scale * found[np.arange(len(labels)), labels] + offset
        lift = float(np.average(_energy(logits) - alone, weights=shot_weights(labels)))
        return replace(self, scale=scale, offset=offset, lift=lift)

    @property
    def factors(self) -> Floats:
        """What the cosines of each class are multiplied by: (class,)."""
        factors = np.full(len(self.vectors), self.scale)
        factors[self.seen] = self.weight
        return factors

    @property
    def unseen(self) -> NDArray[np.int64]:
        """The numbers of the classes without shots."""
        return np.setdiff1d(np.arange(len(self.vectors)), self.seen)

    def state(self) -> tuple[dict[str, Any], dict[str, Floats]]:
        """Return the member for a model file: a JSON value and arrays."""
        numbers = {name: float(getattr(self, name)) for name in ("weight", "scale", "offset")}
        arrays = {"vectors": self.vectors, "centres": self.centres}
        return numbers | {"used": bool(self.used)}, arrays

    @classmethod
    def from_state(
        cls, document: Any, arrays: Mapping[str, Floats], shots: NDArray[np.int64], width: int
    ) -> Self:
        """Make the member from what `state` returned, checking everything.

        Parameters
        ----------
        document, arrays
            The section of a model file.
        shots : array of shape (class,)
            Number of shots of each class.
        width : int
            Number of channels of an image's vector.
        """
        saved = from_json(_Saved, document, "names.v1")
        expected = {"vectors": (len(shots), width), "centres": (len(shots),)}
        found = {name: array.shape for name, array in arrays.items()}
        if found != expected or any(array.dtype != np.float32 for array in arrays.values()):
            raise InputError("the tensors 'names.*' do not fit the model.")
        lengths = np.linalg.norm(arrays["vectors"].astype(np.float64), axis=1)
        if not (np.abs(lengths - 1) < 1e-3).all() or not (np.abs(arrays["centres"]) <= 1).all():
            raise InputError("the tensors 'names.*' hold no vectors of length 1 and cosines.")
        return cls(arrays["vectors"], arrays["centres"], compared(shots), **vars(saved))

    def widen(self, logits: Floats, found: Floats) -> Floats:
        """Add the classes without shots to logits (image, class with shots): (image, class)."""
        every: Floats = self.scale * found + self.offset
        every[:, self.seen] = logits
        return every


@dataclass(frozen=True)
class _Saved:
    """The JSON value of a model file."""

    weight: float
    scale: float
    offset: float
    used: bool


def centres_of(found: Floats, labels: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return what is subtracted from the cosines (shot, class) of the shots: (class,)."""
    mean = np.average(found, axis=0, weights=shot_weights(labels))
    return (CENTRED * mean).astype(np.float32)


def compared(shots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the classes that are compared by their shots: those with shots, if there are two.

    >>> compared(np.array([2, 0, 1])), compared(np.array([2, 0, 0]))
    (array([0, 2]), array([], dtype=int64))
    """
    seen = np.flatnonzero(shots)
    return seen if len(seen) > 1 else seen[:0]


def names_of(classifier: Any) -> Names | None:
    """Return the member of a fitted classifier; None if it has none."""
    names: Names | None = getattr(getattr(classifier, "ensemble_", None), "names", None)
    return names


def image_vectors(block: Block) -> Floats:
    """Return the token, or the mean patch, in double precision: (image, channel)."""
    if block.token is not None:
        return block.token.astype(np.float64)
    assert block.map is not None
    means: Floats = block.map.mean(axis=(2, 3), dtype=np.float64)
    return means


def name_cosines(block: Block, vectors: Floats) -> Floats:
    """Compute cosines (image, class) of the images of a block with class vectors of length 1.

    >>> name_cosines(Block(token=np.array([[0.0, 2.0]])), np.array([[1.0, 0.0], [0.0, 1.0]]))
    array([[0., 1.]])
    """
    x = image_vectors(block)
    lengths = np.maximum(np.linalg.norm(x, axis=1, keepdims=True), EPS)
    found: Floats = (x / lengths) @ vectors.astype(np.float64).T
    return found


@dataclass(frozen=True, eq=False)
class NameScores:
    """The scores of the shots before stacking."""

    cosines: Floats  # (image, class with shots): cosines of the shots and class vectors
    spread: float  # their standard deviation over the classes
    scale: float  # the posterior mean of s
    evidence: float  # logarithm of how much more likely the labels are with the names than without

    @classmethod
    def fit(cls, found: Floats, labels: NDArray[np.int64]) -> Self:
        """Fit the scale to cosines (image, class) of images that the vectors have not seen.

        >>> labels = np.array([0, 1, 2])
        >>> right, wrong = (NameScores.fit(np.roll(np.eye(3), i, 1), labels) for i in (0, 1))
        >>> right.scale > 5 * wrong.scale, right.evidence > 0 > wrong.evidence
        (True, True)
        """
        centred = found - found.mean(axis=1, keepdims=True)
        spread = max(float(np.sqrt(np.square(centred).mean())), EPS)
        counts, own = shot_weights(labels), np.arange(len(labels))
        likelihoods = []
        for wanted in SPREADS:
            logits = wanted / spread * centred
            logits -= logits.max(axis=1, keepdims=True)
            log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            likelihoods.append(float(counts @ log_p[own, labels]))
        relative = np.array(likelihoods) - max(likelihoods)
        posterior = np.exp(relative) / np.exp(relative).sum()
        evidence = float(np.log(np.exp(relative[1:]).mean()) - relative[0])
        return cls(found, spread, float(posterior @ SPREADS) / spread, evidence)

    @property
    def member(self) -> NDArray[np.float32]:
        """Scores (image, class) that spread like those of other members."""
        return (self.factor * self.cosines).astype(np.float32)

    @property
    def factor(self) -> float:
        """What `member` multiplies cosines by."""
        return UNIT / self.spread

    def prior_weight(self, shots: NDArray[np.int64], share: float = SHARE) -> float:
        """Return the weight of `member` before stacking, for numbers of shots (class,)."""
        weight = share * self.scale / self.factor * np.exp(-np.log(shots).mean())
        return max(float(weight), SMALLEST)


def fit_unseen(
    logits: Floats, found: Floats, labels: NDArray[np.int64], scale: float
) -> tuple[float, float]:
    """Fit what stands for the logit of a class without shots: a * cosine + b.

    Each class with shots plays the class without in turn: its logit is replaced by a * cosine + b,
    and a logistic regression tells its images from those of the other classes, whose logits are
    those of a model that does not know it (`_without`). `a` stays close to the scale of the names
    alone.

    Parameters
    ----------
    logits : array of shape (image, class)
        Logits of images that the model has not seen.
    found : array of shape (image, class)
        Cosines of the same.
    labels : array of shape (image,)
        Class numbers.
    scale : float
        That of the names alone.

    Returns
    -------
    a, b : float

    Examples
    --------
    >>> cosines = 0.3 * np.eye(3).repeat(4, axis=0)
    >>> labels = np.arange(3).repeat(4)
    >>> a, b = fit_unseen(3 * np.eye(3).repeat(4, axis=0), cosines, labels, 10.0)
    >>> b < 0 < 3 < 0.3 * a + b
    True
    """
    images, classes = logits.shape
    own = np.eye(classes)[labels].ravel()  # (image x class,)
    level = logits.mean(axis=1, keepdims=True)
    rivals = np.stack([_energy(_without(logits, c, level)) for c in range(classes)], 1).ravel()
    centre, spread = float(found.mean()), max(float(found.std()), EPS)
    x = np.stack([(found.ravel() - centre) / spread, np.ones(images * classes)], axis=1)
    counts = np.repeat(shot_weights(labels), classes)
    start = np.array([scale * spread, 0.0])
    theta, penalty = start.copy(), np.array([STRENGTH, WEAK])
    for _ in range(STEPS):  # Newton's method, on a strictly convex loss
        p = 1 / (1 + np.exp(-np.clip(x @ theta - rivals, -50, 50)))
        slope = x.T @ (counts * (p - own)) + penalty * (theta - start)
        curvature = (x * (counts * p * (1 - p))[:, None]).T @ x + np.diag(penalty)
        theta = theta - np.clip(np.linalg.solve(curvature, slope), -1, 1)
    a = max(float(theta[0]), 0.0) / spread
    return a, float(theta[1]) - a * centre


def _without(logits: Floats, number: int, level: Floats) -> Floats:
    """Return the logits of a model that does not know a class: (image, other class).

    Logits say how much more an image is like one class than like the others, so a model that knows
    a class gives its images low logits of all others. Without it, their mean would be at the level
    of all logits.
    """
    others: Floats = np.delete(logits, number, axis=1)
    moved: Floats = others - others.mean(axis=1, keepdims=True) + level
    return moved


def _energy(logits: Floats) -> Floats:
    """Return the logarithm of the sum of exponentials, per row."""
    top = logits.max(axis=1)
    energy: Floats = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return energy
