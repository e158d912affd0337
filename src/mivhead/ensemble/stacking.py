"""Stacking: the weights of the ensemble's members, fitted on out-of-fold predictions.

The members are the blocks of the head and the ridge experts. Weights that are fitted on images
which the members were trained on would favour the members that overfit, so every member predicts
each support image without having seen it: the head by 2-fold cross-validation, the experts by
leave-one-out, which is cheap for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.ensemble.descriptors import mean_vectors
from mivhead.ensemble.ridge import Experts, expected_shapes, prior_weights
from mivhead.features import Block, Features, SupportSet
from mivhead.head.blocks import BlockConfig
from mivhead.head.cap import Bags
from mivhead.head.head import MIVHead
from mivhead.head.recipe import Recipe
from mivhead.head.training import fit_head

FOLDS = 2
BATCH = 64  # query images pooled at once
# Strength of the prior weights against m out-of-fold predictions: (ENOUGH / m)^2, at least WEAK.
WEAK, ENOUGH = 0.1, 15
SMALLEST = 0.001  # part of its prior weight that a member keeps, even if all members seem to harm
BLOCK, DEEPEST_BLOCK = 0.5, 1.0  # prior weights of the head's blocks
ONE_SHOT_BLOCKS = 0.4  # factor of them, if every class has one shot
ONE_SHOT_SCALE, ONE_SHOT_POWER = 1.34, 0.41  # of all prior weights, if every class has one shot
WEIGHT_FOLDS = 10  # in which images are left out of stacking to estimate the accuracy
WEIGHTS = "weights"  # their name in a model file


def assign_folds(support: SupportSet) -> NDArray[np.int64]:
    """Assign the images of each class to folds; -1 for the only image of a class.

    Images are ranked by their content, so that their order does not matter.
    """
    block = support.features.blocks[-1]
    values = block.token if block.token is not None else block.map
    assert values is not None
    key = values.flatten(1).float().square().sum(dim=1).numpy(force=True)  # (image,)
    shots = np.asarray(support.shots)
    rank = np.empty(len(key), np.int64)
    rank[np.lexsort((key, support.labels))] = np.concatenate([np.arange(s) for s in shots])
    return np.where(shots[support.labels] > 1, rank % FOLDS, -1)


def out_of_fold_cosines(
    support: SupportSet,
    blocks: Sequence[BlockConfig],
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int], None] | None = None,
    on_fold: Callable[[int, MIVHead, SupportSet, Tensor], None] | None = None,
    fold: NDArray[np.int64] | None = None,
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Predict support images with heads that were trained on the other folds.

    A head sees neither the images of its own fold nor their views. The only image of a class is in
    every training set, because nothing could stand for the class.

    Parameters
    ----------
    support : SupportSet
        Images and their views.
    blocks, recipe, seed, on_step
        As for `mivhead.head.training.fit_head`.
    on_fold : callable or None, default=None
        Called with the number of each fold, the head that was trained without it, what that head
        was trained on, and its cosines (block, image, class) of the fold.
    fold : array of int or None, default=None
        The fold of each image, -1 for those that are in every training set; None: as
        `assign_folds` returns them.

    Returns
    -------
    cosines : Tensor
        (block, image, class); 0 for images without a prediction.
    predicted : array of bool
        Which images have a prediction.
    """
    fold = assign_folds(support) if fold is None else fold
    found: Tensor | None = None
    for number in np.unique(fold[fold >= 0]).tolist():
        kept = support.take(fold != number)
        head, _ = fit_head(kept, blocks, recipe, seed, on_step)
        rows = np.flatnonzero(fold == number)
        bags = Bags.from_shots(kept.shots, support.features.device)
        cosines = predict_cosines(head, kept.features, bags, support.features[rows])
        if found is None:
            found = cosines.new_zeros(len(cosines), len(fold), cosines.shape[2])
        found[:, rows] = cosines
        if on_fold is not None:
            on_fold(number, head, kept, cosines)
    if found is None:
        found = torch.zeros(0, len(fold), len(support.shots))
    return found, fold >= 0


