"""Stacking: the weights of the ensemble's members, fitted on out-of-fold predictions.

The members are the blocks of the head and the ridge experts. Weights that are fitted on images
which the members were trained on would favour the members that overfit, so every member predicts
each support image without having seen it: the head by 2-fold cross-validation, the experts by
leave-one-out, which is cheap for them.

There are three kinds of tasks. Where some classes have several shots, weights are fitted; with
unequal shots, scores are balanced before (`balance`). Where nothing can be tested, because every
class has one shot or only one has several, the weights of one-shot tasks apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import log_softmax
from mivhead.ensemble import balance
from mivhead.ensemble import constants as tuned
from mivhead.ensemble.balance import ShotLines, only_one_has_several, shot_weights
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.ensemble.names import Names, NameScores, name_cosines
from mivhead.ensemble.ridge import Expert, Experts, expected_shapes
from mivhead.features import Block, Features, SupportSet, to_single
from mivhead.head.train import Trained

Array = NDArray[np.float32]

WEIGHT_FOLDS = 10  # in which images are left out of stacking to estimate the accuracy
WEIGHTS = "weights"  # their name in a model file
CLASS_WEIGHTS, OFFSETS = "class_weights", "offsets"  # likewise, if classes have unequal shots
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
    return np.where(shots[support.labels] > 1, rank % tuned.FOLDS, -1)


def fold_numbers(fold: NDArray[np.int64]) -> list[int]:
    """List the folds, without that of images which are in every training set.

    >>> fold_numbers(np.array([1, 0, -1, 1]))
    [0, 1]
    """
    numbers: list[int] = np.unique(fold[fold >= 0]).tolist()
    return numbers


def out_of_fold_cosines(
    trained: Sequence[Trained], fold: NDArray[np.int64], blocks: int, classes: int
) -> Array:
    """Collect cosines (block, image, class) of images by heads trained without their fold.

    `trained` holds a head for each of `fold_numbers`. Such a head sees neither the images of the
    fold nor their views. The only image of a class is in every training set, because nothing could
    stand for the class; its cosines are 0.
    """
    cosines = np.zeros((blocks, len(fold), classes), np.float32)
    for number, head in zip(fold_numbers(fold), trained, strict=True):
        cosines[:, fold == number] = head.cosines
    return cosines


def weigh(weights: Array, predictions: Array) -> Array:
    """Logits (image, class): the weighted sum of predictions (member, image, class)."""
    logits: Array = (weights[:, None, None] * predictions).sum(axis=0)
    return logits


def fit_weights(
    predictions: Array,
    labels: NDArray[np.int64],
    prior: Array,
    strength: float | None = None,
    counts: NDArray[np.float64] | None = None,
) -> Array:
    """Fit the weights (member,) of a sum of predictions that is read as logits; all are positive.

    They minimise the cross-entropy of out-of-fold predictions (member, image, class), of which each
    counts as `counts` says, plus a penalty on the distance from the prior, so that they stay close
    to it if there are few images. As the sum is fitted to images that no member has seen, its
    probabilities are calibrated too.

    The loss is convex and there are about a dozen weights, so that a few steps of Newton's method
    find the minimum.

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
        number = float(counts.sum() ** 2 / (counts**2).sum())  # Kish's effective number of images
        strength = max(tuned.WEAK, (tuned.ENOUGH / number) ** 2)
    z, start = predictions.astype(np.float64), prior.astype(np.float64)
    images, unit = np.arange(len(labels)), start.mean()
    right = z[:, images, labels] @ counts  # (member,)

    def evaluate(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return the loss, and the probabilities (image, class)."""
        log_p = log_softmax(np.tensordot(weights, z, axes=1))
        moved = (weights - start) / unit
        loss = strength * float(moved @ moved) - float(counts @ log_p[images, labels])
        return loss, np.exp(log_p)

    weights, low = start, tuned.SMALLEST * start
    loss, p = evaluate(weights)
    for _ in range(NEWTON_STEPS):
        expected = np.einsum("vnc,nc->vn", z, p)  # prediction under the probabilities
        slope = expected @ counts - right + 2 * strength * (weights - start) / unit**2
        curvature = (z * (p * counts[:, None])).reshape(len(z), -1) @ z.reshape(len(z), -1).T
        curvature -= (expected * counts) @ expected.T
        curvature += np.eye(len(z)) * (2 * strength / unit**2)
        free = (weights > low) | (slope < 0)  # the others are held at their smallest value
        step = np.zeros_like(weights)
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], slope[free])
        length = 1.0
        while True:  # shorter and shorter, until the loss falls
            moved = np.maximum(weights - length * step, low)
            new_loss, new_p = evaluate(moved)
            if new_loss <= loss or length < CLOSE:
                break
            length /= 2
        fallen = loss - new_loss
        if fallen > 0:
            weights, loss, p = moved, new_loss, new_p
        if fallen <= CLOSE * (1 + abs(loss)):
            break
    return weights.astype(np.float32)


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions of support images that no member was trained on, and what was fitted to them."""

    rows: NDArray[np.int64]  # (image,): which support images
    labels: NDArray[np.int64]  # their class numbers (image,)
    # Predictions of each member, balanced: (member, image, class). If classes have unequal shots,
    # `shot_scores` follow the experts; names come last.
    members: Array
    prior: Array  # the weights (member,) that stacking started from
    counts: NDArray[np.float64]  # how much each image counted: (image,)
    weights: Array  # the fitted weights (member,)

    def cross_fitted(self) -> Array:
        """Logits (image, class) with weights that were fitted without the image, too.

        Unlike those with the fitted weights, they tell how good the model is on new images.
        """
        fold = np.arange(len(self.rows)) % WEIGHT_FOLDS
        logits = np.empty(self.members.shape[1:], np.float32)
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
        log_p = log_softmax(self.cross_fitted())[np.arange(len(self.labels)), self.labels]
        return -float(np.average(log_p, weights=self.counts))


def prior_weights(experts: Sequence[Expert], taken: Sequence[int], *, one_shot: bool) -> Array:
    """Weights before stacking, of the blocks of the head and of the experts: (member,).

    The deeper the block, the larger.

    >>> experts = [Expert("second_order", i) for i in range(4)] + [Expert("mean", 3)]
    >>> prior_weights(experts, [2, 3], one_shot=False)
    array([0.5, 1. , 1. , 1. , 2. , 3. , 3. ], dtype=float32)
    """
    of_blocks = np.full(len(taken), tuned.BLOCK, np.float32)
    of_blocks[-1:] = tuned.DEEPEST_BLOCK
    if one_shot:
        of_blocks *= np.float32(tuned.ONE_SHOT_BLOCKS)
    deepest = max(expert.block for expert in experts)
    of_experts = []
    for kind, block in experts:
        if kind == "second_order":
            slope = tuned.ONE_SHOT_SECOND_ORDER if one_shot else tuned.SECOND_ORDER
            of_experts.append(max(1.0, slope * (3 - deepest + block)))
        elif kind == "mean":
            of_experts.append(tuned.ONE_SHOT_MEAN if one_shot else tuned.MEAN)
        else:
            of_experts.append(tuned.LAYOUT)
    return np.concatenate([of_blocks, np.array(of_experts, np.float32)])


def is_one_shot(experts: Experts, labels: NDArray[np.int64]) -> bool:
    """Whether the weights of one-shot tasks apply: they are for features with maps."""
    second_order = any(expert.kind == "second_order" for expert in experts.ridges)
    shots = np.bincount(labels)
    return second_order and (int(shots.max()) == 1 or only_one_has_several(shots))


def one_shot_scale(features: Features, labels: NDArray[np.int64]) -> float:
    """Return the factor of the prior weights that calibrates one-shot tasks; 1 for other tasks.

    The more alike the shots of different classes are, the less their differences say about new
    images: the factor falls with the mean similarity of a shot to the nearest other one.

    >>> apart = Features(np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
    >>> alike = Features(np.array([[1.0, 0.9, 0, 0], [0.9, 1.0, 0, 0]]))
    >>> labels = np.array([0, 1])
    >>> one_shot_scale(apart, labels) > 1 > one_shot_scale(alike, labels)
    True
    """
    shots = np.bincount(labels)
    if shots.max() > 1 and not only_one_has_several(shots):
        return 1.0
    vectors = mean_vectors(features.blocks[-1]).astype(np.float64)
    similarity = vectors @ vectors.T
    similarity[labels[:, None] == labels] = -1
    distance = 1 - float(similarity.max(axis=1).mean())
    return float(tuned.ONE_SHOT_SCALE * max(distance, 0.01) ** tuned.ONE_SHOT_POWER)


def few_shots_scale(shots: NDArray[np.int64]) -> float:
    """Return the factor of logits that stacking calibrated: the fewer the shots, the smaller.

    >>> [round(few_shots_scale(np.array(shots)), 2) for shots in ([10, 10], [3, 3], [1, 12])]
    [0.98, 0.93, 0.89]
    """
    return 1 - tuned.FEW_SHOTS * float(np.mean(1 / shots))


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
        *,
        together: bool = False,
        names: Array | None = None,
    ) -> Self:
        """Fit the experts and the weights to a support set.

        Parameters
        ----------
        taken : sequence of int
            The blocks of the features that the head uses.
        out_of_fold : tuple or None
            The result of `out_of_fold_cosines`, and the fold of each image, -1 for those without a
            prediction; None keeps the prior weights.
        together : bool, default=False
            Whether experts, too, leave out all of a fold, to estimate the accuracy: leaving out a
            single image would put its class at a disadvantage. By default they leave out one image
            at a time, and learn from as many as possible.
        names : array of shape (class, channel) or None, default=None
            Vectors of the names of the classes, if names are a member.
        """
        shots = np.bincount(labels)
        nothing = np.zeros((len(taken), len(labels), len(shots)), np.float32)
        cosines, fold = out_of_fold or (nothing, np.full(len(labels), -1))
        rows = np.flatnonzero(fold >= 0)
        folds = fold if together and len(rows) else None
        experts, memberships = Experts.fit(features, labels, len(shots), folds)
        prior = prior_weights(list(experts.ridges), taken, one_shot=is_one_shot(experts, labels))
        lone = only_one_has_several(shots)
        if lone:  # the head's cosines favour the large class, and nothing tells by how much
            prior[: len(taken)] *= np.float32(tuned.SMALLEST)
        lines: ShotLines | None = None
        members = np.concatenate([cosines, memberships])  # (member, image, class)
        if not lone and len(set(shots.tolist())) > 1:
            lines, members = _balance(cosines, memberships, labels, fold, folds)
            prior = np.append(prior, np.float32(1 / tuned.SHOTS_SCALE))
        one_shot = one_shot_scale(features, labels)
        scale = np.float32(one_shot)
        if not lone:
            scale = np.float32(
                np.exp(-tuned.UNTESTED * np.mean(shots == 1)) * few_shots_scale(shots)
            )

        def stack(members: Array, prior: Array) -> OutOfFold:
            counts = shot_weights(labels)[rows]
            weights = scale * fit_weights(members[:, rows], labels[rows], prior, counts=counts)
            return OutOfFold(rows, labels[rows], members[:, rows], prior, counts, weights)

        left_out = None if out_of_fold is None else stack(members, prior)
        named: Names | None = None
        if names is not None:
            scores = NameScores.fit(name_cosines(features.blocks[-1], names), labels)
            weight, useful = scores.prior_weight(shots), scores.evidence > tuned.EVIDENCE
            if left_out is not None:
                more = np.concatenate([members, scores.member[None]])
                with_names = stack(more, np.append(prior, np.float32(weight)))
                useful = with_names.loss < left_out.loss
                if useful:
                    left_out, weight = with_names, float(with_names.weights[-1])
            named = Names(names, scores.centres, weight * scores.factor, useful)
        weights = prior * np.float32(one_shot)
        if left_out is not None:
            weights = left_out.weights[: len(prior)]
        if lines is None:
            return cls(experts, weights, names=named, left_out=left_out)
        by_class, offsets = balance.fold_into_weights(weights, lines, shots)
        class_weights = by_class.astype(np.float32), offsets.astype(np.float32)
        return cls(experts, weights[:-1], *class_weights, named, left_out)

    def logits(self, cosines: Array, features: Features) -> Array:
        """Logits (image, class) from the head's cosines (block, image, class) and the experts."""
        logits = self.combine(np.concatenate([cosines, self.experts(features)]))
        return logits if self.names is None else self.names.add(logits, features)

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
        tensors = {WEIGHTS: self.weights} | self.experts.tensors()
        if self.class_weights is not None and self.offsets is not None:
            tensors |= {CLASS_WEIGHTS: self.class_weights, OFFSETS: self.offsets}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array], blocks: Sequence[Block]) -> Self:
        """Make an ensemble from the tensors of a model file, checked against `expected_shapes`."""
        experts = Experts.from_tensors(tensors, blocks)
        return cls(experts, tensors[WEIGHTS], tensors.get(CLASS_WEIGHTS), tensors.get(OFFSETS))

    @staticmethod
    def expected_shapes(
        blocks: Sequence[Block], head_blocks: int, classes: int, *, balanced: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `tensors`; `balanced` if classes have unequal shots."""
        shapes = expected_shapes(blocks, classes)
        members = head_blocks + sum(name.endswith(".intercepts") for name in shapes)
        if balanced:
            shapes |= {CLASS_WEIGHTS: (members, classes), OFFSETS: (classes,)}
        return {WEIGHTS: (members,), **shapes}


def _balance(
    cosines: Array,
    memberships: Array,
    labels: NDArray[np.int64],
    fold: NDArray[np.int64],
    folds: NDArray[np.int64] | None,
) -> tuple[ShotLines, Array]:
    """Balance out-of-fold scores, and add the member `shot_scores`: (member + 1, image, class).

    `fold` says which images the head left out together, `folds` the same of the experts.
    """
    shots, rows = np.bincount(labels), np.flatnonzero(fold >= 0)
    of_head, of_experts = balance.shots_behind(labels, fold), balance.shots_behind(labels, folds)
    head_lines = ShotLines.fit(cosines[:, rows], labels[rows], of_head[rows], shots)
    expert_lines = ShotLines.fit(memberships, labels, of_experts, shots)
    members = [
        head_lines(cosines, of_head),
        expert_lines(memberships, of_experts),
        balance.shot_scores(of_experts, shots)[None],
    ]
    return ShotLines.joined(head_lines, expert_lines), np.concatenate(members).astype(np.float32)
