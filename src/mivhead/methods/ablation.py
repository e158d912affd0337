"""The MIV-head with one part changed or left out: the ablations of the paper, and mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from torch import Tensor

from mivhead.classifier import FeatureClassifier, MIVClassifier
from mivhead.errors import InputError
from mivhead.features import Features, SupportSet
from mivhead.head.recipe import Recipe, derive_presets, resolve_recipe
from mivhead.methods.base import (
    check_count,
    layout_to_json,
    params_to_json,
    read_layout,
    restore_params,
)
from mivhead.preset import BlockPreset, Preset


class MIVAblation(FeatureClassifier):
    """`MIVClassifier` on other settings; None leaves a setting as it is.

    Parameters
    ----------
    recipe, preset
        What to start from, as for `MIVClassifier`; None for the paper's recipe, whose ablations
        these are, and for settings derived from the features.
    prototype
        `"mean"`: a prototype is the average of its class's image vectors, without CAP.
    cross_attention, co_excitation, skip
        False leaves that mechanism of CAP out.
    eta
        Down-scaling of the attention scores; 0 gives all shots the same weight, but keeps W^K.
    tau
        Scale of the patches' attention; 0 is plain averaging.
    candidates
        D: at most so many candidates per block. The block's token comes first, then its map, then
        pooled maps, spread over the sizes of the preset, the smallest first.
    pool_sizes
        Sides of the pooled maps, for each block of the features, instead of the preset's.
    last_blocks
        N: use only the last blocks of the features.
    use_views
        False trains on the images alone, even if augmented views are given.
    random_state
        Seed of the initial weights.
    device
        Where to compute; None: where the features are.

    Attributes
    ----------
    classifier_
        The `MIVClassifier` that does the work.
    """

    def __init__(
        self,
        recipe: str | Recipe | None = None,
        preset: Preset | Sequence[BlockPreset] | None = None,
        *,
        prototype: Literal["cap", "mean"] | None = None,
        cross_attention: bool | None = None,
        co_excitation: bool | None = None,
        skip: bool | None = None,
        eta: float | None = None,
        tau: float | None = None,
        candidates: int | None = None,
        pool_sizes: tuple[tuple[int, ...], ...] | None = None,
        last_blocks: int | None = None,
        use_views: bool = True,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.recipe = recipe
        self.preset = preset
        self.prototype = prototype
        self.cross_attention = cross_attention
        self.co_excitation = co_excitation
        self.skip = skip
        self.eta = eta
        self.tau = tau
        self.candidates = candidates
        self.pool_sizes = pool_sizes
        self.last_blocks = last_blocks
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _fit(self, support: SupportSet, seed: int) -> None:
        self._check_params()
        self._check_depth(len(support.features.blocks))
        views = support.views if self.use_views else None
        selected = replace(
            support,
            features=self._select(support.features),
            views=None if views is None else self._select(views),
            view_rows=support.view_rows if self.use_views else support.view_rows[:0],
        )
        self.classifier_ = MIVClassifier(
            self._recipe(), self._presets(support.features), device=self.device
        )
        self.classifier_._fit(selected, seed)
        self.losses_ = self.classifier_.losses_

    def _logits(self, features: Features) -> Tensor:
        return self.classifier_._logits(self._select(features))

    def _check_params(self) -> None:
        for name in ("candidates", "last_blocks"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value, least=1)
        if self.pool_sizes is not None:
            _check_sizes(self.pool_sizes)

    def _check_depth(self, blocks: int) -> None:
        if self.last_blocks is not None and self.last_blocks > blocks:
            raise InputError(
                f"last_blocks is {self.last_blocks}, but the features have only {blocks} blocks."
            )

    def _recipe(self) -> Recipe:
        names = ("prototype", "cross_attention", "co_excitation", "skip", "eta")
        return resolve_recipe(
            "paper" if self.recipe is None else self.recipe,
            **{name: getattr(self, name) for name in names},
        )

    def _select(self, features: Features) -> Features:
        return features if self.last_blocks is None else Features(features.blocks[self._kept])

    @property
    def _kept(self) -> slice:
        return slice(None if self.last_blocks is None else -self.last_blocks, None)

    def _presets(self, features: Features) -> list[BlockPreset]:
        given = self.preset.blocks if isinstance(self.preset, Preset) else self.preset
        presets = list(derive_presets(features) if given is None else given)
        if len(presets) != len(features.blocks):
            raise InputError(
                f"The preset describes {len(presets)} blocks, the features have "
                f"{len(features.blocks)}: {features}."
            )
        if self.pool_sizes is not None:
            if len(self.pool_sizes) != len(presets):
                raise InputError(
                    f"pool_sizes has lists for {len(self.pool_sizes)} blocks, the features have "
                    f"{len(presets)}: {features}."
                )
            presets = [
                replace(preset, pool_sizes=tuple(sizes))
                for preset, sizes in zip(presets, self.pool_sizes, strict=True)
            ]
        if self.candidates is not None:
            tokens = [block.token is not None for block in features.blocks]
            presets = [
                _limit(preset, self.candidates - token)
                for preset, token in zip(presets, tokens, strict=True)
            ]
        if self.tau is not None:
            presets = [replace(preset, tau=self.tau) for preset in presets]
        return presets[self._kept]

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = self.classifier_._state()
        own = {"params": params_to_json(self), "layout": layout_to_json(self.layout_)}
        return config | own, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        restore_params(self, config.get("params"))
        empty = read_layout(config.get("layout"))
        self._check_params()
        self._check_depth(len(empty.blocks))
        inner = MIVClassifier(device=self.device)
        inner.classes_ = self.classes_
        own = ("params", "layout")
        inner._restore({k: v for k, v in config.items() if k not in own}, tensors)
        if self._select(empty).layout != inner.layout_:
            raise InputError("the head's blocks do not fit the layout of the features.")
        self.classifier_ = inner
        self.layout_, self.n_features_in_ = empty.layout, empty.shape[1]


def _check_sizes(pool_sizes: object) -> None:
    lists = pool_sizes if isinstance(pool_sizes, list | tuple) else [None]
    if not all(isinstance(sizes, list | tuple) for sizes in lists):
        raise InputError(f"pool_sizes needs a list of sizes for each block, got {pool_sizes!r}.")
    for size in chain(*lists):
        check_count("each of pool_sizes", size, least=1)


def _limit(preset: BlockPreset, count: int) -> BlockPreset:
    """Keep at most `count` candidates that are maps: the map itself, then pooled ones."""
    native = preset.native and count > 0
    room = max(0, count - native)
    sizes = preset.pool_sizes
    if room < len(sizes):
        last = len(sizes) - 1
        # From the smallest (last) size upwards, evenly.
        kept = {last - round(i * last / max(1, room - 1)) for i in range(room)}
        sizes = tuple(sizes[i] for i in sorted(kept))
    return replace(preset, native=native, pool_sizes=sizes)
