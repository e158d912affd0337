"""`MIVClassifier`: the MIV-head as a scikit-learn classifier on features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mivhead.errors import InputError
from mivhead.estimator import FeatureClassifier, SupportSet
from mivhead.experts.committee import Committee
from mivhead.features import Features
from mivhead.head.config import (
    DEFAULT_RECIPE,
    BlockConfig,
    Recipe,
    resolve_blocks,
    resolve_recipe,
)
from mivhead.head.head import MIVHead
from mivhead.head.logits import combine
from mivhead.heldout import BATCH, FOLDS, fit_head, judge_unseen, make_bags
from mivhead.preset import BlockPreset, Preset
from mivhead.progress import progress_bar
from mivhead.schema import check_tensors, from_json, split_tensors, to_json

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
