"""The model file: one safetensors file that is safe to load from anyone.

Its metadata key `mivhead` holds a JSON document: `format`, `method`, `recipe`, `config`, `classes`,
`backbone`, `seed` and `library`. Its tensors are the trained parameters (`params.*`) and the
features of the support images (`support.*`), which are part of the model. Loading runs no code,
needs no backbone, and checks every name, type, shape and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead import _files as safefile
from mivhead._schema import from_json
from mivhead._version import __version__
from mivhead.backbones.base import Backbone, Identity
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError, ModelFileError
from mivhead.fewshot import FewShotClassifier
from mivhead.methods import METHODS, make_method, make_tuner, method_name
from mivhead.methods.tuning.base import TuningClassifier

FORMAT = 1
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Description:
    """The JSON document of a model file.

    Parameters
    ----------
    format
        Version of the file format.
    method
        Name of the method, such as `miv`.
    recipe
        How the head was trained and combined; None for a method that has no recipe.
    config
        What else the method needs to be rebuilt: blocks, shots per class.
    classes
        The labels: all texts, or all whole numbers.
    backbone
        Identity of the backbone; None if the model was trained on features of unknown origin.
    seed
        Seed of the initial weights.
    library
        Version of mivhead that wrote the file.
    """

    format: int
    method: str
    recipe: dict[str, Any] | None
    config: dict[str, Any]
    classes: list[Any]
    backbone: dict[str, Any] | None
    seed: int
    library: str


def save(classifier: FewShotClassifier | FeatureClassifier, path: str | Path) -> None:
    """Write a fitted classifier to one file, atomically.

    The file contains features of the support images: treat it like the images themselves.

    Examples
    --------
    >>> import tempfile, numpy as np, mivhead
    >>> X, y = np.eye(4, 8, dtype=np.float32), ["a", "a", "b", "b"]
    >>> classifier = mivhead.MIVClassifier(random_state=0).fit(X, y)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mivhead.save(classifier, f"{folder}/model.miv")
    ...     mivhead.load(f"{folder}/model.miv").predict(X).tolist()
    ['a', 'a', 'b', 'b']
    """
    identity = None
    trained: FeatureClassifier | TuningClassifier
    if isinstance(classifier, FewShotClassifier):
        identity = classifier.identity_.as_json()
        trained = classifier.classifier_
    else:
        trained = classifier
    config, tensors = trained._state()
    document = {
        "format": FORMAT,
        "method": method_name(trained),
        "recipe": config.pop("recipe", None),
        "config": config,
        "classes": _plain_classes(trained.classes_),
        "backbone": identity,
        "seed": trained.seed_,
        "library": __version__,
    }
    safefile.write(path, tensors, document)


def load(
    path: str | Path,
    *,
    backbone: str | Backbone | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
) -> FewShotClassifier | FeatureClassifier:
    """Read a model file.

    Parameters
    ----------
    path
        The file.
    backbone
        For a model that was trained on a backbone of your own: that backbone. One that mivhead
        knows by name is loaded when the first image comes. A service's address is never taken
        from the file: give it here.
    weights
        For a model that was trained with a checkpoint of your own: that checkpoint.
    device
        Where to predict.

    Returns
    -------
    A `FewShotClassifier` (images in) if the file names a backbone, else a classifier on features.
    """
    tensors, document = safefile.read(path)
    safefile.check_format(path, document, FORMAT)
    try:
        description = from_json(Description, document, "the description")
        classifier = _unfitted(description.method, device)
        classifier.classes_ = _read_classes(description.classes)
        classifier.seed_ = description.seed
        classifier._restore({**description.config, "recipe": description.recipe}, tensors)
        identity = None
        if description.backbone is not None:
            identity = Identity.from_json(description.backbone)
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    if identity is not None:
        return FewShotClassifier._restored(classifier, identity, backbone, weights, device)
    if isinstance(classifier, TuningClassifier):
        raise ModelFileError(f"{path} cannot be used: it names no backbone for its adapters.")
    return classifier


def describe(path: str | Path) -> Description:
    """Read what a model file says of itself."""
    _, document = safefile.read(path)
    safefile.check_format(path, document, FORMAT)
    try:
        return from_json(Description, document, "the description")
    except InputError as error:
        raise ModelFileError(f"{path} is not a model file: {error}") from error


def _unfitted(method: str, device: str | None) -> FeatureClassifier | TuningClassifier:
    if method in METHODS and METHODS[method].needs == "images":
        return make_tuner(method, device=device)
    return make_method(method, device=device)


def _plain_classes(classes: NDArray[Any]) -> list[Any]:
    values: list[Any] = classes.tolist()
    if not (all(type(v) is str for v in values) or all(type(v) is int for v in values)):
        raise InputError(
            "Only classes that are all texts or all whole numbers can be saved, "
            f"got {values[0]!r}: convert the labels to texts before fitting."
        )
    return values


def _read_classes(values: list[Any]) -> NDArray[Any]:
    if not 2 <= len(values) <= MAX_CLASSES:
        raise InputError(f"it has {len(values)} classes; 2 to {MAX_CLASSES:,} are allowed.")
    classes = np.asarray(_plain_classes(np.asarray(values, dtype=object)))
    if not np.array_equal(np.unique(classes), classes):
        raise InputError("its classes are not distinct and sorted.")
    return classes
