"""Few-shot image classification on frozen, black-box backbones.

The names below, and the modules `backbones`, `benchmark`, `datasets`, `diagnostics`, `errors`,
`extraction`, `images`, `methods` and `stores`, are loaded on first use, so that `import mivhead`
costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mivhead._threads import wait_passively
from mivhead._version import __version__

if TYPE_CHECKING:
    from mivhead import (
        backbones,
        benchmark,
        datasets,
        diagnostics,
        errors,
        extraction,
        images,
        methods,
        stores,
    )
    from mivhead.classifier import MIVClassifier
    from mivhead.errors import MivError
    from mivhead.features import Features, FeatureTable
    from mivhead.fewshot import FewShotClassifier
    from mivhead.head.recipe import Recipe
    from mivhead.images.augmentation import Augmentation
    from mivhead.model_file import load, save
    from mivhead.prediction import Prediction
    from mivhead.preset import BlockPreset, Preprocessing, Preset

_HOMES = {
    "Augmentation": "mivhead.images.augmentation",
    "BlockPreset": "mivhead.preset",
    "FeatureTable": "mivhead.features",
    "Features": "mivhead.features",
    "FewShotClassifier": "mivhead.fewshot",
    "MIVClassifier": "mivhead.classifier",
    "MivError": "mivhead.errors",
    "Prediction": "mivhead.prediction",
    "Preprocessing": "mivhead.preset",
    "Preset": "mivhead.preset",
    "Recipe": "mivhead.head.recipe",
    "load": "mivhead.model_file",
    "save": "mivhead.model_file",
}

__all__ = [
    "Augmentation",
    "BlockPreset",
    "FeatureTable",
    "Features",
    "FewShotClassifier",
    "MIVClassifier",
    "MivError",
    "Prediction",
    "Preprocessing",
    "Preset",
    "Recipe",
    "__version__",
    "backbones",
    "benchmark",
    "datasets",
    "diagnostics",
    "errors",
    "extraction",
    "images",
    "load",
    "methods",
    "save",
    "stores",
]


wait_passively()  # OpenMP reads its settings once, when PyTorch is loaded


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mivhead' has no attribute {name!r}")
    from importlib import import_module

    if name not in _HOMES:
        return import_module(f"mivhead.{name}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
