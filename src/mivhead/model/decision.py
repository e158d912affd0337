"""A name, *unsure* or *none of these*; and sets of names with a stated coverage.

Probabilities compare the classes with each other, so a photo of something else gets a confident
name too. A fitted model therefore has a `DecisionRule`: a score that says how unlike the shots an
image is, and scores of the shots themselves, each computed without the shot (out of fold), from
which thresholds follow. No test image is involved.

The score of an image x, from its logits l(x) and its mean vector v(x) of length 1:

    near(x)    = max over shots s of v(x) . s
    far(x)     = max over background images b of v(x) . b      (0.3 if there are none)
    energy(x)  = log sum over classes of exp l(x)
    unknown(x) = FAR * far(x) - near(x) - w * energy(x)        (w = 0 for other methods than miv)

The decision, from probabilities p(x) and two thresholds:

    none of these    if unknown(x) > t_unknown
    unsure           otherwise, if max p(x) < t_probability
    the best class   otherwise

The prediction set: every class with p(x) >= t_set, and the best one in any case. All of this is
arithmetic on fixed arrays, in NumPy, so that exported models share it.

The thresholds, from m out-of-fold shots:

- `t_unknown`: the ceil((m + 1)(1 - reject))-th smallest score, so that at most a share `reject` of
  new images of the known classes is rejected, on average.
- `t_probability`: the smallest probability such that among the shots that reach it, the expected
  share of errors, the mean of 1 - p, stays within `max_errors`.
- `t_set`: the floor((m + 1)(1 - coverage))-th smallest probability of the true class. If that rank
  is 0, there are not enough shots for this coverage, which is an error.

With one shot per class, m is 0. Scores that were measured on other tasks stand in for those of left
out shots: the quantiles `PRIOR_SCORES`, plus FAR times the mean far(s) of the shots s, minus SLOPE
times their mean near(s), where s itself is left out. `t_probability` is 1 - 2 max_errors (right if
the probabilities above it are calibrated and equally frequent), and no coverage can be guaranteed.
A model that knows its classes by name alone has no such scores, and never says "none of these".

An image whose best class has no shots is expected to be unlike all shots: near(x) is at least the
mean near(s) of the shots, and energy(x) is raised by `lift`, which it lacks without such shots.

References
----------
Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005 (conformal prediction).
Sadinle, Lei and Wasserman, "Least ambiguous set-valued classifiers with bounded error levels",
Journal of the American Statistical Association 114, 2019.
Liu et al., "Energy-based out-of-distribution detection", NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json, to_json
from mivhead._util.threads import shared_cores
from mivhead.errors import InputError

UNSURE = "unsure"
NONE = "none of these"
REJECT = 0.1  # share of the images of known classes that may be rejected
MAX_ERRORS = 0.1  # share of wrong names among the names that are given
ENERGY = 0.15  # weight of the energy in the score
FAR = 0.5  # weight of the nearest background image in the score
USUAL_FAR = 0.3  # similarity to the nearest background image if there are none to compare with

# With one shot per class nothing can be left out. The scores of new images then come from other
# tasks (benchmarks/one_shot_scores.py, tuning sets): their quantiles 5 %, 10 %, ..., 95 %, relative
# to how similar the shots are to the background (with weight FAR) and to each other (with weight
# -SLOPE). With energy, and without.
PRIOR_SCORES = (
    *(-1.48, -1.33, -1.25, -1.19, -1.13, -1.10, -1.06, -1.04, -1.00, -0.98),
    *(-0.96, -0.94, -0.91, -0.89, -0.87, -0.84, -0.81, -0.78, -0.73),
)
PRIOR_DISTANCES = (
    *(-0.34, -0.28, -0.25, -0.22, -0.20, -0.19, -0.17, -0.15, -0.14, -0.13),
    *(-0.11, -0.10, -0.09, -0.07, -0.05, -0.03, 0.00, 0.02, 0.07),
)
SLOPE_SCORES, SLOPE_DISTANCES = 0.60, 0.90

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Thresholds:
    """What a decision compares scores and probabilities with.

    Examples
    --------
    >>> thresholds = Thresholds(unknown=0.5, probability=0.6)
    >>> [thresholds.decide("cat", 0.9, 0.1), thresholds.decide("cat", 0.5, 0.1)]
    ['cat', 'unsure']
    >>> thresholds.decide("cat", 0.9, 0.7)
    'none of these'
    """

    unknown: float = math.inf  # an image with a larger score is none of these
    probability: float = 0.0  # a class with a smaller probability is unsure
    # A prediction set holds the classes with at least this probability; None: no sets
    set: float | None = None
    # Number of the class that stands for everything else, if there is one: an image of it is none
    # of these
    other: int | None = None
    # How frequent each class is, relative to the mean of all classes; None: all are alike
    prior: tuple[float, ...] | None = None

    def adjust(self, probabilities: Floats) -> Floats:
        """Adjust probabilities (image, class) to the prior, by Bayes' rule.

        >>> Thresholds(prior=(1.5, 0.5)).adjust(np.array([[0.5, 0.5]])).tolist()
        [[0.75, 0.25]]
        """
        if self.prior is None:
            return probabilities
        # In double precision no probability is 0: another class may be the only one that occurs.
        weighted = np.maximum(probabilities.astype(np.float64), 1e-300) * np.asarray(self.prior)
        adjusted: Floats = weighted / weighted.sum(axis=1, keepdims=True)
        return adjusted

    def decide(self, label: Any, probability: float, unknown: float | None) -> Any:
        """Return the label, `UNSURE` or `NONE`."""
        if unknown is not None and unknown > self.unknown:
            return NONE
        return label if probability >= self.probability else UNSURE

    def select(self, ranked: Mapping[Any, float]) -> tuple[Any, ...] | None:
        """Return the prediction set from probabilities in descending order; None without sets."""
        if self.set is None:
            return None
        chosen = [label for label, probability in ranked.items() if probability >= self.set]
        return tuple(chosen or islice(ranked, 1))


@dataclass(frozen=True)
class Calibration:
    """Out-of-fold predictions of shots, from which thresholds follow. Exported models keep them."""

    scores: tuple[float, ...]  # the score of each shot, computed without it
    # The largest probability, and the probability of its own class. Empty for a method that makes
    # no out-of-fold predictions.
    best: tuple[float, ...]
    own: tuple[float, ...]
    # Whether probabilities can be trusted even if there are no out-of-fold predictions, as those of
    # `miv` with one shot per class
    calibrated: bool = False
    other: int | None = None  # number of the class that stands for everything else

    def thresholds(
        self,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        coverage: float | None = None,
    ) -> Thresholds:
        """Choose thresholds from the out-of-fold shots.

        Parameters
        ----------
        reject : float or None, default=0.1
            Share of the images of known classes that may be rejected; None or 0 rejects none.
        max_errors : float or None, default=0.1
            Share of wrong names among the names that are given; None or 1 is never unsure.
        coverage : float or None, default=None
            Share of prediction sets that hold the true class.
        """
        check_share("reject", reject, low=True)
        check_share("max_errors", None if max_errors == 1 else max_errors, low=True)
        check_share("coverage", coverage)
        return Thresholds(
            unknown=self._reject_above(reject or 0.0),
            probability=self._unsure_below(1.0 if max_errors is None else max_errors),
            set=None if coverage is None else self._in_set_from(coverage),
            other=self.other,
        )

    def _reject_above(self, reject: float) -> float:
        scores = np.sort(self.scores)
        if not reject or not len(scores):
            return math.inf
        rank = math.ceil(round((len(scores) + 1) * (1 - reject), 9))
        return float(scores[min(max(rank, 1), len(scores)) - 1])

    def _unsure_below(self, max_errors: float) -> float:
        if max_errors >= 1 or not (self.best or self.calibrated):
            return 0.0
        if not self.best:
            return max(0.0, 1 - 2 * max_errors)  # if probabilities above it are equally frequent
        best = np.sort(self.best)[::-1]
        expected = np.cumsum(1 - best) / np.arange(1, len(best) + 1)  # grows with every shot
        accepted = int((expected <= max_errors).sum())
        if accepted == len(best):
            return 0.0
        # Halfway between the last shot that is accepted and the first that is not.
        upper = best[accepted - 1] if accepted else 1.0
        return float((upper + best[accepted]) / 2)

    def _in_set_from(self, coverage: float) -> float:
        count = len(self.own)
        rank = math.floor(round((count + 1) * (1 - coverage), 9))
        if rank < 1:
            most = f"at most {math.floor(100 * count / (count + 1))} %" if count else "no coverage"
            raise InputError(
                f"coverage={coverage:g} needs {math.ceil(round(coverage / (1 - coverage), 9))} "
                f"shots that can be left out in turn, but this model has {count} (a class with one "
                f"shot has none, and only the method miv leaves shots out): {most} can be "
                "guaranteed. Choose a lower coverage, or add shots."
            )
        return float(np.sort(self.own)[rank - 1])


@dataclass(frozen=True, eq=False)
class DecisionRule:
    """How unlike its shots an image is for a model, and which thresholds follow from the shots."""

    shots: Floats  # (shot, channel): mean vectors of the support images, of length 1
    labels: NDArray[np.int64]  # (shot,): their class numbers
    # (image, channel): mean vectors of images of other things; there may be none
    background: Floats
    rows: NDArray[np.int64]  # (m,): the shots that have out-of-fold predictions, as rows of `shots`
    # (m,) or (0,): out-of-fold predictions of these shots: the energy, the largest probability and
    # the probability of their own class. Empty for a method that makes none.
    energy: Floats
    best: Floats
    own: Floats
    weight: float = ENERGY  # weight of the energy in the score
    # Number of the class that stands for everything else; its images are background
    other: int | None = None
    # (m, class) or None, default=None: the out-of-fold logits, as long as the model has not been
    # saved
    logits: Floats | None = None
    lift: float = 0.0  # what the energy of an image lacks whose class has no shots

    @classmethod
    def fit(
        cls,
        shots: Floats,
        labels: NDArray[np.int64],
        logits: Floats | None,
        rows: NDArray[np.int64] | None,
        weight: float = ENERGY,
    ) -> DecisionRule:
        """Make the rule of a fitted model, without background.

        Parameters
        ----------
        shots : array of shape (shot, channel)
            Mean vectors of the support images, of length 1.
        labels : array of shape (shot,)
            Their class numbers.
        logits : array of shape (m, class) or None
            Out-of-fold logits.
        rows : array of shape (m,) or None
            The shots that they belong to. None: all shots of classes with several.
        weight : float, default=0.15
            Weight of the energy in the score.
        """
        shots = np.asarray(shots, np.float32)
        none = np.empty(0, np.float32)
        if logits is None:
            several = np.bincount(labels)[labels] > 1
            rows = np.flatnonzero(several)
            return cls(shots, labels, shots[:0], rows, none, none, none, weight)
        assert rows is not None
        energy, probabilities = energy_of(logits), softmax(logits)
        own = probabilities[np.arange(len(rows)), labels[rows]]
        best = probabilities.max(axis=1)
        # In the precision that a file stores.
        energy, best, own = (x.astype(np.float32) for x in (energy, best, own))
        return cls(shots, labels, shots[:0], rows, energy, best, own, weight, None, logits)

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
        place = np.cumsum(named) - 1
        kept = named[self.rows]
        rule = replace(
            self,
            shots=self.shots[named],
            labels=self.labels[named],
            rows=place[self.rows[kept]],
            other=number,
        )
        if self.logits is not None:
            energy = energy_of(np.delete(self.logits[kept], number, axis=1)).astype(np.float32)
            rule = replace(rule, energy=energy, best=self.best[kept], own=self.own[kept])
        return rule.with_background(np.concatenate([self.background, self.shots[~named]]))

    def reordered(self, order: NDArray[np.int64]) -> DecisionRule:
        """Return the rule of the same model, with its classes in another order."""
        place = np.argsort(order)  # the new number of each class
        labels = place[self.labels]
        by_class = np.argsort(labels, kind="stable")
        rows = np.argsort(by_class)[self.rows]
        by_row = np.argsort(rows)
        scores = {name: getattr(self, name) for name in ("energy", "best", "own")}
        return replace(
            self,
            shots=self.shots[by_class],
            labels=labels[by_class],
            rows=rows[by_row],
            other=None if self.other is None else int(place[self.other]),
            logits=None if self.logits is None else self.logits[by_row][:, order],
            **{name: each[by_row] if len(each) else each for name, each in scores.items()},
        )

    def unknown(self, logits: Floats, vectors: Floats) -> Floats:
        """Score images by their logits (image, class) and mean vectors (image, channel)."""
        if not len(self.shots):
            return np.zeros(len(vectors))  # there is nothing to be unlike
        near, lift = _nearest(vectors, self.shots), 0.0
        if len(unseen := self.unseen(logits.shape[1])):
            # An image of a class without shots is like no shot: it counts as usually near.
            best = logits[:, unseen].max(axis=1)
            by_name = best > np.delete(logits, unseen, axis=1).max(axis=1)
            near = np.where(by_name, np.maximum(near, self.usual_near), near)
            lift = by_name * self.lift
        if self.other is not None:
            logits = np.delete(logits, self.other, axis=1)
        return self._score(vectors, near, energy_of(logits) + lift)

    def unseen(self, classes: int) -> NDArray[np.int64]:
        """Return the numbers of the classes without shots, which only have a name."""
        known = self.labels if self.other is None else np.append(self.labels, self.other)
        return np.setdiff1d(np.arange(classes), known)

    @cached_property
    def usual_near(self) -> float:
        """Mean similarity of a shot to the nearest other one."""
        return float(self._near[self.rows if len(self.rows) else slice(None)].mean())

    @cached_property
    def _near(self) -> Floats:
        """Similarity of each shot to the nearest other one."""
        similarity = self.shots.astype(np.float64) @ self.shots.T.astype(np.float64)
        np.fill_diagonal(similarity, -1.0)
        nearest: Floats = similarity.max(axis=1)
        return nearest

    @cached_property
    def held_out(self) -> Floats:
        """Scores of the shots `rows`, each without itself; measured elsewhere if there are none."""
        with shared_cores():
            return self._held_out()

    def _held_out(self) -> Floats:
        if not len(self.shots):
            return np.empty(0)
        near = self._near
        if not len(self.rows):
            prior, slope = (
                (PRIOR_SCORES, SLOPE_SCORES) if self.weight else (PRIOR_DISTANCES, SLOPE_DISTANCES)
            )
            far = np.mean(self._far(self.shots))
            measured: Floats = np.asarray(prior) + FAR * far - slope * near.mean()
            return measured
        energy = self.energy if len(self.energy) else np.zeros(len(self.rows))
        return self._score(self.shots[self.rows], near[self.rows], energy)

    def _score(self, vectors: Floats, near: Floats, energy: Floats) -> Floats:
        score: Floats = FAR * self._far(vectors) - near - self.weight * energy
        return score

    def _far(self, vectors: Floats) -> Floats | float:
        """Similarity of vectors to the nearest background image."""
        return _nearest(vectors, self.background) if len(self.background) else USUAL_FAR

    @cached_property
    def calibration(self) -> Calibration:
        """What the thresholds follow from."""
        scores, best, own = (tuple(x.tolist()) for x in (self.held_out, self.best, self.own))
        return Calibration(scores, best, own, self.weight > 0, self.other)

    def thresholds(
        self,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        coverage: float | None = None,
    ) -> Thresholds:
        """Choose thresholds from the out-of-fold shots; see `Calibration.thresholds`."""
        return self.calibration.thresholds(reject, max_errors, coverage)

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the rule for a model file: a JSON value and arrays."""
        arrays = {
            "shots": self.shots,
            "labels": self.labels,
            "background": self.background.astype(np.float16),
            "rows": self.rows,
            "energy": self.energy,
            "best": self.best,
            "own": self.own,
        }
        document = to_json(_Saved(self.weight, self.other, self.lift))
        if not self.lift:
            del document["lift"]  # which earlier versions do not know
        return document, arrays

    @classmethod
    def from_state(
        cls, document: Any, arrays: Mapping[str, NDArray[Any]], classes: int
    ) -> DecisionRule:
        """Make a rule from what `state` returned, checking everything."""
        saved = from_json(_Saved, document, "decision.v1")
        kinds = {"shots": "f4", "labels": "i8", "background": "f2", "rows": "i8"}
        kinds |= dict.fromkeys(("energy", "best", "own"), "f4")
        if different := sorted(arrays.keys() ^ kinds.keys()):
            kind = "unexpected" if different[0] in arrays else "missing"
            raise InputError(f"tensor 'decision.{different[0]}' is {kind}.")
        for name, array in arrays.items():
            dimensions = 2 if name in ("shots", "background") else 1
            if array.ndim != dimensions or array.dtype != np.dtype(kinds[name]):
                raise InputError(f"tensor 'decision.{name}' has another type or shape.")
            if not np.isfinite(array).all():
                raise InputError(f"tensor 'decision.{name}' holds NaN or infinity.")
        own, rows = arrays["shots"], arrays["rows"]
        counts = {len(arrays[name]) for name in ("energy", "best", "own")}
        if (
            arrays["background"].shape[1] != own.shape[1]
            or len(counts) > 1
            or not counts <= {0, len(rows)}
            or not np.isin(rows, np.arange(len(own))).all()
            or len(arrays["labels"]) != len(own)
            or not np.isin(arrays["labels"], np.arange(classes)).all()
            or not 0 <= (saved.other or 0) < classes
        ):
            raise InputError("the tensors 'decision.*' do not fit each other.")
        ready = {**arrays, "background": arrays["background"].astype(np.float32)}
        return cls(weight=saved.weight, other=saved.other, lift=saved.lift, **ready)


@dataclass(frozen=True)
class _Saved:
    """The JSON value of a model file."""

    weight: float
    other: int | None = None
    lift: float = 0.0


def energy_of(logits: Floats) -> Floats:
    """Return the log of the sum of exponentials, per row.

    >>> energy_of(np.log([[1.0, 3.0]])).round(6) == np.log(4.0).round(6)
    array([ True])
    """
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=1)
    energy: Floats = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return energy


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of logits (image, class), in double precision."""
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def check_share(name: str, value: float | None, *, low: bool = False) -> None:
    """Raise an error unless a value is None or in (0, 1); with `low`, 0 is allowed too.

    >>> check_share("coverage", 1.0)
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: coverage must be between 0 and 1, such as 0.9, got 1.0.
    """
    if value is None or (low and value == 0):
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1:
        usual = 0.1 if low else 0.9
        raise InputError(f"{name} must be between 0 and 1, such as {usual}, got {value!r}.")


def _nearest(vectors: Floats, others: Floats) -> Floats:
    """Return the largest cosine of each vector with the others; all have length 1."""
    # In double precision, so that a score does not depend on an image's place in a batch.
    nearest: Floats = (vectors.astype(np.float64) @ others.T.astype(np.float64)).max(axis=1)
    return nearest
