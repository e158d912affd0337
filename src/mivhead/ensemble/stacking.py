"""Stacking: the weights of the ensemble's members, fitted on out-of-fold predictions.

The members are the blocks of the head and the ridge experts. Weights that are fitted on images
which the members were trained on would favour the members that overfit, so every member predicts
each support image without having seen it: the head by 2-fold cross-validation, the experts by
leave-one-out, which is cheap for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from mivhead.engine.head import Trained
from mivhead.engine.training import Trainer
from mivhead.ensemble.balance import (
    SHOTS_SCALE,
    ShotLines,
    effective_number,
    fold_into_weights,
    one_has_several,
    shot_scores,
    shot_weights,
    shots_behind,
    untested_scale,
)
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.ensemble.names import (
    EVIDENCE,
    HONEST,
    SHARE,
    Names,
    NameScores,
    centres_of,
    name_cosines,
)
from mivhead.ensemble.ridge import Experts, Ridge, expected_shapes, prior_weights
from mivhead.features import Block, Features, to_single
from mivhead.support import ClassVectors, SupportSet

if TYPE_CHECKING:
    from mivhead.head.training import DeviceTrainer

Array = NDArray[np.float32]

FOLDS = 2
# Strength of the prior weights against m out-of-fold predictions: (ENOUGH / m)^2, at least WEAK.
WEAK, ENOUGH = 0.1, 15
SMALLEST = 0.001  # part of its prior weight that a member keeps, even if all members seem to harm
BLOCK, DEEPEST_BLOCK = 0.5, 1.0  # prior weights of the head's blocks
ONE_SHOT_BLOCKS = 0.4  # factor of them, if every class has one shot
ONE_SHOT_SCALE, ONE_SHOT_POWER = 1.34, 0.41  # of all prior weights, if every class has one shot
RECOGNISED, RECOGNISED_POWER = 0.18, 3  # where the mean has its usual weight; how fast it grows
LARGEST_TRUST = 16.0  # factor of its weight
WEIGHT_FOLDS = 10  # in which images are left out of stacking to estimate the accuracy
WEIGHTS = "weights"  # their name in a model file
CLASS_WEIGHTS, OFFSETS = "class_weights", "offsets"  # likewise, if classes have unequal shots
NEVER = -1e4  # logarithm of the prior of a class that does not occur
NEWTON_STEPS, CLOSE = 50, 1e-10  # of `fit_weights`: at most, and when the loss no longer falls


def assign_folds(support: SupportSet) -> NDArray[np.int64]:
    """Assign the images of each class to folds; -1 for the only image of a class.

    Images are ranked by their content, so that their order does not matter.
    """
    block = support.features.blocks[-1]
    values = block.token if block.token is not None else block.map
    assert values is not None
    flat = values.reshape(len(values), -1)
    key = np.array([np.square(to_single(x)).sum() for x in flat])  # (image,)
    shots = np.asarray(support.shots)
    rank = np.empty(len(key), np.int64)
    rank[np.lexsort((key, support.labels))] = np.concatenate([np.arange(s) for s in shots])
    return np.where(shots[support.labels] > 1, rank % FOLDS, -1)


def out_of_fold_cosines(
    trainer: Trainer | DeviceTrainer, trained: Sequence[Trained], fold: NDArray[np.int64]
) -> Array:
    """Collect predictions of support images by heads that were trained on the other folds.

    A head sees neither the images of its own fold nor their views. The only image of a class is in
    every training set, because nothing could stand for the class.

    Parameters
    ----------
    trainer : Trainer
        Of the support set.
    trained : sequence of Trained
        For each of `fold_numbers`, what `trainer` trained on the other folds.
    fold : array of int
        The fold of each image, -1 for those that are in every training set.

    Returns
    -------
    array of shape (block, image, class)
        Cosines; 0 for images without a prediction.
    """
    classes = int(trainer.support.labels[-1]) + 1
    found = np.zeros((len(trainer.taken), len(fold), classes), np.float32)
    for number, each in zip(fold_numbers(fold), trained, strict=True):
        found[:, fold == number] = each.cosines
    return found


def fold_numbers(fold: NDArray[np.int64]) -> list[int]:
    """List the folds, without that of images which are in every training set.

    >>> fold_numbers(np.array([1, 0, -1, 1]))
    [0, 1]
    """
    numbers: list[int] = np.unique(fold[fold >= 0]).tolist()
    return numbers


def fit_weights(
    predictions: Array,
    labels: NDArray[np.int64],
    prior: Array,
    strength: float | None = None,
    counts: NDArray[np.float64] | None = None,
) -> Array:
    """Fit the weights of a sum of predictions that is read as logits; all are positive.

    They minimise the cross-entropy of out-of-fold predictions plus a penalty on the distance from
    the prior, so that they stay close to it if there are few images. As the sum is fitted to images
    that no member has seen, its probabilities are calibrated too.

    The fewer images, the stronger the penalty, beyond its share in the sum: with two shots per
    class, members are judged by what one shot taught them (docs/research-log.md).

    The loss is convex and there are about a dozen weights, so that a few steps of Newton's method
    find the minimum.

    Parameters
    ----------
    predictions : array
        Out-of-fold predictions of each member: (member, image, class).
    labels : array
        Class numbers of the images.
    prior : array
        Weights (member,) without any evidence.
    strength : float or None, default=None
        Strength of the penalty; None: (15 / m)^2 for m images, but at least 0.1.
    counts : array or None, default=None
        How much each image counts; None: all alike. m is then their effective number.

    Returns
    -------
    array
        Weights (member,).

    References
    ----------
    Wolpert 1992, "Stacked Generalization", Neural Networks 5.

    Examples
    --------
    >>> right, wrong = np.eye(2), 1 - np.eye(2)
    >>> predictions = np.stack([right, wrong]).repeat(20, axis=1)
    >>> weights = fit_weights(predictions, np.arange(2).repeat(20), np.ones(2))
    >>> (weights > 1).tolist()
    [True, False]
    """
    if len(np.unique(labels)) < 2:
        return prior  # images of one class do not show how to tell classes apart
    counts = np.ones(len(labels)) if counts is None else counts
    if strength is None:
        strength = max(WEAK, (ENOUGH / effective_number(counts)) ** 2)
    z, before = predictions.astype(np.float64), prior.astype(np.float64)
    images, unit = np.arange(len(labels)), before.mean()
    right = z[:, images, labels] @ counts  # (member,)

    def evaluate(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return the loss, and the probabilities (image, class)."""
        logits = np.tensordot(weights, z, axes=1)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        moved = (weights - before) / unit
        penalty = strength * float(moved @ moved)
        return penalty - float(counts @ log_p[images, labels]), np.exp(log_p)

    weights, low = before, SMALLEST * before
    loss, p = evaluate(weights)
    for _ in range(NEWTON_STEPS):
        expected = np.einsum("vnc,nc->vn", z, p)  # prediction under the probabilities
        slope = expected @ counts - right + 2 * strength * (weights - before) / unit**2
        shares = p * counts[:, None]
        curvature = (z * shares).reshape(len(z), -1) @ z.reshape(len(z), -1).T
        curvature -= (expected * counts) @ expected.T
        curvature += np.eye(len(z)) * (2 * strength / unit**2)
        free = (weights > low) | (slope < 0)  # the others are held at their smallest value
        step = np.zeros_like(weights)
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], slope[free])
        length = 1.0
        while True:  # shorter and shorter, until the loss falls
            there = np.maximum(weights - length * step, low)
            new_loss, new_p = evaluate(there)
            if new_loss <= loss or length < CLOSE:
                break
            length /= 2
        fallen = loss - new_loss
        if fallen > 0:
            weights, loss, p = there, new_loss, new_p
        if fallen <= CLOSE * (1 + abs(loss)):
            break
    return weights.astype(np.float32)


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions of support images that no member was trained on."""

    rows: NDArray[np.int64]  # (image,): which support images
    labels: NDArray[np.int64]  # their class numbers (image,)
    # Predictions of each member, balanced: (member, image, class). If classes have unequal shots,
    # the last one is `shot_scores`.
    members: Array
    prior: Array  # the weights (member,) that stacking started from
    counts: NDArray[np.float64]  # how much each image counted: (image,)
    weights: Array  # the fitted weights (member,)
    logits: Array  # (image, class): the sum of the members with the fitted weights

    def cross_fitted(self) -> Array:
        """Logits (image, class) with weights that were fitted without the image, too.

        Unlike `logits`, they tell how good the model is on new images.
        """
        fold = np.arange(len(self.rows)) % WEIGHT_FOLDS
        logits = np.empty_like(self.logits)
        for number in range(min(WEIGHT_FOLDS, len(fold))):
            out, kept = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
            weights = fit_weights(
                self.members[:, kept], self.labels[kept], self.prior, counts=self.counts[kept]
            )
            logits[out] = weigh(weights, self.members[:, out])
        return logits

    @property
    def loss(self) -> float:
        """Mean cross-entropy of `cross_fitted`."""
        logits = self.cross_fitted().astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        own = log_p[np.arange(len(self.labels)), self.labels]
        return -float(np.average(own, weights=self.counts))


def one_shot_scale(features: Features, labels: NDArray[np.int64]) -> float:
    """Return the factor of the prior weights that calibrates one-shot tasks; 1 for other tasks.

    With one shot per class there is nothing to fit it on. The more alike the shots of different
    classes are, the less their differences say about new images: the factor falls with the mean
    similarity of a shot to the nearest other one. Both constants minimise the cross-entropy on
    one-shot tasks of the tuning sets (docs/research-log.md).

    >>> apart = Features(np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
    >>> alike = Features(np.array([[1.0, 0.9, 0, 0], [0.9, 1.0, 0, 0]]))
    >>> labels = np.array([0, 1])
    >>> one_shot_scale(apart, labels) > 1 > one_shot_scale(alike, labels)
    True
    """
    shots = np.bincount(labels)
    if shots.max() > 1 and not one_has_several(shots):
        return 1.0
    vectors = mean_vectors(features.blocks[-1]).astype(np.float64)
    similarity = vectors @ vectors.T
    similarity[labels[:, None] == labels] = -1
    distance = 1 - float(similarity.max(axis=1).mean())
    return float(ONE_SHOT_SCALE * max(distance, 0.01) ** ONE_SHOT_POWER)


def trust_mean(prior: Array, means: NDArray[np.bool_], recognised: float) -> Array:
    """Give the mean more of the weight, the better the backbone recognises the shots.

    Only for one shot per class: with more, stacking finds the weights. The constants were chosen on
    16 image sets and validated with each of them left out (docs/research-log.md).

    Parameters
    ----------
    prior : array of shape (member,)
        The weights of one-shot tasks.
    means : array of bool of shape (member,)
        Which members look at the mean of the deepest block.
    recognised : float
        See `mivhead.backbones.classes.recognition`.

    Examples
    --------
    >>> means = np.array([False, True])
    >>> trust_mean(np.ones(2, np.float32), means, RECOGNISED)
    array([1., 1.], dtype=float32)
    >>> trust_mean(np.ones(2, np.float32), means, 0.0)
    array([2., 0.], dtype=float32)
    """
    factor = min((recognised / RECOGNISED) ** RECOGNISED_POWER, LARGEST_TRUST)
    weights = np.where(means, prior * np.float32(factor), prior)
    trusted: Array = weights * np.float32(prior.sum() / weights.sum())
    return trusted


def is_one_shot(experts: Experts, labels: NDArray[np.int64]) -> bool:
    """Whether the weights of one-shot tasks apply: they are for features with maps."""
    second_order = any(expert.kind == "second_order" for expert in experts.ridges)
    shots = np.bincount(labels)
    return second_order and (int(shots.max()) == 1 or one_has_several(shots))


@dataclass(frozen=True, eq=False)
class Ensemble:
    """The ridge experts, and the weights of all members: the head's blocks, then the experts.

    Class names are one more member, with a weight of its own.
    """

    experts: Experts
    weights: Array  # (member,)
    class_weights: Array | None = None  # (member, class), if classes have unequal shots
    offsets: Array | None = None  # (class,), likewise
    names: Names | None = None
    left_out: OutOfFold | None = None  # what the weights were fitted on; not in a model file

    @classmethod
    def fit(
        cls,
        features: Features,
        labels: NDArray[np.int64],
        taken: Sequence[int],
        out_of_fold: tuple[Array, NDArray[np.int64]] | None,
        spans: Sequence[range] = (),
        *,
        together: bool = False,
        names: ClassVectors | None = None,
        recognised: float | None = None,
    ) -> Self:
        """Fit the experts and the weights.

        Parameters
        ----------
        features, labels : Features, array
            The support set.
        taken : sequence of int
            The blocks of the features that the head uses.
        out_of_fold : tuple or None
            The result of `out_of_fold_cosines`, and the fold of each image, -1 for those without a
            prediction; None keeps the prior weights.
        spans : sequence of range, default=()
            The blocks of each backbone, if there are several.
        together : bool, default=False
            Whether experts, too, predict the images of a fold without all of the fold, to estimate
            the accuracy: leaving out a single image would put its class at a disadvantage. By
            default they leave out one image at a time, and learn from as many as possible.
        names : ClassVectors or None, default=None
            Vectors of the names of the classes, if names are a member.
        recognised : float or None, default=None
            How well the backbone recognises the images (`mivhead.backbones.classes`), which
            matters if every class has one shot.
        """
        shots = np.bincount(labels)
        folds = out_of_fold[1] if together and out_of_fold is not None else None
        experts, predictions = Experts.fit(features, labels, len(shots), spans, folds)
        spans = spans or [range(len(features.blocks))]
        deepest = {max((i for i in taken if i in span), default=None) for span in spans}
        of_blocks = np.array([DEEPEST_BLOCK if i in deepest else BLOCK for i in taken], np.float32)
        one_shot = is_one_shot(experts, labels)
        if one_shot:
            of_blocks *= np.float32(ONE_SHOT_BLOCKS)
        lone = one_has_several(shots)
        if lone:  # the head's cosines favour the large class, and nothing tells by how much
            of_blocks *= np.float32(SMALLEST)
        of_experts = prior_weights(list(experts.ridges), spans, one_shot=one_shot)
        prior = np.concatenate([of_blocks / np.float32(len(spans)), of_experts])
        if one_shot and recognised is not None:
            means = [False] * len(taken) + [expert.kind == "mean" for expert in experts.ridges]
            prior = trust_mean(prior, np.array(means), recognised)
        cosines, fold = out_of_fold or (
            np.zeros((len(taken), *predictions.shape[1:]), np.float32),
            np.full(len(labels), -1),
        )
        rows = np.flatnonzero(fold >= 0)
        lines: ShotLines | None = None
        if lone or (shots == shots[0]).all():
            members = np.concatenate([cosines, predictions])[:, rows]  # (member, image, class)
        else:
            behind = shots_behind(labels, fold), shots_behind(labels, folds)
            of_head = ShotLines.fit(cosines[:, rows], labels[rows], behind[0][rows], shots)
            of_ridges = ShotLines.fit(predictions, labels, behind[1], shots)
            lines = ShotLines.joined(of_head, of_ridges)
            balanced = [
                of_head(cosines, behind[0]),
                of_ridges(predictions, behind[1]),
                shot_scores(behind[1], shots)[None],
            ]
            members = np.concatenate(balanced).astype(np.float32)[:, rows]
            prior = np.append(prior, np.float32(1 / SHOTS_SCALE))
        scale = np.float32(one_shot_scale(features, labels) if lone else untested_scale(shots))

        def stack(members: Array, prior: Array) -> OutOfFold:
            counts = shot_weights(labels)[rows]
            weights = scale * fit_weights(members, labels[rows], prior, counts=counts)
            logits = weigh(weights, members)
            return OutOfFold(rows, labels[rows], members, prior, counts, weights, logits)

        left_out = None if out_of_fold is None else stack(members, prior)
        weights = prior * np.float32(one_shot_scale(features, labels))
        member: Names | None = None
        if names is not None:
            by_name = name_cosines(features.blocks[-1], names.vectors)  # (image, class)
            centres = centres_of(by_name, labels)
            by_name = (by_name - centres)[:, names.seen]
            scores = NameScores.fit(by_name, labels)
            unseen = len(names.seen) < len(names.vectors)
            of_names = scores.prior_weight(shots, 1.0 if unseen else SHARE)
            useful = unseen or scores.evidence > EVIDENCE
            if left_out is not None:
                more = np.concatenate([members, scores.member[None, rows]])
                with_names = stack(more, np.append(prior, np.float32(of_names)))
                useful = unseen or with_names.loss < left_out.loss
                if useful:
                    left_out, of_names = with_names, float(with_names.weights[-1])
            weight = of_names * scores.factor
            member = Names(names.vectors, centres, names.seen, weight, scores.scale, 0.0, useful)
            if left_out is not None and unseen:
                member = member.fit_unseen(left_out.logits, by_name[rows], labels[rows])
        if left_out is not None:
            weights = left_out.weights[: len(prior)]
        if lines is None:
            return cls(experts, weights, names=member, left_out=left_out)
        by_class, offsets = fold_into_weights(weights, lines, shots)
        class_weights = by_class.astype(np.float32), offsets.astype(np.float32)
        return cls(experts, weights[:-1], *class_weights, member, left_out)

    @classmethod
    def of_names(cls, names: Names | None = None) -> Self:
        """Make the ensemble of a model in which fewer than two classes have shots."""
        return cls(Experts({}, {}), np.empty(0, np.float32), names=names)

    def fit_unseen(self, cosines: Array, features: Features, labels: NDArray[np.int64]) -> Self:
        """Fit the logits of classes without shots where no class has several shots.

        Nothing can be left out then. The logits of the shots themselves are used instead, with a
        smaller lead of the right class.

        Parameters
        ----------
        cosines : array of shape (block, shot, class)
            The head's cosines of the shots.
        features, labels : Features, array
            The shots.
        """
        assert self.names is not None
        own, rows = self.names.cosines(features)[:, self.names.seen], np.arange(len(labels))
        logits = self.combine(np.concatenate([cosines, self.experts(features)])).astype(float)
        others = (logits.sum(axis=1) - logits[rows, labels]) / (logits.shape[1] - 1)
        logits[rows, labels] = others + HONEST * (logits[rows, labels] - others)
        logits += self.names.weight * own
        return replace(self, names=self.names.fit_unseen(logits, own, labels))

    def with_prior(self, added: NDArray[np.float64]) -> Self:
        """Return an ensemble whose logits (image, class) have the logarithm of a prior added."""
        # A class that does not occur: finite, as a file needs it, and never named.
        prior = np.maximum(added, NEVER).astype(np.float32)
        offsets = np.zeros(len(prior), np.float32) if self.offsets is None else self.offsets
        by_class = np.broadcast_to(self.weights_by_class, (len(self.weights), len(prior)))
        found = replace(self, class_weights=np.ascontiguousarray(by_class), offsets=offsets + prior)
        if (left := self.left_out) is not None:
            found = replace(found, left_out=replace(left, logits=left.logits + prior))
        return found

    def reordered(self, order: NDArray[np.int64]) -> Self:
        """Return the same ensemble, without names, for its classes in another order."""
        ridges = {
            expert: Ridge(np.ascontiguousarray(each.coefficients[:, order]), each.intercepts[order])
            for expert, each in self.experts.ridges.items()
        }
        by_class = None
        if self.class_weights is not None:
            by_class = np.ascontiguousarray(self.class_weights[:, order])
        return replace(
            self,
            experts=Experts(self.experts.pcas, ridges),
            class_weights=by_class,
            offsets=None if self.offsets is None else self.offsets[order],
            left_out=None,
        )

    def logits(self, cosines: Array, features: Features) -> Array:
        """Logits (image, class) from the head's cosines (block, image, class) and the experts.

        The cosines are those of the classes with shots; the logits are those of all classes.
        """
        logits = self.combine(np.concatenate([cosines, self.experts(features)]))
        if self.names is None:
            return logits
        return self.names.add(logits, self.names.cosines(features))

    def combine(self, members: Array) -> Array:
        """Logits (image, class) from scores (member, image, class) of all members but names."""
        if self.class_weights is None or self.offsets is None:
            return weigh(self.weights, members)
        logits: Array = (self.class_weights[:, None] * members).sum(axis=0) + self.offsets
        return logits

    @property
    def weights_by_class(self) -> Array:
        """Weights of all members for each class, (member, class); (member, 1) if they are alike."""
        return self.weights[:, None] if self.class_weights is None else self.class_weights

    def tensors(self) -> dict[str, Array]:
        """Tensors of a model file, by name."""
        found = {WEIGHTS: self.weights} | self.experts.tensors()
        if self.class_weights is not None and self.offsets is not None:
            found |= {CLASS_WEIGHTS: self.class_weights, OFFSETS: self.offsets}
        return found

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Array], blocks: Sequence[Block], spans: Sequence[range] = ()
    ) -> Self:
        """Make an ensemble from the tensors of a model file, checked against `expected_shapes`."""
        experts = Experts.from_tensors(tensors, blocks, spans)
        return cls(experts, tensors[WEIGHTS], tensors.get(CLASS_WEIGHTS), tensors.get(OFFSETS))

    @staticmethod
    def expected_shapes(
        blocks: Sequence[Block],
        head_blocks: int,
        classes: int,
        spans: Sequence[range] = (),
        *,
        balanced: bool = False,
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `tensors`; `balanced` if classes have unequal shots."""
        shapes = expected_shapes(blocks, classes, spans)
        members = head_blocks + sum(name.endswith(".intercepts") for name in shapes)
        if balanced:
            shapes |= {CLASS_WEIGHTS: (members, classes), OFFSETS: (classes,)}
        return {WEIGHTS: (members,), **shapes}


def weigh(weights: Array, predictions: Array) -> Array:
    """Logits (image, class): the weighted sum of predictions (member, image, class)."""
    logits: Array = (weights[:, None, None] * predictions).sum(axis=0)
    return logits
