"""Few-shot image classification on frozen, black-box backbones.

The names below are loaded on first use, so that `import mivhead` costs nothing.
"""

from typing import TYPE_CHECKING

from mivhead._lazy import lazy
from mivhead._threads import wait_passively
from mivhead._version import __version__

if TYPE_CHECKING:
    from mivhead.classifier import MIVClassifier
    from mivhead.features import Features
    from mivhead.fewshot import FewShotClassifier
    from mivhead.head.recipe import Recipe
    from mivhead.model_file import load, save
    from mivhead.preset import BlockPreset, Preprocessing, Preset

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "classifier": "MIVClassifier",
        "features": "Features",
        "fewshot": "FewShotClassifier",
        "head.recipe": "Recipe",
        "model_file": "load save",
        "preset": "BlockPreset Preprocessing Preset",
    },
)
