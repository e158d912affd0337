"""Few-shot image classification on frozen, black-box backbones.

The names below are loaded on first use, so that `import mivhead` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mivhead._threads import wait_passively
from mivhead._version import __version__

if TYPE_CHECKING:
    from mivhead._load import load
    from mivhead.classifier import MIVClassifier
    from mivhead.features import Features
    from mivhead.fewshot import FewShotClassifier
    from mivhead.head.recipe import Recipe
    from mivhead.model_file import save
    from mivhead.preset import BlockPreset, Preprocessing, Preset

_HOMES = {
    "BlockPreset": "mivhead.preset",
    "Features": "mivhead.features",
    "FewShotClassifier": "mivhead.fewshot",
    "MIVClassifier": "mivhead.classifier",
    "Preprocessing": "mivhead.preset",
    "Preset": "mivhead.preset",
    "Recipe": "mivhead.head.recipe",
    "load": "mivhead._load",
    "save": "mivhead.model_file",
}

__all__ = [
    "BlockPreset",
    "Features",
    "FewShotClassifier",
    "MIVClassifier",
    "Preprocessing",
    "Preset",
    "Recipe",
    "__version__",
    "load",
    "save",
]


wait_passively()  # OpenMP reads its settings once, when PyTorch is loaded


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mivhead' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
