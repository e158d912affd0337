"""scikit-learn classifiers on features: their common base, and the MIV-head.

Features from a backbone, a file or a database go in; class labels and probabilities come out.
`FeatureClassifier` implements scikit-learn's conventions for every method on features
(the rivals are in `mivhead.methods`), `MIVClassifier` is the MIV-head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead._util.estimator import Estimator, check_fitted, random_seed, read_table
from mivhead._util.progress import progress_bar
from mivhead._util.schema import check_tensors, from_json, split_tensors, to_json
from mivhead._util.threads import shared_cores
from mivhead.backbones.classes import recognise
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.engine.head import Bags, Head, Projected, combine, taken_blocks
from mivhead.engine.training import Trainer
from mivhead.ensemble.balance import UNIFORM, Prior, is_uniform, log_prior
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.ensemble.names import Names, compared, names_of
from mivhead.ensemble.stacking import (
    FOLDS,
    OFFSETS,
    WEIGHTS,
    Ensemble,
    assign_folds,
    fold_numbers,
    is_one_shot,
    out_of_fold_cosines,
)
from mivhead.ensemble.unlabelled import UnlabelledUse, refine
from mivhead.errors import InputError
from mivhead.features import (
    Block,
    Features,
    blocks_of,
    is_array,
    layout_to_json,
    mean_patches,
    read_layout,
)
from mivhead.head.blocks import BlockConfig, resolve_blocks, spans_of
from mivhead.head.recipe import DEFAULT_RECIPE, Recipe, resolve_recipe
from mivhead.model.decision import ENERGY, MAX_ERRORS, REJECT, DecisionRule, softmax
from mivhead.model.prediction import predictions
from mivhead.support import SupportSet

if TYPE_CHECKING:
    from mivhead.head.training import DeviceTrainer

Array = NDArray[np.float32]

# Factor of the energy in the scores of one-shot models: their weights, and so their energies, are
# 1.4 times as large as those of other models (tuning sets).
ONE_SHOT_ENERGY = 0.72
PREDICTED = 256  # images at once in prediction
MAX_SHOTS = 2**31  # per class in a file


class FeatureClassifier(Estimator):
    """Base of all classifiers on features.

    A subclass stores its parameters in `__init__`, `random_state` and `device` among them, and
    implements `_fit`, `_logits`, `_state` and `_restore`.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The class labels, sorted.
    n_features_in_ : int
        Number of values per image.
    layout_ : dict
        Per-image shape of every part of the features.
    seed_ : int
        The random seed that `random_state` gave.
    scale_ : tuple of int
        Per block, the power of two that features are divided by before anything is squared; 0 if
        the largest value is between 1e-12 and 1e12.
    decision_ : DecisionRule or None
        When to say "unsure" or "none of these"; None for a model file that has no such rule.
    """

    needs: ClassVar[str] = "features"
    decision_: DecisionRule | None = None
    unlabelled_: UnlabelledUse | None = None
    random_state: int | np.random.RandomState | None
    device: str | None
    classes_: NDArray[Any]
    layout_: dict[str, tuple[int, ...]]
    scale_: tuple[int, ...] = ()

    def _check_params(self) -> None:
        """Raise an `InputError` for invalid hyperparameters; called before images are decoded."""
        return

    @abstractmethod
    def _fit(self, support: SupportSet, seed: int) -> None:
        """Learn from a checked support set."""

    @abstractmethod
    def _logits(self, features: Features) -> NDArray[Any]:
        """Logits (image, class) of features of the right layout."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the fitted state for a model file: a JSON document and arrays."""

    @abstractmethod
    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        """Set the fitted state from what `_state` returned, checking everything."""

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
            images to predict; some may show none of the classes. Only for `MIVClassifier` with
            ridge experts, as in the default recipe.
        class_vectors : array of shape (n_classes, n_channels), mapping or None, default=None
            A vector for each class, such as a text embedding of its name, in the space of the
            vectors in the last block of X: as an array in the order of the sorted labels, or by
            label. A label that is not in y becomes a class without shots. Vectors that do not make
            predictions of left-out shots better are not used, unless there are such classes. Only
            for `MIVClassifier` with ridge experts.

        Returns
        -------
        self : object
            The fitted classifier.
        """
        if isinstance(class_vectors, Mapping) and is_array(X) and not len(X):
            X = Features(X)  # no shots, and scikit-learn's checks ask for some
        features = self._read_features(X, reset=True)
        support = SupportSet.read(features, y, views, view_of, unlabelled, class_vectors)
        return self.fit_support(support)

    def fit_support(self, support: SupportSet, seed: int | None = None) -> Self:
        """Fit to a checked support set.

        Parameters
        ----------
        support : SupportSet
            What `SupportSet.read` makes of the arguments of `fit`.
        seed : int or None, default=None
            The random seed; None: the one that `random_state` gives.

        Returns
        -------
        self : object
            The fitted classifier.
        """
        given = {"unlabelled images": support.unlabelled, "class vectors": support.class_vectors}
        for what, value in given.items():
            if value is not None and not self.has_ensemble:
                raise InputError(
                    f"{type(self).__name__} cannot learn from {what} with these settings: "
                    "use the method miv with its default recipe, or omit them."
                )
        self.seed_ = random_seed(self.random_state) if seed is None else seed
        support = self._scaled(support)
        with shared_cores():
            self._fit(support, self.seed_)
        self.decision_ = self._make_rule(support)
        return self

    def _scaled(self, support: SupportSet) -> SupportSet:
        """Remember the classes and the layout; return values that are safe to square."""
        features = support.features
        self.classes_, self.layout_ = support.classes, features.layout
        self.n_features_in_, self.scale_ = features.shape[1], features.exponents
        return support.divide(self.scale_)

    @property
    def has_ensemble(self) -> bool:
        """Whether `fit` takes unlabelled images and class vectors."""
        return False

    def refitted(self, support: SupportSet, **params: Any) -> Self:
        """Fit a copy to another support set, with the same settings and the same random seed.

        Unlike a clone, a copy of a classifier from a model file has its settings for each block.

        Parameters
        ----------
        support : SupportSet
            What to fit to.
        **params : dict
            Parameters that are other ones.

        Returns
        -------
        FeatureClassifier
            A new classifier; this one stays as it is.
        """
        check_fitted(self, "classes_")
        return self._unfitted().set_params(**params).fit_support(support, self.seed_)

    def renamed(self, old: Any, new: Any) -> Self | None:  # noqa: ARG002  # for subclasses
        """Return a copy with another name for a class, and with everything that was learned.

        Parameters
        ----------
        old, new : object
            A class, and a name that no other class has.

        Returns
        -------
        FeatureClassifier or None
            None if the classifier must be fitted again.
        """
        return None

    def _unfitted(self) -> Self:
        """Return a copy that fits as this classifier was fitted."""
        return self.copy_unfitted()

    @property
    def _stored_support(self) -> Features | None:
        """The features of the support images, if they are part of the fitted state."""
        return None

    @property
    def _view_blocks(self) -> list[int]:
        """The blocks of the features whose views matter."""
        return list(range(len(blocks_of(self.layout_))))

    def _make_rule(self, support: SupportSet) -> DecisionRule:
        """Make the decision rule after `_fit`: by distances alone, as no shot was left out."""
        vectors = _vectors(support.features)
        return DecisionRule.fit(vectors, support.labels, None, None, weight=0.0)

    def logits(self, X: Any) -> NDArray[Any]:
        """Compute the logits of all classes.

        Parameters
        ----------
        X : Features, array-like or list of blocks
            Features of the images.

        Returns
        -------
        ndarray of shape (n_images, n_classes)
            One column per class, even for two classes.

        Raises
        ------
        InputError
            If they are not finite, as for features that are much larger than those of the support
            set, or for a model from a forged file.
        """
        check_fitted(self, "classes_")
        with shared_cores():
            return self._finite_logits(self._as_features(X))

    def _finite_logits(self, features: Features) -> NDArray[Any]:
        with np.errstate(all="ignore"):  # what comes of it is checked
            logits = self._logits(features)
        finite = np.isfinite(logits.max(axis=1))  # a class may have probability 0
        if not finite.all():
            raise InputError(
                f"The logits of image {int(finite.argmin())} are not finite: its features "
                "are far larger than those that the classifier was fitted on, or the classifier "
                "comes from a file with unusable values."
            )
        return logits

    def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
        """Compute the logits in scikit-learn's convention.

        Parameters
        ----------
        X : Features, array-like or list of blocks
            Features of the images.

        Returns
        -------
        ndarray of shape (n_images, n_classes), or (n_images,) for two classes
            The logits; for two classes the second minus the first.
        """
        # In double precision like probabilities, so that both order images alike.
        logits = self.logits(X).astype(np.float64)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> NDArray[np.floating[Any]]:
        """Compute class probabilities.

        Parameters
        ----------
        X : Features, array-like or list of blocks
            Features of the images.

        Returns
        -------
        ndarray of shape (n_images, n_classes)
            Probabilities, in the order of `classes_`.
        """
        return softmax(self.logits(X).astype(np.float64))

    @overload
    def predict(self, X: Any, *, coverage: None = None) -> NDArray[Any]: ...

    @overload
    def predict(self, X: Any, *, coverage: float) -> list[tuple[Any, ...]]: ...

    def predict(
        self, X: Any, *, coverage: float | None = None
    ) -> NDArray[Any] | list[tuple[Any, ...]]:
        """Predict the most probable class of each image, or a set of classes.

        Parameters
        ----------
        X : Features, array-like or list of blocks
            Features of the images.
        coverage : float or None, default=None
            Predict sets, as small as possible, so that this share of them contains the true class.

        Returns
        -------
        ndarray of shape (n_images,), or list of tuple
            Class labels; or per image a set of them, the most probable first.
        """
        if coverage is None:
            best = self.logits(X).argmax(axis=1)
            chosen: NDArray[Any] = self.classes_[best]
            return chosen
        thresholds, probabilities = (
            self._rule().thresholds(coverage=coverage),
            self.predict_proba(X),
        )
        ids = [""] * len(probabilities)
        found = predictions(ids, self.classes_, probabilities, None, thresholds)
        return [each.prediction_set or () for each in found]

    def score_unknown(
        self, X: Any
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]:
        """Compute class probabilities, and how unlike the shots each image is.

        Parameters
        ----------
        X : Features, array-like or list of blocks
            Features of the images.

        Returns
        -------
        probabilities : ndarray of shape (n_images, n_classes)
            As `predict_proba` returns them.
        unknown : ndarray of shape (n_images,) or None
            Larger is more unlike; see `mivhead.model.decision`. None for a model without a rule.
        """
        check_fitted(self, "classes_")
        with shared_cores():
            features = self._as_features(X)
            logits = self._finite_logits(features).astype(np.float64)
            probabilities = softmax(logits)
            if self.decision_ is None:
                return probabilities, None
            return probabilities, self.decision_.unknown(logits, _vectors(features))

    def decide(
        self, X: Any, *, reject: float | None = REJECT, max_errors: float | None = MAX_ERRORS
    ) -> NDArray[Any]:
        """Predict a class, "unsure" or "none of these" for each image.

        Parameters
        ----------
        X : Features, array-like or list of blocks
            Features of the images.
        reject : float or None, default=0.1
            Share of the images of known classes that may be rejected as "none of these"; None or 0
            rejects none.
        max_errors : float or None, default=0.1
            Share of wrong classes among those that are given; for other images the decision is
            "unsure". None is never unsure.

        Returns
        -------
        ndarray of shape (n_images,), of objects
            Class labels, `"unsure"` or `"none of these"`.
        """
        thresholds = self._rule().thresholds(reject, max_errors)
        probabilities, unknown = self.score_unknown(X)
        assert unknown is not None, "there is a rule"
        ids = [""] * len(probabilities)
        found = predictions(ids, self.classes_, probabilities, unknown, thresholds)
        decisions = np.empty(len(found), object)
        decisions[:] = [each.decision for each in found]
        return decisions

    def _rule(self) -> DecisionRule:
        check_fitted(self, "classes_")
        if self.decision_ is None:
            raise InputError(
                "The model was saved by a version of mivhead that kept no out-of-fold scores, so "
                "there are no thresholds: fit it again."
            )
        return self.decision_

    def save(self, path: str | Path) -> None:
        """Write the classifier to one file, which `mivhead.load` reads.

        The file contains features of the support images: treat it like the images themselves.

        Parameters
        ----------
        path : str or Path
            The file to write.
        """
        from mivhead.model.file import save

        save(self, path)

    def _read_features(self, X: Any, *, reset: bool) -> Features:
        """Convert to `Features`; a table is checked as scikit-learn does."""
        if isinstance(X, Features) or _is_blocks(X):
            return Features(X)
        return Features(read_table(self, X, reset=reset))

    def _as_features(self, X: Any) -> Features:
        """Convert images to predict to `Features`, and check their layout."""
        features = self._read_features(X, reset=False)
        if features.layout != self.layout_:
            raise InputError(
                "X has other blocks or channels than the features that the classifier was fitted "
                f"on: got {features.layout}, expected {self.layout_}."
            )
        return features.divide(self.scale_)


def _vectors(features: Features) -> NDArray[np.floating[Any]]:
    """Mean vectors (image, channel) of the deepest block, of length 1, for decisions."""
    with np.errstate(all="ignore"):  # of features that are far too large
        return mean_vectors(features.blocks[-1])


def _is_blocks(X: Any) -> bool:
    """Whether X is a list of blocks, a block or an array of patches, not a 2-D table."""
    if isinstance(X, Block) or (isinstance(X, Mapping) and not hasattr(X, "shape")):
        return True
    if is_array(X):
        return X.ndim in (3, 4)
    if not isinstance(X, list | tuple) or not X:
        return False
    return isinstance(X[0], Mapping | Block) or getattr(X[0], "ndim", 0) >= 2


class MIVClassifier(FeatureClassifier):
    """The MIV-head: a few-shot classifier on features of a frozen backbone.

    Parameters
    ----------
    recipe : {"mivhead", "experts", "paper"} or Recipe, default="mivhead"
        How the head is trained and combined. `"mivhead"` is `Recipe()`: the head and ridge
        experts, weighted by stacking; it is more accurate and faster than `"paper"`, which is
        `Recipe.paper()`, the head as published. `"experts"` leaves the head out: everything has a
        closed form, and one mean vector of each shot is stored. To change one value, pass a recipe,
        such as `Recipe(eta=0.2)`.
    preset : Preset, list of BlockPreset, dict or None, default=None
        The settings that belong to the backbone. None derives them from the shapes of the
        features; a dict such as `{"tau": 100.0}` replaces fields of each derived `BlockPreset`.
    class_prior : {"uniform", "shots"}, mapping of class to frequency, or sequence of float, \
