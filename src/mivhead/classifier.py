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
from mivhead.features import Features
from mivhead.head.bags import Bags
from mivhead.head.config import BlockConfig, Recipe, resolve_blocks, resolve_recipe
from mivhead.head.head import MIVHead
from mivhead.head.training import train
from mivhead.preset import BlockPreset, Preset
from mivhead.progress import progress_bar
from mivhead.schema import check_tensors, from_json, split_tensors, to_json

BATCH = 64  # query images pooled at once


class MIVClassifier(FeatureClassifier):
    """Few-shot classifier on features of a frozen backbone.

    Parameters
    ----------
    recipe
        How the head is trained and combined: a name (`"paper"`) or a `Recipe`.
    preset
        Settings that belong to the backbone: a `Preset`, a list of `BlockPreset`, or None to derive
        them from the shapes of the features.
    temperature_order, attention, eta, temperature, steps, learning_rate
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
        recipe: str | Recipe = "paper",
        preset: Preset | Sequence[BlockPreset] | None = None,
        *,
        temperature_order: str | None = None,
        attention: str | None = None,
        eta: float | None = None,
        temperature: float | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
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
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def _fit(self, support: SupportSet, seed: int) -> None:
        recipe = self._recipe()
        preset = self.preset.blocks if isinstance(self.preset, Preset) else self.preset
        blocks = resolve_blocks(support.features, preset)
        device = support.features.device
        head = MIVHead(blocks, recipe, torch.Generator().manual_seed(seed)).to(device)
        labels = torch.as_tensor(support.all_labels, device=device)
        bags = _bags(support.shots, device)
        with progress_bar("training", recipe.steps, show=self.verbose, unit="step") as advance:
            self.losses_ = train(
                head,
                head.prepare(support.everything),
                labels,
                bags,
                on_step=lambda _: advance(1),
            )
        self._set_fitted(head, support.features, support.shots)

    def _set_fitted(self, head: MIVHead, support: Features, shots: Sequence[int]) -> None:
        """Store what was learned, and what prediction needs of the support."""
        self.head_ = head.eval().requires_grad_(requires_grad=False)
        self.support_ = support
        self.shots_ = np.asarray(shots)
        self.bags_ = _bags(shots, support.device)
        with torch.inference_mode():
            self.embedded_ = head.embed(head.prepare(support))

    def _logits(self, features: Features) -> Tensor:
        head = self.head_
        out = torch.empty(len(features), len(self.shots_), device=features.device)
        for start in range(0, len(features), BATCH):
            part = slice(start, start + BATCH)
            queries = head.embed(head.prepare(features[part]))
            out[part] = head.compare(queries, self.embedded_, self.bags_)
        return out

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {
            "recipe": to_json(self.head_.recipe),
            "blocks": [to_json(layer.config) for layer in self.head_.layers],
            "shots": self.shots_.tolist(),
        }
        tensors = {f"support.{name}": tensor for name, tensor in self.support_.tensors.items()}
        tensors |= {f"params.{name}": value for name, value in self.head_.state_dict().items()}
        return config, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        saved = from_json(_Saved, config, "config")
        recipe = from_json(Recipe, saved.recipe, "recipe")
        blocks = [from_json(BlockConfig, b, f"block{i}") for i, b in enumerate(saved.blocks)]
        stored, params = split_tensors(tensors, ("support", "params"))
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
        self.layout_, self.n_features_in_ = support.layout, support.shape[1]
        self._set_fitted(head, support, saved.shots)

    def _recipe(self) -> Recipe:
        names = ("temperature_order", "attention", "eta", "temperature", "steps", "learning_rate")
        return resolve_recipe(self.recipe, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class _Saved:
    """The JSON document of a model file."""

    recipe: dict[str, Any]
    blocks: tuple[dict[str, Any], ...]
    shots: tuple[int, ...]


def _bags(shots: Sequence[int], device: torch.device) -> Bags:
    """Bags of a support set that is ordered by class."""
    labels = torch.repeat_interleave(torch.as_tensor(shots, device=device))
    return Bags.from_labels(labels, len(shots))
