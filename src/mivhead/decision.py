"""A name, *unsure* or *none of these*.

Probabilities compare the classes with each other, so a photo of something else gets a confident
name too. A fitted model therefore has a `DecisionRule`, a score that says how unlike the shots an
image is. Of an image x with logits l(x) and a mean vector v(x) of length 1:

    near(x)    = max over shots s of v(x) . s
    far(x)     = max over background images b of v(x) . b      (0.3 if there are none)
    energy(x)  = log sum over classes of exp l(x)
    unknown(x) = FAR * far(x) - near(x) - w * energy(x)        (w = 0 without out-of-fold logits)

The decision, from the largest probability p(x) and that class's number of shots n:

    none of these    if unknown(x) > t_unknown
    unsure           otherwise, if p(x) < 1 - max_errors / SPREAD(n)
    the best class   otherwise

- Errors among the names are 1 - p on average, and most names are surer than the threshold. With ten
  shots per class their mean 1 - p is about a quarter of that at the threshold, with three almost
  half of it: `SPREAD`, measured on the tuning sets; with one shot it is a little larger than
  measured, because probabilities are too bold. Recipes whose probabilities are not calibrated are
  never unsure.
- `t_unknown` is the ceil((m + 1)(1 - reject))-th smallest score of m shots, each computed without
  the shot (out of fold), so that at most a fraction `reject` of new images of the known classes is
  rejected, on average. A class with one shot has no such score, and its images are the most unlike
  all shots: `reject` is multiplied by the fraction of the other classes. With one shot per class,
  m is 0, and scores that were measured on other tasks stand in (`PRIOR_SCORES`).

All of this is arithmetic on fixed arrays, so that exported models share it.

References
----------
Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005 (conformal prediction).
Liu et al., "Energy-based out-of-distribution detection", NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json, parse_json
from mivhead._util.threads import shared_cores
from mivhead.errors import InputError, reading

UNSURE = "unsure"
NONE = "none of these"
REJECT = 0.1  # fraction of the images of known classes that may be rejected
MAX_ERRORS = 0.1  # fraction of wrong names among the names that are given
# How far the names are from certain, on average, relative to the threshold: by shots of the class
SPREAD_SHOTS, SPREAD = (1, 3, 5, 10), (0.60, 0.43, 0.29, 0.225)
ENERGY = 0.15  # weight of the energy in the score
FAR = 0.5  # weight of the nearest background image in the score
USUAL_FAR = 0.3  # similarity to the nearest background image if there are none to compare with

# Quantiles 5%, 10%, ..., 95% of the scores of new images with one shot per class (tuning sets,
# benchmarks/one_shot_scores.py of commit bae41b1), minus FAR times the mean far(s) of the shots s,
# plus SLOPE times their mean near(s), where s itself is left out
PRIOR_SCORES = (
    *(-0.34, -0.28, -0.25, -0.22, -0.20, -0.19, -0.17, -0.15, -0.14, -0.13),
    *(-0.11, -0.10, -0.09, -0.07, -0.05, -0.03, 0.00, 0.02, 0.07),
)
SLOPE = 0.90

LARGEST = 1e100  # frequency of a class
# Types and dimensions of the tensors of a rule in a model file
TENSORS = {
    "shots": ("float32", 2),
    "labels": ("int64", 1),
    "background": ("float16", 2),
    "rows": ("int64", 1),
    "energy": ("float32", 1),
}

Floats = NDArray[np.floating[Any]]
Prior = str | Mapping[Any, float]  # how frequent classes are


@dataclass(frozen=True)
class Thresholds:
    """What a decision compares scores and probabilities with."""

    unknown: float = math.inf  # an image with a larger score is none of these
    # A class with a smaller probability is unsure: one threshold per class; empty: never
    probability: tuple[float, ...] = ()
    other: int | None = None  # number of the class that stands for everything else, if there is one
    # How frequent each class is, relative to the mean of all classes; None: all are alike
    prior: tuple[float, ...] | None = None

    def adjust(self, probabilities: Floats) -> Floats:
        """Adjust probabilities (image, class) to the prior, by Bayes' rule."""
        if self.prior is None:
            return probabilities
        # No probability is 0, as another class may be the only one that occurs.
        weighted = np.maximum(probabilities.astype(np.float64), 1e-300) * np.asarray(self.prior)
        adjusted: Floats = weighted / weighted.sum(axis=1, keepdims=True)
        return adjusted

    def decide(self, probabilities: Floats, unknown: float | None, classes: Sequence[Any]) -> Any:
        """Return the name of the most probable class, `UNSURE` or `NONE`.

        >>> strict, classes = Thresholds(0.5, (0.6, 0.9)), ["cat", "dog"]
        >>> [strict.decide(np.array([p, 1 - p]), u, classes) for p, u in ((0.7, 0), (0.7, 1))]
        ['cat', 'none of these']
        >>> strict.decide(np.array([0.2, 0.8]), 0, classes)
        'unsure'
        """
        best = int(np.argmax(probabilities))
        if best == self.other or (unknown is not None and unknown > self.unknown):
            return NONE
        sure = not self.probability or probabilities[best] >= self.probability[best]
        return classes[best] if sure else UNSURE