default="uniform"
        How frequent the classes are among new images: all alike, in proportion to their numbers of
        shots, or as given. Other priors than the uniform one need a recipe with ridge experts, as
        the default has.
    random_state : int, RandomState instance or None, default=None
        Seed of the initial weights. The same seed gives the same model, bit for bit.
    device : str or None, default=None
        Where to train and predict: None or `"cpu"`, or a device of PyTorch such as `"cuda"`, which
        needs the extra `torch`.
    verbose : bool, default=False
        Whether to show a progress bar, if training takes more than two seconds and the output is a
        terminal.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The class labels, sorted.
    n_features_in_ : int
        Number of values per image.
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
        Number of support images per class; 0 for a class that only has a vector.
    blocks_ : tuple of BlockConfig
        How each block of the features is treated.
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

    def __init__(
        self,
        recipe: str | Recipe = DEFAULT_RECIPE,
        preset: Preset | Sequence[BlockPreset] | Mapping[str, Any] | None = None,
        *,
        class_prior: Prior = UNIFORM,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.preset = preset
        self.class_prior = class_prior
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def _check_params(self) -> None:
        recipe = resolve_recipe(self.recipe)
        if not is_uniform(self.class_prior) and not recipe.has_experts:
            raise InputError(
                f"class_prior={self.class_prior!r:.80} needs a recipe with ridge experts, as the "
                'default recipe "mivhead": other recipes compare classes without a prior.'
            )

    def _as_features(self, X: Any) -> Features:
        return _last_blocks(super()._as_features(X), self.head_.recipe, self.blocks_)

    def _fit(self, support: SupportSet, seed: int) -> None:
        self._check_params()
        recipe, prior = resolve_recipe(self.recipe), None
        if not is_uniform(self.class_prior):
            if len(support.shots) < len(self.classes_):
                raise InputError(
                    "class_prior needs shots of every class, and some classes have only a name: "
                    "give the prior when you predict."
                )
            prior = log_prior(self.class_prior, self.classes_.tolist(), support.shots)
        blocks = resolve_blocks(support.features, self.preset)
        support = _select(support, recipe, blocks)
        blocks = blocks[-len(support.features.blocks) :]
        if len(support.shots) < 2:
            self._fit_names(support, blocks, recipe)
            return
        stacked = recipe.stacks and max(support.shots) > 1
        steps = recipe.steps * (1 + FOLDS * stacked) * recipe.has_head
        with progress_bar("training", steps, show=self.verbose, unit="step") as advance:
            trainer = self._trainer(support, blocks, recipe, seed, advance)
            fold = assign_folds(support) if stacked else np.full(len(support.labels), -1)
            numbers = fold_numbers(fold)
            parts = [fold != number for number in numbers]
            (fitted, *folds) = trainer.fit([None, *parts], keep=support.unlabelled is not None)
        head, self.losses_ = fitted.head, fitted.losses
        ensemble, self.unlabelled_ = None, None
        if recipe.has_experts:
            heads = [each.head for each in folds]
            cosines = out_of_fold_cosines(trainer, folds, fold)
            out_of_fold = (cosines, fold) if stacked else None
            ensemble = Ensemble.fit(
                support.features,
                support.labels,
                head.taken,
                out_of_fold,
                spans_of(blocks),
                names=support.class_vectors,
                recognised=self._recognised(support, blocks),
            )
            if ensemble.names is not None and len(ensemble.names.unseen) and out_of_fold is None:
                shots = _compare(head, support, support.features)
                ensemble = ensemble.fit_unseen(shots, support.features, support.labels)
            if support.unlabelled is not None:
                votes = {
                    number: (
                        cosines[:, fold == number],
                        _compare(other, support.take(fold != number), support.unlabelled),
                    )
                    for number, other in zip(numbers, heads, strict=True)
                }
                ensemble, self.unlabelled_ = refine(
                    ensemble,
                    support.features,
                    support.labels,
                    support.unlabelled,
                    _compare(head, support, support.unlabelled),
                    fold,
                    votes,
                )
        if ensemble is not None and prior is not None:
            ensemble = ensemble.with_prior(prior)
        features = support.features if recipe.has_head else support.features[:0]
        counts = np.zeros(len(self.classes_), np.int64)
        counts[support.seen] = support.shots
        self._set_fitted(blocks, head, ensemble, features, counts.tolist())
        self.embedded_ = head.embed(head.prepare(features))  # now: `predict` must change nothing

    def _fit_names(
        self, support: SupportSet, blocks: Sequence[BlockConfig], recipe: Recipe
    ) -> None:
        """Without shots of two classes, nothing but the names can tell classes apart."""
        assert support.class_vectors is not None
        if support.unlabelled is not None:
            raise InputError(
                "Unlabelled images can only be used if at least 2 classes have shots: omit them, "
                "or add shots."
            )
        names = Names.alone(support.class_vectors.vectors)
        counts = np.zeros(len(self.classes_), np.int64)
        counts[support.seen] = support.shots
        self.losses_, self.unlabelled_ = [], None
        head = Head([], recipe, [])
        self._set_fitted(blocks, head, Ensemble.of_names(names), support.features[:0], counts)

    def _recognised(self, support: SupportSet, blocks: Sequence[BlockConfig]) -> float | None:
        """Tell how well the backbone recognises the shots, if every class has one."""
        classifier, map_ = blocks[-1].classifier, support.features.blocks[-1].map
        if classifier is None or map_ is None or max(support.shots) > 1:
            return None
        means = np.ldexp(mean_patches(map_), self.scale_[-1])  # as they were given
        return recognise(classifier, means)

    def _trainer(
        self,
        support: SupportSet,
        blocks: Sequence[BlockConfig],
        recipe: Recipe,
        seed: int,
        on_step: Callable[[float], object],
    ) -> Trainer | DeviceTrainer:
        """Make what trains heads: the engine on the CPU, the formulas on another device."""
        if not self._on_device or not recipe.has_head:
            return Trainer(support, blocks, recipe, seed, on_step)
        from mivhead.head.training import DeviceTrainer

        assert self.device is not None
        return DeviceTrainer(support, blocks, recipe, seed, on_step, device=self.device)

    @property
    def _on_device(self) -> bool:
        """Whether to compute with PyTorch, on a device such as a GPU."""
        return self.device is not None and self.device != "cpu"

    @property
    def has_ensemble(self) -> bool:
        """Whether the recipe has ridge experts beside the head."""
        return resolve_recipe(self.recipe).has_experts

    @property
    def stacks(self) -> bool:
        """Whether the recipe fits the weights of an ensemble on out-of-fold predictions."""
        return resolve_recipe(self.recipe).stacks

    def cross_validated_logits(
        self,
        support: SupportSet,
        fold: NDArray[np.int64],
        on_fold: Callable[[], object] = lambda: None,
    ) -> NDArray[np.floating[Any]]:
        """Cross-validate a recipe that stacks, without fitting everything once per fold.

        One head per fold is trained on the other folds. What the ridge experts would predict
        without a fold has a closed form, and the weights of all members are fitted without the
        images they are tested on. The classifier need not be fitted, and must not be used
        afterwards.

        Parameters
        ----------
        support : SupportSet
            The shots, and perhaps views and class vectors; unlabelled images are not used.
        fold : ndarray of shape (n_images,)
            The fold of each image of the support set; -1 for an image that is not tested.
        on_fold : callable, default=nothing
            Called after each fold.

        Returns
        -------
        ndarray of shape (m, n_classes)
            Logits of the images that are tested, in their order.
        """
        seed = random_seed(self.random_state)
        recipe = resolve_recipe(self.recipe)
        support = self._scaled(support)
        blocks = resolve_blocks(support.features, self.preset)
        support = _select(support, recipe, blocks)
        blocks = blocks[-len(support.features.blocks) :]

        numbers = fold_numbers(fold)
        with shared_cores():
            trainer = self._trainer(support, blocks, recipe, seed, lambda _: None)
            trained = trainer.fit([fold != number for number in numbers], keep=False)
            cosines = out_of_fold_cosines(trainer, trained, fold)
            ensemble = Ensemble.fit(
                support.features,
                support.labels,
                trainer.taken,
                (cosines, fold),
                spans_of(blocks),
                together=True,
                names=support.class_vectors,
            )
            assert ensemble.left_out is not None
            logits = ensemble.left_out.cross_fitted()
        for _ in numbers:
            on_fold()
        return logits

    def _make_rule(self, support: SupportSet) -> DecisionRule:
        if self.ensemble_ is None or not self.head_.recipe.stacks:
            return super()._make_rule(support)
        left_out, names = self.ensemble_.left_out, self.ensemble_.names
        if len(support.shots) < 2:
            support = replace(support, features=support.features[:0], labels=support.labels[:0])
        vectors, weight = _vectors(support.features), ENERGY
        labels = support.seen[support.labels]
        if left_out is not None:
            logits = left_out.logits
            if names is not None and names.used:
                logits = names.widen(logits, names.cosines(support.features[left_out.rows]))
            rule = DecisionRule.fit(vectors, labels, logits, left_out.rows, weight=weight)
        else:
            if is_one_shot(self.ensemble_.experts, support.labels):
                weight *= ONE_SHOT_ENERGY
            rule = DecisionRule.fit(vectors, labels, None, None, weight=weight)
        return rule if names is None else replace(rule, lift=names.lift)

    def _set_fitted(
        self,
        blocks: Sequence[BlockConfig],
        head: Head,
        ensemble: Ensemble | None,
        support: Features,
        shots: Sequence[int] | NDArray[np.int64],
    ) -> None:
        """Store what was learned, and what prediction needs of the support."""
        self.blocks_ = tuple(blocks)
        self.head_, self.ensemble_ = head, ensemble
        self.support_ = support.divide([-power for power in self._used_scale])
        self.shots_ = np.asarray(shots)
        self.bags_ = Bags.from_shots(self.shots_[compared(self.shots_)])
        self.__dict__.pop("embedded_", None)

    def renamed(self, old: Any, new: Any) -> Self | None:
        """Return a copy with another name for a class, and with everything that was learned.

        Parameters
        ----------
        old, new : object
            A class, and a name that no other class has.

        Returns
        -------
        MIVClassifier or None
            None if names are a member of the ensemble: the classifier must be fitted again.
        """
        if names_of(self) is not None:
            return None
        names = np.asarray([new if name == old else name for name in self.classes_.tolist()])
        order = np.argsort(names, kind="stable")
        numbers = np.argsort(order).repeat(self.shots_)  # the new class number of each shot
        made, support = copy(self), self.support_.divide(self._used_scale)
        if len(support):  # with the recipe "experts", there is none
            support = support[np.argsort(numbers, kind="stable")]
        ensemble = None if self.ensemble_ is None else self.ensemble_.reordered(order)
        made.classes_ = names[order]
        made._set_fitted(self.blocks_, self.head_, ensemble, support, self.shots_[order].tolist())
        if isinstance(prior := self.class_prior, Mapping):
            # Its keys may be strings for classes that are not.
            made.class_prior = {new if str(k) == str(old) else k: prior[k] for k in prior}
        elif not isinstance(prior, str):
            made.class_prior = [prior[number] for number in order]
        made.decision_ = None if self.decision_ is None else self.decision_.reordered(order)
        return made

    @cached_property
    def embedded_(self) -> list[Projected]:
        """What Component 2 needs of the shots, computed with the first prediction."""
        return self.head_.embed(self.head_.prepare(self.support_.divide(self._used_scale)))

    def _unfitted(self) -> Self:
        copy = super()._unfitted()
        fields = [name for name in vars(BlockPreset()) if name != "candidates"]  # they are chosen
        presets = [BlockPreset(**{name: getattr(b, name) for name in fields}) for b in self.blocks_]
        unused = len(blocks_of(self.layout_)) - len(presets)  # by a recipe with `last_blocks`
        copy.preset = (*(BlockPreset() for _ in range(unused)), *presets)
        return copy

    @property
    def _stored_support(self) -> Features:
        return self.support_

    @property
    def _view_blocks(self) -> list[int]:
        unused = len(blocks_of(self.layout_)) - len(self.blocks_)
        # Those of a later head, too, if names alone decide for now.
        return [unused + i for i in taken_blocks(self.blocks_, self.head_.recipe)]

    @property
    def _used_scale(self) -> tuple[int, ...]:
        return self.scale_[-len(self.blocks_) :]  # of the blocks that the head uses

    def _logits(self, features: Features) -> Array:
        # Some images at a time, so that memory does not grow with their number.
        starts = range(0, max(1, len(features)), PREDICTED)
        parts = [self._logits_of_part(features[start : start + PREDICTED]) for start in starts]
        return np.concatenate(parts)

    def _logits_of_part(self, features: Features) -> Array:
        cosines = self._cosines(features)  # (block, image, class)
        if self.ensemble_ is None:
            return combine(cosines, self.head_.recipe)
        return self.ensemble_.logits(cosines, features)

    def _cosines(self, features: Features) -> Array:
        if not self._on_device or not self.head_.layers:
            return self.head_.cosines(self.embedded_, self.bags_, features)
        from mivhead.head.training import device_cosines

        assert self.device is not None
        support = self.support_.divide(self._used_scale)
        shots = self.shots_[compared(self.shots_)].tolist()
        return device_cosines(self.head_, self.blocks_, support, shots, features, self.device)

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        config: dict[str, Any] = {
            "recipe": to_json(self.head_.recipe),
            "blocks": [_block_to_json(block) for block in self.blocks_],
            "shots": self.shots_.tolist(),
        }
        if not is_uniform(prior := self.class_prior):
            if isinstance(prior, Mapping):
                given = {str(name): share for name, share in prior.items()}
                prior = [given[str(name)] for name in self.classes_.tolist()]
            if isinstance(prior, str):
                config["class_prior"] = prior
            else:
                config["frequencies"] = [float(share) for share in prior]
        if self.layout_ != self.support_.layout:  # the head uses only the last blocks
            config["layout"] = layout_to_json(self.layout_)
        tensors = {f"support.{name}": tensor for name, tensor in self.support_.tensors.items()}
        tensors |= {f"params.{name}": value for name, value in self.head_.params.items()}
        if self.ensemble_ is not None:
            members = self.ensemble_.tensors()
            tensors |= {f"experts.{name}": value for name, value in members.items()}
        return config, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        saved = from_json(_Saved, config, "config")
        recipe = saved.read_recipe()
        blocks = [from_json(BlockConfig, b, f"block{i}") for i, b in enumerate(saved.blocks)]
        stored, params, members = split_tensors(tensors, ("support", "params", "experts"))
        support = Features.from_tensors(stored)
        layout = {f"block{i}.{k}": v for i, b in enumerate(blocks) for k, v in b.layout.items()}
        seen = len(compared(np.asarray(saved.shots)))
        kept = sum(saved.shots) if recipe.has_head and seen else 0
        if support.layout != layout or len(support) != kept:
            raise InputError(
                f"the support features {support} do not fit blocks {layout} "
                f"and {sum(saved.shots)} shots."
            )
        # Only classes with a name may have no shots; `mivhead.model.file` checks that.
        fits = len(saved.shots) == len(self.classes_) > 1
        fits = fits and min(saved.shots) >= 0 and max(saved.shots) < MAX_SHOTS
        if not fits or not (seen or recipe.has_experts):
            raise InputError(f"shots {saved.shots} do not fit {len(self.classes_)} classes.")
        whole = support[:0] if saved.layout is None else read_layout(saved.layout)
        if _last_blocks(whole, recipe, blocks).layout != support.layout:
            raise InputError("the blocks of the head do not fit the layout of the features.")
        check_tensors(params, Head.shapes(blocks, recipe) if seen else {})
        head = Head.from_params(blocks, recipe, params) if seen else Head([], recipe, [])
        expected: dict[str, tuple[int, ...]] = {} if seen else {WEIGHTS: (0,)}
        if recipe.has_experts and seen:
            sizes = len(head.layers), seen
            expected = Ensemble.expected_shapes(
                support.blocks, *sizes, spans_of(blocks), balanced=OFFSETS in members
            )
        check_tensors(members, expected)
        ensemble = None
        if not seen:
            ensemble = Ensemble.of_names()
        elif expected:
            ensemble = Ensemble.from_tensors(members, support.blocks, spans_of(blocks))
        self.recipe = recipe
        names = self.classes_.tolist()
        self.class_prior = saved.class_prior or UNIFORM
        if saved.frequencies is not None:
            log_prior(saved.frequencies, names)  # raises an error if there are more, or fewer
            self.class_prior = dict(zip(names, saved.frequencies, strict=True))
        log_prior(self.class_prior, names, saved.shots)  # or if they cannot be used
        self.layout_, self.n_features_in_ = whole.layout, whole.shape[1]
        safe = support.divide(self.scale_[-len(blocks) :])
        self._set_fitted(blocks, head, ensemble, safe, saved.shots)


def _block_to_json(block: BlockConfig) -> dict[str, Any]:
    """Leave out fields that earlier versions do not know, where they are not used."""
    newer = {"deepest": False, "classifier": None}
    return {k: v for k, v in to_json(block).items() if k not in newer or v != newer[k]}


def _compare(head: Head, support: SupportSet, images: Features) -> Array:
    """Cosines (block, image, class) of images with a support set."""
    embedded = head.embed(head.prepare(support.features))
    return head.cosines(embedded, Bags.from_shots(support.shots), images)


def _select(support: SupportSet, recipe: Recipe, blocks: Sequence[BlockConfig]) -> SupportSet:
    """Keep the blocks and the views that a recipe uses."""
    views, others = support.views if recipe.use_views else None, support.unlabelled
    return replace(
        support,
        features=_last_blocks(support.features, recipe, blocks),
        views=None if views is None else _last_blocks(views, recipe, blocks),
        unlabelled=None if others is None else _last_blocks(others, recipe, blocks),
        view_rows=support.view_rows if recipe.use_views else support.view_rows[:0],
    )


def _last_blocks(features: Features, recipe: Recipe, blocks: Sequence[BlockConfig]) -> Features:
    """Keep the blocks that a recipe uses, and the pooled vector, which is not one of them."""
    if recipe.last_blocks is None:
        return features
    extra = int(blocks[-1].pooled)
    count, there = recipe.last_blocks + extra, len(features.blocks)
    if count > there:
        raise InputError(
            f"last_blocks is {recipe.last_blocks}, but the features have only {there - extra} "
            "blocks."
        )
    return features if count == there else Features(features.blocks[-count:])


@dataclass(frozen=True)
class _Saved:
    """The JSON document of a model file."""

    recipe: dict[str, Any]
    blocks: tuple[dict[str, Any], ...]
    shots: tuple[int, ...]
    layout: dict[str, Any] | None = None  # of the features; None: that of the support
    class_prior: str | None = None  # a name; or
    frequencies: tuple[float, ...] | None = None  # of each class
    params: dict[str, Any] | None = None  # of an ablation, in files of version 0.1.0

    def read_recipe(self) -> Recipe:
        recipe = Recipe.from_file(self.recipe)
        if self.params is None:
            return recipe
        old = from_json(_AblationParams, self.params, "config.params")
        if old.last_blocks is not None and old.last_blocks < 1:
            raise InputError(f"last_blocks must be at least 1, got {old.last_blocks}.")
        return replace(recipe, last_blocks=old.last_blocks, use_views=old.use_views)


@dataclass(frozen=True)
class _AblationParams:
    """The parameters of an ablation in version 0.1.0.

    All but the last two are already part of the recipe and the blocks of the file.
    """

    prototype: str | None = None
    cross_attention: bool | None = None
    co_excitation: bool | None = None
    skip: bool | None = None
    eta: float | None = None
    tau: float | None = None
    candidates: int | None = None
    pool_sizes: tuple[tuple[int, ...], ...] | None = None
    last_blocks: int | None = None
    use_views: bool = True
