"""`MIVClassifier`: scikit-learn's face of the MIV-head and its ridge experts.

Features from a backbone, a file or a database go in; class labels and probabilities come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead._util.arrays import softmax
from mivhead._util.estimator import Estimator, check_fitted, random_seed, read_table
from mivhead._util.schema import check_tensors, from_json, split_tensors, to_json
from mivhead._util.text import progress_bar
from mivhead._util.threads import shared_cores
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.decision import MAX_ERRORS, REJECT, DecisionRule
from mivhead.ensemble.constants import FOLDS
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.ensemble.stacking import (
    OFFSETS,
    Ensemble,
    assign_folds,
    few_shots_scale,
    fold_numbers,
    out_of_fold_cosines,
    weigh,
)
from mivhead.ensemble.unlabelled import UnlabelledUse, refine
from mivhead.errors import InputError
from mivhead.features import Block, Features, SupportSet, is_array
from mivhead.head.components import Head, bag_starts
from mivhead.head.formulas import Projected, combine
from mivhead.head.recipe import DEFAULT_RECIPE, BlockConfig, Recipe, resolve_blocks, resolve_recipe
from mivhead.head.train import Trained, Trainer
from mivhead.prediction import Prediction, predictions

Array = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]

PREDICTED = 256  # images at once in prediction
MAX_SHOTS = 2**31  # per class in a file


class MIVClassifier(Estimator):
    """The MIV-head: a few-shot classifier on features of a frozen backbone.

    Parameters
    ----------
    recipe : {"mivhead", "experts", "paper"} or Recipe, default="mivhead"
        How the head is trained and combined. `"mivhead"` is `Recipe()`: the head and ridge
        experts, weighted by stacking; it is more accurate and faster than `"paper"`, which is
        `Recipe.paper()`, the head as published. `"experts"` leaves the head out: everything has a
        closed form. To change one value, pass a recipe, such as `Recipe(eta=0.2)`.
    preset : Preset, list of BlockPreset, dict or None, default=None
        The settings that belong to the backbone. None derives them from the shapes of the
        features; a dict such as `{"tau": 100.0}` replaces fields of each derived `BlockPreset`.
    random_state : int, RandomState instance or None, default=None
        Seed of the initial weights. The same seed gives the same model, bit for bit.
    verbose : bool, default=False
        Whether to show a progress bar, if training takes more than two seconds.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The class labels, sorted.
    layout_ : dict
        Per-image shape of every part of the features.
    seed_ : int
        The random seed that `random_state` gave.
    losses_ : list of float
        Training loss of every step. A loaded model has none.
    head_ : Head
        The trained head.
    ensemble_ : Ensemble or None
        The ridge experts and the weights of all members; None for a recipe without experts.
    support_ : Features
        Features of the support images, ordered by class. They are part of the model; with the
        recipe `"experts"`, there are none.
    shots_ : ndarray of shape (n_classes,)
        Number of support images per class.
    blocks_ : tuple of BlockConfig
        How each block of the features is treated.
    decision_ : DecisionRule
        When to say "unsure" or "none of these".
    unlabelled_ : UnlabelledUse or None
        What the fit made of unlabelled images; None if there were none.

    References
    ----------
    Xu, Frank and Holmes, "Few-shot Classification as Multi-instance Verification: Effective
    Backbone-agnostic Transfer across Domains".

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from mivhead import MIVClassifier, Recipe
    >>> X, y = load_digits(return_X_y=True)
    >>> classifier = MIVClassifier(random_state=0).fit(X[:100], y[:100])
    >>> bool(classifier.score(X[100:], y[100:]) > 0.75)
    True
    >>> paper = MIVClassifier(Recipe.paper(steps=10), random_state=0).fit(X[:100], y[:100])
    >>> len(paper.losses_)
    10
    """

    classes_: NDArray[Any]
    layout_: dict[str, tuple[int, ...]]
    decision_: DecisionRule
    unlabelled_: UnlabelledUse | None = None

    def __init__(
        self,
        recipe: str | Recipe = DEFAULT_RECIPE,
        preset: Preset | Sequence[BlockPreset] | Mapping[str, Any] | None = None,
        *,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.preset = preset
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        *,
        views: Any = None,
        view_of: ArrayLike | None = None,
        unlabelled: Any = None,
        class_vectors: ArrayLike | Mapping[Any, ArrayLike] | None = None,
    ) -> Self:
        """Fit to a support set.

        Parameters
        ----------
        X : Features, array-like of shape (n_images, n_values) or list of blocks
            Features of the support images.
        y : array-like of shape (n_images,)
            Class labels of any type. There must be at least two classes.
        views : Features or list of blocks, default=None
            Features of augmented views.
        view_of : array-like of int, default=None
            For each view, the row of X that it was made from.
        unlabelled : Features, array-like or list of blocks, default=None
            Features of images without labels, to learn from as well. They should look like the
            images to predict; some may show none of the classes.
        class_vectors : array of shape (n_classes, n_channels), mapping or None, default=None
            A vector for each class, such as a text embedding of its name, in the space of the
            vectors in the last block of X: as an array in the order of the sorted labels, or by
            label. Vectors that do not make predictions of left-out shots better are not used.
        """
        features = self.as_features(X, reset=True)
        support = SupportSet.read(features, y, views, view_of, unlabelled, class_vectors)
        return self.fit_support(support)

    @shared_cores()
    def fit_support(self, support: SupportSet, seed: int | None = None) -> Self:
        """Fit to a checked support set; without a seed, with the one that `random_state` gives."""
        recipe = resolve_recipe(self.recipe)
        if not recipe.has_experts and not (
            support.unlabelled is None and support.class_vectors is None
        ):
            raise InputError(
                "A recipe without ridge experts cannot learn from unlabelled images or class "
                "vectors: use the default recipe, or omit them."
            )
        self.seed_ = random_seed(self.random_state) if seed is None else seed
        blocks, support = self._prepare(support, recipe)
        stacked = recipe.has_experts and max(support.shots) > 1
        steps = recipe.steps * (1 + FOLDS * stacked) * recipe.has_head
        with progress_bar("training", steps, show=self.verbose, unit="step") as advance:
            trainer = self._trainer(support, blocks, recipe, self.seed_, advance)
            fold = assign_folds(support) if stacked else np.full(len(support.labels), -1)
            parts = [fold != number for number in fold_numbers(fold)]
            (fitted, *folds) = trainer.fit([None, *parts], keep=support.unlabelled is not None)
        head, self.losses_ = fitted.head, fitted.losses
        ensemble, self.unlabelled_ = None, None
        if recipe.has_experts:
            cosines = out_of_fold_cosines(folds, fold, len(head.taken), len(support.shots))
            ensemble = Ensemble.fit(
                support.features,
                support.labels,
                head.taken,
                (cosines, fold) if stacked else None,
                names=support.class_vectors,
            )
            if support.unlabelled is not None:
                ensemble, self.unlabelled_ = _refine(ensemble, support, head, folds, fold, cosines)
        stored = support.features if recipe.has_head else support.features[:0]
        self._set_fitted(blocks, head, ensemble, stored, support.shots)
        self.embedded_ = head.embed(stored)  # now: `predict` must change nothing
        self.decision_ = self._make_rule(support)
        return self

    def _prepare(
        self, support: SupportSet, recipe: Recipe
    ) -> tuple[Sequence[BlockConfig], SupportSet]:
        """Remember classes and layout; return the blocks, and the support that a recipe uses."""
        features = support.features
        self.classes_, self.layout_ = support.classes, features.layout
        self.n_features_in_ = features.shape[1]
        if not recipe.use_views:
            support = replace(support, views=None, view_rows=support.view_rows[:0])
        return resolve_blocks(features, self.preset), support

    def _trainer(
        self,
        support: SupportSet,
        blocks: Sequence[BlockConfig],
        recipe: Recipe,
        seed: int,
        on_step: Callable[[float], object],
    ) -> Trainer:
        """Make what trains heads."""
        return Trainer(support, blocks, recipe, seed, on_step)

    def _make_rule(self, support: SupportSet) -> DecisionRule:
        """Make the decision rule; by distances alone, if no shot was left out."""
        vectors, labels = mean_vectors(support.features.blocks[-1]), support.labels
        ensemble = self.ensemble_
        if ensemble is None:
            return DecisionRule.fit(vectors, labels, calibrated=False)
        if (left_out := ensemble.left_out) is not None:
            logits = weigh(left_out.weights, left_out.members)
            return DecisionRule.fit(vectors, labels, logits, left_out.rows)
        return DecisionRule.fit(vectors, labels)

    def _set_fitted(
        self,
        blocks: Sequence[BlockConfig],
        head: Head,
        ensemble: Ensemble | None,
        support: Features,
        shots: Sequence[int],
    ) -> None:
        """Store what was learned, and what prediction needs of the support."""
        self.blocks_ = tuple(blocks)
        self.head_, self.ensemble_, self.support_ = head, ensemble, support
        self.shots_ = np.asarray(shots)
        self.starts_ = bag_starts(self.shots_)
        self.__dict__.pop("embedded_", None)

    @cached_property
    def embedded_(self) -> list[Projected]:
        """What Component 2 needs of the shots, computed with the first prediction."""
        return self.head_.embed(self.support_)

    def unfitted(self) -> Self:
        """Return a copy that fits as this classifier was fitted, even if it comes from a file."""
        fields = vars(BlockPreset()).keys() & vars(self.blocks_[0]).keys() - {"candidates"}
        presets = [BlockPreset(**{name: getattr(b, name) for name in fields}) for b in self.blocks_]
        return type(self)(**{**self.get_params(), "preset": tuple(presets)})

    @shared_cores()
    def cross_validated_logits(
        self, support: SupportSet, fold: NDArray[np.int64]
    ) -> NDArray[np.floating[Any]]:
        """Cross-validate a recipe that stacks, without fitting everything once per fold.

        One head per fold is trained on the other folds. What the ridge experts would predict
        without a fold has a closed form, and the weights of all members are fitted without the
        images they are tested on. Returns logits (image, class) of the images that have a fold,
        not -1, in their order. The classifier must not be used afterwards.
        """
        recipe = resolve_recipe(self.recipe)
        blocks, support = self._prepare(support, recipe)
        seed = random_seed(self.random_state)
        trainer = self._trainer(support, blocks, recipe, seed, lambda _: None)
        trained = trainer.fit([fold != number for number in fold_numbers(fold)], keep=False)
        cosines = out_of_fold_cosines(trained, fold, len(trainer.taken), len(support.shots))
        ensemble = Ensemble.fit(
            support.features,
            support.labels,
            trainer.taken,
            (cosines, fold),
            together=True,
            names=support.class_vectors,
        )
        assert ensemble.left_out is not None
        return ensemble.left_out.cross_fitted() * few_shots_scale(np.asarray(support.shots))

    @shared_cores()
    def logits(self, X: Any) -> NDArray[Any]:
        """Compute the logits of all classes: one column per class, even for two classes."""
        check_fitted(self, "classes_")
        features = self.as_features(X)
        logits_of_parts = []
        # Some images at a time, so that memory does not grow with their number.
        for start in range(0, max(1, len(features)), PREDICTED):
            part = features[start : start + PREDICTED]
            with np.errstate(all="ignore"):  # what comes of it is checked
                cosines = self.cosines(part)  # (block, image, class)
                if self.ensemble_ is None:
                    logits_of_parts.append(combine(cosines, self.head_.recipe))
                else:
                    logits_of_parts.append(self.ensemble_.logits(cosines, part))
        logits = np.concatenate(logits_of_parts)
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            raise InputError(
                f"The logits of image {int(finite.argmin())} are not finite: its features "
                "are far larger than those that the classifier was fitted on, or the classifier "
                "comes from a file with unusable values."
            )
        return logits

    def cosines(self, features: Features) -> Array:
        """Cosines (block, image, class) of the head."""
        return self.head_.cosines(self.embedded_, self.starts_, features)

    def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
        """Compute the logits (image, class); for two classes (image,), the second minus the first.

        X is as for `fit`.
        """
        # In double precision like probabilities, so that both order images alike.
        logits = self.logits(X).astype(np.float64)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> NDArray[np.floating[Any]]:
        """Compute class probabilities (image, class), in the order of `classes_`.

        X is as for `fit`.
        """
        return softmax(self.logits(X).astype(np.float64))

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the most probable class of each image; X is as for `fit`.

        This never says "none of these", even of an image that is unlike all shots: use `classify`.
        """
        best = self.logits(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    @shared_cores()
    def score_unknown(self, X: Any) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
        """Compute class probabilities (image, class), and how unlike the shots each image is."""
        check_fitted(self, "classes_")
        features = self.as_features(X)
        logits = self.logits(features).astype(np.float64)
        vectors = mean_vectors(features.blocks[-1])
        return softmax(logits), self.decision_.unknown(logits, vectors)

    def classify(
        self,
        X: Any,
        *,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
    ) -> list[Prediction]:
        """Predict names and probabilities, and decide whether a name can be given.

        X is as for `fit`, the other parameters are as for `FewShotClassifier.classify`.
        """
        check_fitted(self, "classes_")
        thresholds = self.decision_.calibration.thresholds(reject, max_errors)
        probabilities, unknown = self.score_unknown(X)
        ids = [str(row) for row in range(len(probabilities))]
        return predictions(ids, self.classes_, probabilities, unknown, thresholds)

    def as_features(self, X: Any, *, reset: bool = False) -> Features:
        """Convert to `Features`; unless `reset`, the layout must be that of the fit."""
        if isinstance(X, Features) or _is_blocks(X):
            features = Features(X)
        else:  # a table, which is checked as scikit-learn does
            features = Features(read_table(self, X, reset=reset))
        if not reset and features.layout != self.layout_:
            raise InputError(
                "X has other blocks or channels than the features that the classifier was fitted "
                f"on: got {features.layout}, expected {self.layout_}."
            )
        return features

    # The model file (`mivhead.model.file`) holds a JSON document and tensors of the classifier.

    def state(self) -> tuple[dict[str, Any], Tensors]:
        """Return what was learned: a JSON document and arrays."""
        document = {
            "recipe": to_json(self.head_.recipe),
            "config": {
                "blocks": [to_json(block) for block in self.blocks_],
                "shots": self.shots_.tolist(),
            },
        }
        tensors = {f"support.{name}": tensor for name, tensor in self.support_.tensors.items()}
        tensors |= {f"params.{name}": value for name, value in self.head_.params.items()}
        if self.ensemble_ is not None:
            members = self.ensemble_.tensors()
            tensors |= {f"experts.{name}": value for name, value in members.items()}
        return document, tensors

    @classmethod
    def from_state(
        cls,
        recipe: Mapping[str, Any],
        config: Mapping[str, Any],
        tensors: Mapping[str, NDArray[Any]],
        classes: NDArray[Any],
        seed: int,
    ) -> Self:
        """Make a classifier from what `state` returned, checking everything."""
        how, saved = from_json(Recipe, recipe, "recipe"), from_json(_Config, config, "config")
        blocks, shots = saved.blocks, saved.shots
        stored, params, members = split_tensors(tensors, ("support", "params", "experts"))
        support = Features.from_tensors(stored)
        layout = {f"block{i}.{k}": v for i, b in enumerate(blocks) for k, v in b.layout.items()}
        kept = sum(shots) if how.has_head else 0
        if support.layout != layout or len(support) != kept:
            raise InputError(f"the features {support} do not fit the blocks and {kept} shots.")
        if len(shots) != len(classes) or not all(1 <= count < MAX_SHOTS for count in shots):
            raise InputError(f"shots {shots} do not fit {len(classes)} classes.")
        head = Head.from_params(blocks, how, params)
        shapes: dict[str, tuple[int, ...]] = {}
        if how.has_experts:
            sizes = len(head.layers), len(classes)
            shapes = Ensemble.expected_shapes(support.blocks, *sizes, balanced=OFFSETS in members)
        check_tensors(members, shapes)
        ensemble = Ensemble.from_tensors(members, support.blocks) if shapes else None
        made = cls(how)
        made.classes_, made.seed_ = classes, seed
        made.layout_, made.n_features_in_ = support.layout, support.shape[1]
        made._set_fitted(blocks, head, ensemble, support, shots)
        return made


@dataclass(frozen=True)
class _Config:
    """What a model file says about a classifier, besides its recipe."""

    blocks: tuple[BlockConfig, ...]
    shots: tuple[int, ...]


def _is_blocks(X: Any) -> bool:
    """Whether X is a list of blocks, a block or an array of patches, not a 2-D table."""
    if isinstance(X, Block) or (isinstance(X, Mapping) and not hasattr(X, "shape")):
        return True
    if is_array(X):
        return X.ndim in (3, 4)
    if not isinstance(X, list | tuple) or not X:
        return False
    return isinstance(X[0], Mapping | Block) or getattr(X[0], "ndim", 0) >= 2


def _refine(
    ensemble: Ensemble,
    support: SupportSet,
    head: Head,
    folds: Sequence[Trained],
    fold: NDArray[np.int64],
    cosines: Array,
) -> tuple[Ensemble, UnlabelledUse]:
    """Fit the experts once more, with unlabelled images, if that does not harm left-out shots."""
    assert support.unlabelled is not None

    def compare(head: Head, support: SupportSet, images: Features) -> Array:
        shots = head.embed(support.features)
        return head.cosines(shots, bag_starts(support.shots), images)

    of_folds = {
        number: (
            cosines[:, fold == number],
            compare(part.head, support.take(fold != number), support.unlabelled),
        )
        for number, part in zip(fold_numbers(fold), folds, strict=True)
    }
    of_unlabelled = compare(head, support, support.unlabelled)
    shots = support.features, support.labels
    return refine(ensemble, *shots, support.unlabelled, of_unlabelled, fold, of_folds)