@torch.inference_mode()
def predict_cosines(head: MIVHead, shots: Features, bags: Bags, queries: Features) -> Tensor:
    """Cosines (block, query, class) of queries with the bags of a support set, in batches."""
    support = head.embed(head.prepare(shots))
    parts = []
    for start in range(0, len(queries), BATCH):
        batch = head.embed(head.prepare(queries[start : start + BATCH]))
        parts.append(head.compare(batch, support, bags))
    return torch.cat(parts, dim=1)


def fit_weights(
    predictions: Tensor, labels: Tensor, prior: Tensor, strength: float | None = None
) -> Tensor:
    """Fit the weights of a sum of predictions that is read as logits; all are positive.

    They minimise the cross-entropy of out-of-fold predictions plus a penalty on the distance from
    the prior, so that they stay close to it if there are few images. As the sum is fitted to images
    that no member has seen, its probabilities are calibrated too.

    The fewer images, the stronger the penalty, beyond its share in the sum: with two shots per
    class, members are judged by what one shot taught them (docs/results/few-shots.md).

    Parameters
    ----------
    predictions : Tensor
        Out-of-fold predictions of each member: (member, image, class).
    labels : Tensor
        Class numbers of the images.
    prior : Tensor
        Weights (member,) without any evidence.
    strength : float or None, default=None
        Strength of the penalty; None: (15 / m)^2 for m images, but at least 0.1.

    Returns
    -------
    Tensor
        Weights (member,).

    References
    ----------
    Wolpert 1992, "Stacked Generalization", Neural Networks 5.

    Examples
    --------
    >>> right, wrong = torch.eye(2), 1 - torch.eye(2)
    >>> predictions = torch.stack([right, wrong]).repeat_interleave(20, dim=1)
    >>> labels = torch.arange(2).repeat_interleave(20)
    >>> fit_weights(predictions, labels, torch.ones(2)).gt(1).tolist()
    [True, False]
    """
    from scipy.optimize import minimize

    if not len(labels):
        return prior
    if strength is None:
        strength = max(WEAK, (ENOUGH / len(labels)) ** 2)
    z = predictions.double().numpy(force=True)
    y, before = labels.numpy(force=True), prior.double().numpy(force=True)
    images, unit = np.arange(len(y)), before.mean()

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits = np.tensordot(weights, z, axes=1)  # (image, class)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        moved = (weights - before) / unit
        expected = np.einsum("vnc,nc->v", z, np.exp(log_p))  # prediction under the probabilities
        slope = expected - z[:, images, y].sum(axis=1) + 2 * strength * moved / unit
        return strength * (moved**2).sum() - log_p[images, y].sum(), slope

    bounds = [(SMALLEST * weight, None) for weight in before]
    found = minimize(loss, before, jac=True, method="L-BFGS-B", bounds=bounds)
    return torch.as_tensor(found.x).to(prior)


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions of support images that no member was trained on.

    Parameters
    ----------
    rows : array of shape (image,)
        Which support images.
    labels : Tensor
        Their class numbers (image,).
    members : Tensor
        Predictions of each member: (member, image, class).
    prior : Tensor
        The weights (member,) that stacking started from.
    logits : array of shape (image, class)
        The sum of the members with the fitted weights.
    """

    rows: NDArray[np.int64]
    labels: Tensor
    members: Tensor
    prior: Tensor
    logits: NDArray[np.float32]

    def cross_fitted(self) -> NDArray[np.float32]:
        """Logits (image, class) with weights that were fitted without the image, too.

        Unlike `logits`, they tell how good the model is on new images.
        """
        fold = np.arange(len(self.rows)) % WEIGHT_FOLDS
        logits = np.empty_like(self.logits)
        for number in range(min(WEIGHT_FOLDS, len(fold))):
            out, kept = (
                torch.as_tensor(np.flatnonzero(x)) for x in (fold == number, fold != number)
            )
            weights = fit_weights(self.members[:, kept], self.labels[kept], self.prior)
            logits[out] = weigh(weights, self.members[:, out]).numpy(force=True)
        return logits


def one_shot_scale(features: Features, labels: Tensor) -> float:
    """Return the factor of the prior weights that calibrates one-shot tasks; 1 for other tasks.

    With one shot per class there is nothing to fit it on. The more alike the shots of different
    classes are, the less their differences say about new images: the factor falls with the mean
    similarity of a shot to the nearest other one. Both constants minimise the cross-entropy on
    one-shot tasks of the tuning sets (docs/results/open-set.md).

    >>> apart = Features(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
    >>> alike = Features(torch.tensor([[1.0, 0.9, 0, 0], [0.9, 1.0, 0, 0]]))
    >>> labels = torch.tensor([0, 1])
    >>> one_shot_scale(apart, labels) > 1 > one_shot_scale(alike, labels)
    True
    """
    if int(torch.bincount(labels).max()) > 1:
        return 1.0
    vectors = mean_vectors(features.blocks[-1]).double()
    similarity = (vectors @ vectors.T).fill_diagonal_(-1)
    distance = 1 - float(similarity.max(dim=1).values.mean())
    return float(ONE_SHOT_SCALE * max(distance, 0.01) ** ONE_SHOT_POWER)


def is_one_shot(experts: Experts, labels: Tensor) -> bool:
    """Whether the weights of one-shot tasks apply: they are for features with maps."""
    second_order = any(expert.kind == "second_order" for expert in experts.ridges)
    return second_order and int(torch.bincount(labels).max()) == 1


@dataclass(frozen=True, eq=False)
class Ensemble:
    """The ridge experts, and the weights of all members: the head's blocks, then the experts."""

    experts: Experts
    weights: Tensor  # (member,)
    left_out: OutOfFold | None = None  # what the weights were fitted on; not in a model file

    @classmethod
    def fit(
        cls,
        features: Features,
        labels: Tensor,
        taken: Sequence[int],
        out_of_fold: tuple[Tensor, NDArray[np.bool_]] | None,
        spans: Sequence[range] = (),
    ) -> Self:
        """Fit the experts and the weights.

        Parameters
        ----------
        features, labels : Features, Tensor
            The support set.
        taken : sequence of int
            The blocks of the features that the head uses.
        out_of_fold : tuple or None
            The result of `out_of_fold_cosines`; None keeps the prior weights.
        spans : sequence of range, default=()
            The blocks of each backbone, if there are several.
        """
        experts, predictions = Experts.fit(features, labels, int(labels.max()) + 1, spans)
        spans = spans or [range(len(features.blocks))]
        deepest = {max((i for i in taken if i in span), default=None) for span in spans}
        of_blocks = torch.tensor([DEEPEST_BLOCK if i in deepest else BLOCK for i in taken])
        one_shot = is_one_shot(experts, labels)
        if one_shot:
            of_blocks *= ONE_SHOT_BLOCKS
        of_experts = prior_weights(list(experts.ridges), spans, one_shot=one_shot)
        prior = torch.cat([of_blocks / len(spans), of_experts]).to(predictions)
        if out_of_fold is None:
            return cls(experts, prior * one_shot_scale(features, labels))
        cosines, predicted = out_of_fold
        rows = torch.as_tensor(np.flatnonzero(predicted), device=labels.device)
        members = torch.cat([cosines, predictions])[:, rows]  # (member, image, class)
        weights = fit_weights(members, labels[rows], prior)
        logits = weigh(weights, members).numpy(force=True)
        left_out = OutOfFold(rows.numpy(force=True), labels[rows], members, prior, logits)
        return cls(experts, weights, left_out)

    def logits(self, cosines: Tensor, features: Features) -> Tensor:
        """Logits (image, class) from the head's cosines (block, image, class) and the experts."""
        predictions = torch.cat([cosines, self.experts(features)])  # (member, image, class)
        return weigh(self.weights, predictions)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a model file, by name."""
        return {WEIGHTS: self.weights} | self.experts.tensors()

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], blocks: Sequence[Block], spans: Sequence[range] = ()
    ) -> Self:
        """Make an ensemble from the tensors of a model file, checked against `expected_shapes`."""
        return cls(Experts.from_tensors(tensors, blocks, spans), tensors[WEIGHTS])

    @staticmethod
    def expected_shapes(
        blocks: Sequence[Block], head_blocks: int, classes: int, spans: Sequence[range] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `tensors`."""
        shapes = expected_shapes(blocks, classes, spans)
        experts = sum(name.endswith(".intercepts") for name in shapes)
        return {WEIGHTS: (head_blocks + experts,), **shapes}


def weigh(weights: Tensor, predictions: Tensor) -> Tensor:
    """Logits (image, class): the weighted sum of predictions (member, image, class)."""
    return (weights[:, None, None] * predictions).sum(dim=0)