@dataclass(frozen=True)
class Calibration:
    """What thresholds follow from. Exported models keep it."""

    scores: tuple[float, ...]  # how unlike the others each shot is, computed without it
    shots: tuple[int, ...]  # of each class
    calibrated: bool  # whether probabilities can be taken at face value
    other: int | None = None  # number of the class that stands for everything else

    def thresholds(
        self, reject: float | None = REJECT, max_errors: float | None = MAX_ERRORS
    ) -> Thresholds:
        """Choose thresholds, with the parameters of `classify`."""
        for name, value in (("reject", reject), ("max_errors", max_errors)):
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value <= 1):
                raise InputError(f"{name} must be between 0 and 1, got {value!r}.")
        unknown, probability = math.inf, ()
        if reject:
            several = np.mean([count > 1 for count in self.shots if count])
            scores, allowed = np.sort(self.scores), reject * float(several or 1)
            rank = math.ceil(round((len(scores) + 1) * (1 - allowed), 9))
            unknown = float(scores[min(max(rank, 1), len(scores)) - 1])
        if self.calibrated and max_errors is not None and max_errors < 1:
            spread = np.interp(self.shots, SPREAD_SHOTS, SPREAD)
            probability = tuple((1 - max_errors / spread).tolist())
        return Thresholds(unknown, probability, self.other)


