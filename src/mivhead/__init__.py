"""Few-shot image classification on frozen, black-box backbones.

The names below, and the modules `backbones`, `diagnostics`, `errors`, `extraction`, `images`,
`jobs`, `service` and `stores`, are loaded on first use, so that `import mivhead` costs nothing.
"""

from typing import TYPE_CHECKING

from mivhead._util.imports import lazy
from mivhead._version import __version__

if TYPE_CHECKING:
    from mivhead import (
        backbones,
        diagnostics,
        errors,
        extraction,
        images,
        jobs,
        service,
        stores,
    )
    from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
    from mivhead.classifier import MIVClassifier
    from mivhead.errors import MivError
    from mivhead.features import Features, FeatureTable
    from mivhead.fewshot import FewShotClassifier, changing, load
    from mivhead.head.recipe import Recipe
    from mivhead.images.augmentation import Augmentation
    from mivhead.model.file import save
    from mivhead.prediction import Prediction

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
    "changing",
    "diagnostics",
    "errors",
    "extraction",
    "images",
    "jobs",
    "load",
    "save",
    "service",
    "stores",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "backbones.preset": "BlockPreset Preprocessing Preset",
        "classifier": "MIVClassifier",
        "errors": "MivError",
        "features": "FeatureTable Features",
        "fewshot": "FewShotClassifier changing load",
        "head.recipe": "Recipe",
        "images.augmentation": "Augmentation",
        "model.file": "save",
        "prediction": "Prediction",
    },
    modules="backbones diagnostics errors extraction images jobs service stores",
)
