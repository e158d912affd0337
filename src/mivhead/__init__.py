"""Few-shot image classification on frozen, black-box backbones.

The names below, and the modules `backbones`, `batch`, `benchmark`, `client`, `datasets`,
`diagnostics`, `errors`, `extraction`, `images`, `methods`, `spreadsheets` and `stores`, are loaded
on first use, so that `import mivhead` costs nothing.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy
from mivhead._version import __version__

if TYPE_CHECKING:
    from mivhead import (
        backbones,
        batch,
        benchmark,
        client,
        datasets,
        diagnostics,
        errors,
        extraction,
        images,
        methods,
        spreadsheets,
        stores,
    )
    from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
    from mivhead.classifier import MIVClassifier
    from mivhead.errors import MivError
    from mivhead.features import Features, FeatureTable
    from mivhead.head.recipe import Recipe
    from mivhead.images.augmentation import Augmentation
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.file import changing, save
    from mivhead.model.load import load
    from mivhead.model.prediction import Prediction

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
    "batch",
    "benchmark",
    "changing",
    "client",
    "datasets",
    "diagnostics",
    "errors",
    "extraction",
    "images",
    "load",
    "methods",
    "save",
    "spreadsheets",
    "stores",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "model.load": "load",
        "classifier": "MIVClassifier",
        "errors": "MivError",
        "features": "FeatureTable Features",
        "model.fewshot": "FewShotClassifier",
        "head.recipe": "Recipe",
        "images.augmentation": "Augmentation",
        "model.file": "changing save",
        "model.prediction": "Prediction",
        "backbones.preset": "BlockPreset Preprocessing Preset",
    },
    modules="backbones batch benchmark client datasets diagnostics errors extraction images "
    "methods spreadsheets stores",
)