@dataclass(frozen=True, eq=False)
class DecisionRule:
    """How unlike its shots an image is for a model, and which thresholds follow from the shots."""

    shots: Floats  # (shot, channel): mean vectors of the support images, of length 1
    labels: NDArray[np.int64]  # (shot,): their class numbers
    background: Floats  # (image, channel): those of images of other things; there may be none
    rows: NDArray[np.int64]  # (m,): the shots that can be left out, as rows of `shots`
    energy: Floats  # (m,): of their out-of-fold logits; (0,) if there are none
    calibrated: bool = True  # whether probabilities can be taken at face value
    other: int | None = None  # number of the class that stands for everything else
    logits: Floats | None = None  # (m, class): out-of-fold logits; not in a model file

    @classmethod
    def fit(
        cls,
        shots: Floats,
        labels: NDArray[np.int64],
        logits: Floats | None = None,
        rows: NDArray[np.int64] | None = None,
        calibrated: bool = True,
    ) -> DecisionRule:
        """Make the rule of a fitted model, without background.

        `logits` (m, class) are the out-of-fold logits of the shots `rows`; without any, `rows` are
        all shots of classes with several.
        """
        if rows is None:
            rows = np.flatnonzero(np.bincount(labels)[labels] > 1)
        shots = np.asarray(shots, np.float32)
        energy = energy_of(np.empty((0, 1)) if logits is None else logits).astype(np.float32)
        return cls(shots, labels, shots[:0], rows, energy, calibrated, None, logits)

    def with_background(self, vectors: Floats) -> DecisionRule:
        """Return the same rule with other background images: mean vectors of length 1."""
        channels = self.shots.shape[1]
        if vectors.ndim != 2 or vectors.shape[1] != channels:
            raise InputError(
                f"The background has shape {vectors.shape}, expected (images, {channels}): its "
                "features must come from the same backbone as the shots."
            )
        return replace(self, background=vectors.astype(np.float16).astype(np.float32))

    def with_other(self, number: int) -> DecisionRule:
        """Return the rule of a model in which one class stands for everything else.

        Its shots join the background. Thresholds follow from the shots of the other classes.
        """
        named = self.labels != number
        kept = named[self.rows]
        logits = None if self.logits is None else np.delete(self.logits[kept], number, axis=1)
        rows = (np.cumsum(named) - 1)[self.rows[kept]]
        rule = self.fit(self.shots[named], self.labels[named], logits, rows, self.calibrated)
        background = np.concatenate([self.background, self.shots[~named]])
        return replace(rule.with_background(background), other=number)

    def unknown(self, logits: Floats, vectors: Floats) -> Floats:
        """Score images by their logits (image, class) and mean vectors (image, channel)."""
        if self.other is not None:
            logits = np.delete(logits, self.other, axis=1)
        return self._score(vectors, _nearest(vectors, self.shots), energy_of(logits))

    @property
    def weight(self) -> float:
        """Weight of the energy: 0 without energies of the same classes to compare with."""
        return ENERGY if len(self.energy) else 0.0

    @cached_property
    def held_out(self) -> Floats:
        """Scores of the shots `rows`, each without itself; measured elsewhere if there are none."""
        with shared_cores():
            similarity = self.shots.astype(np.float64) @ self.shots.T.astype(np.float64)
            np.fill_diagonal(similarity, -1.0)
            near = similarity.max(axis=1)  # of each shot to the nearest other one
            if len(self.rows):
                energy = self.energy if len(self.energy) else np.zeros(len(self.rows))
                return self._score(self.shots[self.rows], near[self.rows], energy)
            far = FAR * float(np.mean(self._far(self.shots)))
            return np.asarray(PRIOR_SCORES) + (far - SLOPE * float(near.mean()))

    def _score(self, vectors: Floats, near: Floats, energy: Floats) -> Floats:
        return np.asarray(FAR * self._far(vectors) - near - self.weight * energy)

    def _far(self, vectors: Floats) -> Floats | float:
        """Similarity of vectors to the nearest background image."""
        return _nearest(vectors, self.background) if len(self.background) else USUAL_FAR

    @cached_property
    def calibration(self) -> Calibration:
        """What the thresholds follow from."""
        shots = np.bincount(self.labels, minlength=(self.other or 0) + 1).tolist()
        return Calibration(tuple(self.held_out.tolist()), tuple(shots), self.calibrated, self.other)

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the rule for a model file: a JSON value and arrays."""
        arrays = {name: getattr(self, name) for name in TENSORS}
        arrays["background"] = self.background.astype(np.float16)
        return {"calibrated": self.calibrated, "other": self.other}, arrays

    @classmethod
    def from_state(
        cls, document: Any, arrays: Mapping[str, NDArray[Any]], classes: int
    ) -> DecisionRule:
        """Make a rule from what `state` returned, checking everything."""
        saved = from_json(_Saved, document, "decision")
        for name in sorted(arrays.keys() | TENSORS):
            kind, array = TENSORS.get(name), arrays.get(name)
            if array is None or (array.dtype.name, array.ndim) != kind:
                raise InputError(f"tensor 'decision.{name}' is missing, or has another shape.")
            if not np.isfinite(array).all():
                raise InputError(f"tensor 'decision.{name}' holds NaN or infinity.")
        ready = {**arrays, "background": arrays["background"].astype(np.float32)}
        rule = cls(calibrated=saved.calibrated, other=saved.other, **ready)
        if (
            rule.background.shape[1] != rule.shots.shape[1]
            or len(rule.energy) not in (0, len(rule.rows))
            or not 0 < len(rule.shots) == len(rule.labels)
            or not np.isin(rule.rows, np.arange(len(rule.shots))).all()
            or not np.isin([*rule.labels, rule.other or 0], np.arange(classes)).all()
        ):
            raise InputError("the tensors 'decision.*' do not fit each other.")
        return rule


@dataclass(frozen=True)
class _Saved:
    """The JSON value of a model file."""

    calibrated: bool
    other: int | None


def check_class_names(names: Iterable[Any]) -> None:
    """Raise an error for a class whose name is that of a decision."""
    for name in names:
        if str(name).casefold() in (UNSURE, NONE):
            raise InputError(f"{name!r:.80} cannot be the name of a class: it is a decision.")


def energy_of(logits: Floats) -> Floats:
    """Return the log of the sum of exponentials, per row.

    >>> np.exp(energy_of(np.log([[1.0, 3.0]]))).round(6)
    array([4.])
    """
    return np.asarray(np.logaddexp.reduce(logits, axis=1, dtype=np.float64))


def read_prior(text: str) -> Prior:
    """Read a class prior from text: a name, or frequencies, perhaps as JSON.

    >>> read_prior("robin=3, wren=0.5"), read_prior("shots")
    ({'robin': 3.0, 'wren': 0.5}, 'shots')
    >>> read_prior('{"wren, juvenile": 2}')
    {'wren, juvenile': 2}
    """
    if text.startswith("{"):
        with reading("The class prior", ValueError):
            frequencies: dict[str, float] = parse_json(text)
            return frequencies
    if "=" not in text:
        return text.strip()
    pairs = [entry.rpartition("=") for entry in text.split(",")]
    try:
        prior = {name.strip(): float(frequency) for name, _, frequency in pairs}
    except ValueError:
        prior = {}
    if len(prior) < len(pairs):  # also of a class that is named twice
        raise InputError(f"{text!r:.80} is not a list of frequencies, such as robin=3,wren=1.")
    return prior


def class_frequencies(prior: Prior, shots: Mapping[Any, int]) -> tuple[float, ...] | None:
    """Return how frequent each class is, relative to the mean; None if all are alike.

    The prior is "uniform", "shots" (in proportion to the shots of each class, which are given), or
    a mapping of class to frequency.

    >>> class_frequencies({"cat": 3, "dog": 1}, {"dog": 5, "cat": 5})
    (0.5, 1.5)
    """
    named: dict[str, Mapping[Any, float]] = {"uniform": dict.fromkeys(shots, 1), "shots": shots}
    given = named.get(prior, {}) if isinstance(prior, str) else prior
    frequencies = {str(name): frequency for name, frequency in given.items()}
    names = list(map(str, shots))
    wrong = sorted(frequencies.keys() ^ set(names))
    wrong += [k for k, x in frequencies.items() if not (isinstance(x, Real) and 0 <= x <= LARGEST)]
    if wrong or not any(frequencies.values()):
        see = f" (see {wrong[0]!r:.80})" if wrong else ""
        raise InputError(
            "A class prior is 'uniform', 'shots', or a frequency for each class, from 0 on and not "
            f"all 0: got {prior!r:.80}{see}."
        )
    total = sum(frequencies.values())
    relative = tuple(float(frequencies[name] * len(names) / total) for name in names)
    return None if len(set(relative)) == 1 else relative


def _nearest(vectors: Floats, others: Floats) -> Floats:
    """Return the largest cosine of each vector with the others; all have length 1."""
    # In double precision, so that a score depends on its batch by no more than about 1e-15.
    nearest: Floats = (vectors.astype(np.float64) @ others.T.astype(np.float64)).max(axis=1)
    return nearest
