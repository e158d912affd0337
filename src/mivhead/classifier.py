"""What every classifier on features shares: scikit-learn's conventions, and nothing of a method."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from mivhead._progress import progress_bar
from mivhead._schema import check_tensors, from_json, split_tensors, to_json
from mivhead.ensemble.stacking import Committee
from mivhead.errors import InputError
from mivhead.features import Block, Features, SupportSet
from mivhead.head.head import MIVHead
from mivhead.head.logits import combine
from mivhead.head.recipe import DEFAULT_RECIPE, BlockConfig, Recipe, resolve_blocks, resolve_recipe
from mivhead.head.training import BATCH, FOLDS, fit_head, judge_unseen, make_bags
from mivhead.preset import BlockPreset, Preset


class FeatureClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # sklearn: untyped
    """Base of the classifiers on features; a method adds `_fit`, `_logits` and its state.

    Subclasses store their parameters in `__init__`, among them `random_state` and `device`.
    """

    random_state: int | np.random.RandomState | None
    device: str | None
    classes_: NDArray[Any]
    layout_: dict[str, tuple[int, ...]]

    def _check_params(self) -> None:
        """Raise an error for hyperparameters that make no sense, as far as a method checks them."""
        return

    @abstractmethod
    def _fit(self, support: SupportSet, seed: int) -> None:
        """Learn from a checked support set."""

    @abstractmethod
    def _logits(self, features: Features) -> Tensor:
        """Logits (image, class) of features of the right layout."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a model file holds of the method: a JSON document and tensors."""

    @abstractmethod
    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the fitted state from `_state`'s answer, checking everything."""

    def fit(
        self, X: Any, y: ArrayLike, *, views: Any = None, view_of: ArrayLike | None = None
    ) -> Self:
        """Train on a support set.

        Parameters
        ----------
        X
            Support features: `Features`, a 2-D array, or a list of blocks.
        y
            Labels of any kind, one per image; every class needs at least one.
        views
            Features of augmented images.
        view_of
            For each view the row of X that it was made from.
        """
        features = self._as_features(X, reset=True)
        labels = self._encode(y, len(features))
        extra, rows = self._check_views(views, view_of, features)
        order = np.argsort(labels, kind="stable")
        place = np.argsort(order)  # of each image in that order
        support = SupportSet(features[order], labels[order], extra, place[rows])
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._fit(support, self.seed_)
        return self

    def logits(self, X: Any) -> Tensor:
        """Logits (image, class), before any convention for two classes."""
        check_is_fitted(self, "classes_")
        with torch.inference_mode():
            return self._logits(self._as_features(X, reset=False))

    def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
        """Logits (image, class); for two classes their difference (image,)."""
        # In double precision, as probabilities: rounding must not make equal what these tell apart.
        logits = self.logits(X).double().numpy(force=True)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        return torch.softmax(self.logits(X).double(), dim=1).numpy(force=True)

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels of the most probable classes."""
        best = self.logits(X).argmax(dim=1).numpy(force=True)
        chosen: NDArray[Any] = self.classes_[best]
        return chosen

    def _as_features(self, X: Any, *, reset: bool) -> Features:
        if isinstance(X, Features) or _is_blocks(X):
            features = Features(X)
        else:
            features = Features(validate_data(self, X, dtype=[np.float32, np.float64], reset=reset))
        if reset:
            self.n_features_in_ = features.shape[1]
            self.layout_ = features.layout
        elif features.layout != self.layout_:
            raise InputError(
                "X has other blocks or channels than the features the classifier was fitted on: "
                f"got {features.layout}, expected {self.layout_}."
            )
        return features if self.device is None else features.to(torch.device(self.device))

    def _encode(self, y: ArrayLike, n: int) -> NDArray[np.int64]:
        if y is None:
            raise InputError("This classifier requires y to be passed, but the target y is None.")
        values = column_or_1d(y, warn=True)
        if values.dtype.kind == "f":
            assert_all_finite(values, input_name="y")
        with warnings.catch_warnings():  # one shot per class is what we are for
            warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
            check_classification_targets(values)
        if len(values) != n:
            raise InputError(f"X holds {n} images, but y has {len(values)} labels.")
        self.classes_, labels = np.unique(values, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                f"y holds {len(self.classes_)} class; a classifier needs at least 2 classes."
            )
        return labels.astype(np.int64)

    def _check_views(
        self, views: Any, view_of: ArrayLike | None, features: Features
    ) -> tuple[Features | None, NDArray[np.int64]]:
        if views is None:
            if view_of is not None:
                raise InputError("view_of is given without views.")
            return None, np.empty(0, np.int64)
        extra = Features(views).to(features.device)
        rows = np.asarray([] if view_of is None else view_of)
        if extra.layout != features.layout:
            raise InputError(f"views have other blocks than X: {extra} and {features}.")
        if rows.shape != (len(extra),) or (len(rows) and rows.dtype.kind not in "iu"):
            raise InputError(
                f"view_of must hold one row number of X for each of the {len(extra)} views, "
                f"got shape {rows.shape} of type {rows.dtype}."
            )
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(features)):
            raise InputError(f"view_of must hold rows of X, 0 to {len(features) - 1}.")
        return extra if len(rows) else None, rows.astype(np.int64)


def _is_blocks(X: Any) -> bool:
    """Whether X is a list of blocks, a block or an array of patches, not a 2-D table."""
    if isinstance(X, Block) or (isinstance(X, Mapping) and not hasattr(X, "shape")):
        return True
    if isinstance(X, np.ndarray | Tensor):
        return X.ndim in (3, 4)
    if not isinstance(X, list | tuple) or not X:
        return False
    return isinstance(X[0], Mapping | Block) or getattr(X[0], "ndim", 0) >= 2


# `MIVClassifier`: the MIV-head as a scikit-learn classifier on features.


# What `MIVClassifier` can change of its recipe.
SHORTCUTS = (
    "temperature_order",
    "attention",
    "eta",
    "temperature",
    "steps",
    "learning_rate",
    "vote",
)


class MIVClassifier(FeatureClassifier):
    """Few-shot classifier on features of a frozen backbone.

    Parameters
    ----------
    recipe
        How the head is trained and combined: a name or a `Recipe`. `"mivhead"`: blocks and plain
        experts, weighted by held-out images; more accurate and quicker. `"paper"`: as published.
    preset
        Settings that belong to the backbone: a `Preset`, a list of `BlockPreset`, or None to derive
        them from the shapes of the features.
    temperature_order, attention, eta, temperature, steps, learning_rate, vote
        Shortcuts to change one value of the recipe; None keeps the recipe's. See `Recipe`.
    random_state
        Seed of the initial weights: the same seed gives the same model, bit for bit.
    device
        Where to train and predict, such as `"cpu"` or `"cuda"`; None: where the features are.
    verbose
        Show a progress bar if training takes more than two seconds and a person is watching.

    Attributes
    ----------
    classes_
        The labels, sorted.
    losses_
        Training loss of every step.
    head_
        The trained `MIVHead`.
    support_
        Features of the support images, ordered by class: part of the model.
    committee_
        The plain experts, and how much they and the blocks count; None without experts.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from mivhead import MIVClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> classifier = MIVClassifier(random_state=0).fit(X[:100], y[:100])
    >>> bool(classifier.score(X[100:], y[100:]) > 0.75)
    True
    """

    def __init__(
        self,
        recipe: str | Recipe = DEFAULT_RECIPE,
        preset: Preset | Sequence[BlockPreset] | None = None,
        *,
        temperature_order: str | None = None,
        attention: str | None = None,
        eta: float | None = None,
        temperature: float | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        vote: str | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.preset = preset
        self.temperature_order = temperature_order
        self.attention = attention
        self.eta = eta
        self.temperature = temperature
        self.steps = steps
        self.learning_rate = learning_rate
        self.vote = vote
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def _check_params(self) -> None:
        self._recipe()

    def _fit(self, support: SupportSet, seed: int) -> None:
        recipe = self._recipe()
        preset = self.preset.blocks if isinstance(self.preset, Preset) else self.preset
        blocks = resolve_blocks(support.features, preset)
        stacked = recipe.vote == "stacked" and max(support.shots) > 1
        steps = recipe.steps * (1 + FOLDS * stacked)
        with progress_bar("training", steps, show=self.verbose, unit="step") as advance:
            head, self.losses_ = fit_head(support, blocks, recipe, seed, lambda _: advance(1))
            unseen = None
            if stacked:
                unseen = judge_unseen(support, blocks, recipe, seed, lambda _: advance(1))
        committee = None
        if recipe.vote != "logsumexp":
            labels = torch.as_tensor(support.labels, device=support.features.device)
            committee = Committee.fit(support.features, labels, len(head.layers), unseen)
        self._set_fitted(blocks, head, committee, support.features, support.shots)

    def _set_fitted(
        self,
        blocks: Sequence[BlockConfig],
        head: MIVHead,
        committee: Committee | None,
        support: Features,
        shots: Sequence[int],
    ) -> None:
        """Store what was learned, and what prediction needs of the support."""
        self.blocks_ = tuple(blocks)
        self.head_, self.committee_ = head.eval(), committee
        self.support_ = support
        self.shots_ = np.asarray(shots)
        self.bags_ = make_bags(shots, support.device)
        with torch.inference_mode():
            self.embedded_ = head.embed(head.prepare(support))

    def _logits(self, features: Features) -> Tensor:
        head = self.head_
        out = torch.empty(len(features), len(self.shots_), device=features.device)
        for start in range(0, len(features), BATCH):
            part = slice(start, start + BATCH)
            queries = head.embed(head.prepare(features[part]))
            cosines = head.compare(queries, self.embedded_, self.bags_)  # (block, image, class)
            if self.committee_ is None:
                out[part] = combine(cosines, head.recipe)
            else:
                out[part] = self.committee_.vote(cosines, features[part])
        return out

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {
            "recipe": to_json(self.head_.recipe),
            "blocks": [to_json(block) for block in self.blocks_],
            "shots": self.shots_.tolist(),
        }
        tensors = {f"support.{name}": tensor for name, tensor in self.support_.tensors.items()}
        tensors |= {f"params.{name}": value for name, value in self.head_.state_dict().items()}
        if self.committee_ is not None:
            own = self.committee_.tensors()
            tensors |= {f"experts.{name}": value for name, value in own.items()}
        return config, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        saved = from_json(_Saved, config, "config")
        recipe = from_json(Recipe, saved.recipe, "recipe")
        blocks = [from_json(BlockConfig, b, f"block{i}") for i, b in enumerate(saved.blocks)]
        stored, params, own = split_tensors(tensors, ("support", "params", "experts"))
        support = Features.from_tensors(stored)
        layout = {f"block{i}.{k}": v for i, b in enumerate(blocks) for k, v in b.layout.items()}
        if support.layout != layout or len(support) != sum(saved.shots):
            raise InputError(
                f"the support features {support} do not fit blocks {layout} "
                f"and {sum(saved.shots)} shots."
            )
        if len(saved.shots) != len(self.classes_) or min(saved.shots) < 1:
            raise InputError(f"shots {saved.shots} do not fit {len(self.classes_)} classes.")
        head = MIVHead(blocks, recipe, generator=None)
        check_tensors(params, {k: v.shape for k, v in head.state_dict().items()})
        head.load_state_dict(params, assign=True)
        head.requires_grad_(requires_grad=False)
        expected, committee = {}, None
        if recipe.vote != "logsumexp":
            sizes = len(head.layers), len(saved.shots)
            expected = Committee.expected_shapes(support.blocks, *sizes)
        check_tensors(own, expected)
        if expected:
            committee = Committee.from_tensors(own, support.blocks)
        self.layout_, self.n_features_in_ = support.layout, support.shape[1]
        self._set_fitted(blocks, head, committee, support, saved.shots)

    def _recipe(self) -> Recipe:
        return resolve_recipe(self.recipe, **{name: getattr(self, name) for name in SHORTCUTS})


@dataclass(frozen=True)
class _Saved:
    """The JSON document of a model file."""

    recipe: dict[str, Any]
    blocks: tuple[dict[str, Any], ...]
    shots: tuple[int, ...]
