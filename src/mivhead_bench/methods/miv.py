"""The MIV-head as a method: its variants by name, and the classifier that trains it on a GPU.

On a CPU, the estimator is `mivhead.MIVClassifier`. A variant is its recipe or preset with fields
replaced by name, such as those of `params = {eta = 0.2, tau = 0}` in a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.backbones.preset import BlockPreset, Preset, replace_in_blocks
from mivhead.classifier import MIVClassifier
from mivhead.errors import InputError, check_one_of
from mivhead.features import Features, SupportSet
from mivhead.head.formulas import combine
from mivhead.head.recipe import DEFAULT_RECIPE, BlockConfig, Recipe, resolve_blocks, resolve_recipe
from mivhead_bench.head.head import MIVHead
from mivhead_bench.head.recipe import Ablation
from mivhead_bench.head.training import DeviceTrainer, compare, fit_head
from mivhead_bench.methods.base import LogitClassifier

AnyPreset: TypeAlias = "Preset | Sequence[BlockPreset] | Mapping[str, Any] | None"

RECIPE_FIELDS = tuple(field.name for field in fields(Ablation))
PRESET_FIELDS = ("tau", "pool_sizes", "candidates")  # that a parameter may replace in every block

# The paper's ablations: the fields of its recipe, or of its preset, that each of them replaces.
GAP: dict[str, Any] = {"candidates": 1, "tau": 0.0}
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "miv-paper": ("the recipe of the paper, with nothing changed", {}),
    "miv-ablation": ("any combination of the changes below, set by parameters", {}),
    "miv-mean": ("CAP replaced by the mean of a class's image vectors", {"prototype": "mean"}),
    "miv-no-attention": ("CAP without cross-attention", {"cross_attention": False}),
    "miv-eta0": ("CAP with equal weights of all shots, keeping W^K", {"eta": 0.0}),
    "miv-no-skip": ("CAP without the in-attention skip connection", {"skip": False}),
    "miv-no-excitation": ("CAP without co-excitation", {"co_excitation": False}),
    "miv-gap": ("plain averaging of one candidate, not attention", GAP),
    "miv-d1": ("one candidate per block", {"candidates": 1}),
    "miv-d2": ("at most two candidates per block", {"candidates": 2}),
    "miv-d4": ("at most four candidates per block", {"candidates": 4}),
    "miv-blocks1": ("the last block only", {"last_blocks": 1}),
    "miv-blocks2": ("the last two blocks only", {"last_blocks": 2}),
    "miv-no-views": ("no augmented views in training", {"use_views": False}),
    "miv-gap-blocks1": ("miv-gap on the last block", {**GAP, "last_blocks": 1}),
    "miv-gap-mean": ("miv-gap and miv-mean at once", {**GAP, "prototype": "mean"}),
    "miv-gap-mean-blocks1": (
        "miv-gap-mean on the last block: equivalent to NCC",
        {**GAP, "prototype": "mean", "last_blocks": 1},
    ),
}


def make_head(
    recipe: str | Recipe | None,
    preset: AnyPreset,
    changes: Mapping[str, Any],
    *,
    random_state: int | None = None,
    device: str | None = None,
) -> MIVClassifier | AblatedHead:
    """Make a classifier, with fields of its recipe and preset replaced by name.

    >>> make_head("paper", None, {"eta": 0.2, "tau": 0.0}).preset
    {'tau': 0.0}
    """
    changed = change_recipe(recipe, changes)
    preset = _change_preset(preset, changes)
    if changed.is_ablated:
        return AblatedHead(changed, preset, random_state=random_state, device=device or "cpu")
    if device is None or device == "cpu":
        return MIVClassifier(changed.product, preset, random_state=random_state)
    return DeviceMIVClassifier(changed.product, preset, random_state=random_state, device=device)


def change_recipe(recipe: str | Recipe | None, changes: Mapping[str, Any]) -> Ablation:
    """Replace fields of a recipe; None is the default one.

    >>> change_recipe("paper", {"eta": 0.2}) == Ablation.paper(eta=0.2)
    True
    """
    for name in changes:
        check_one_of("parameter", name, (*RECIPE_FIELDS, *PRESET_FIELDS))
    start = Ablation.of(resolve_recipe(DEFAULT_RECIPE if recipe is None else recipe))
    return replace(start, **{k: v for k, v in changes.items() if k in RECIPE_FIELDS})


def _change_preset(preset: AnyPreset, changes: Mapping[str, Any]) -> AnyPreset:
    """Replace fields of all blocks; None keeps a field as it is."""
    changes = {k: v for k, v in changes.items() if k in PRESET_FIELDS and v is not None}
    if not changes:
        return preset
    if preset is None or isinstance(preset, Mapping):
        return {**(preset or {}), **changes}
    if isinstance(preset, Preset):
        return replace(preset, blocks=replace_in_blocks(preset.blocks, changes))
    return replace_in_blocks(preset, changes)


def head_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of a variant of the head, with their values."""
    recipe = Ablation.of(resolve_recipe(settings.get("recipe", DEFAULT_RECIPE)))
    known = {name: getattr(recipe, name) for name in RECIPE_FIELDS} | dict.fromkeys(PRESET_FIELDS)
    return known | {name: value for name, value in settings.items() if name != "recipe"}


class DeviceMIVClassifier(MIVClassifier):
    """The MIV-head whose head is trained and compared by PyTorch, on a device such as a GPU."""

    def __init__(
        self,
        recipe: str | Recipe = DEFAULT_RECIPE,
        preset: AnyPreset = None,
        *,
        random_state: int | None = None,
        verbose: bool = False,
        device: str = "cuda",
    ) -> None:
        super().__init__(recipe, preset, random_state=random_state, verbose=verbose)
        self.device: str = device

    def _trainer(
        self,
        support: SupportSet,
        blocks: Sequence[BlockConfig],
        recipe: Recipe,
        seed: int,
        on_step: Callable[[float], object],
    ) -> Any:
        if not recipe.has_head:
            return super()._trainer(support, blocks, recipe, seed, on_step)
        return DeviceTrainer(support, blocks, recipe, seed, on_step, device=self.device)

    def cosines(self, features: Features) -> NDArray[np.float32]:
        """Cosines (block, image, class) of the head, computed on the device."""
        if not self.head_.layers:
            return super().cosines(features)
        head = MIVHead(self.blocks_, self.head_.recipe, None)
        head.load_arrays(self.head_.params)
        return compare(head.to(self.device), self.support_, self.shots_.tolist(), features)


class AblatedHead(LogitClassifier):
    """The paper's head with other formulas, or on the last blocks only, in PyTorch."""

    def __init__(
        self,
        recipe: Ablation,
        preset: AnyPreset = None,
        *,
        random_state: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.recipe, self.preset = recipe, preset
        self.random_state, self.device = random_state, device

    def fit(
        self, X: Any, y: ArrayLike, *, views: Any = None, view_of: ArrayLike | None = None
    ) -> Self:
        """Fit to `Features` of labelled images, and perhaps of views of the images `view_of`."""
        if self.recipe.has_experts:
            raise InputError("Ablations are of the head alone: give them the recipe 'paper'.")
        features = Features(X)
        blocks = resolve_blocks(features, self.preset)
        last = self.recipe.last_blocks or len(blocks)
        vectors = int(blocks[-1].pooled)  # for other heads, which are not counted
        if self.recipe.last_blocks is not None and last + vectors > len(blocks):
            raise InputError(f"last_blocks is {last}, but the features have fewer blocks.")
        self.used_ = slice(max(0, len(blocks) - last - vectors), None)
        if not self.recipe.use_views:
            views = view_of = None
        elif views is not None:
            views = self._used(views)
        support = SupportSet.read(self._used(features), y, views, view_of)
        self.classes_, self.support_, self.shots_ = support.classes, support.features, support.shots
        seed = np.random.RandomState(self.random_state).randint(2**31 - 1)
        self.head_, self.losses_ = fit_head(
            support, blocks[self.used_], self.recipe, seed, self.device
        )
        return self

    def _used(self, features: Any) -> Features:
        return Features(Features(features).blocks[self.used_])

    def logits(self, X: Any) -> NDArray[np.float32]:
        """Logits (image, class)."""
        cosines = compare(self.head_, self.support_, self.shots_, self._used(X))
        return combine(cosines, self.recipe)
