"""The model file: one safetensors file that is safe to load from anyone.

Its metadata key `mivhead` holds a JSON document: `format`, `method`, `recipe`, `config`, `classes`,
`backbone`, `seed` and `library`. Its tensors are the trained parameters (`params.*`) and the
features of the support images (`support.*`), which are part of the model. Loading runs no code from
the file, needs no backbone, and checks every name, type, shape and value.

What a model may have, but need not have, is an optional section (`SECTIONS`): one more key of the
document, which ends in its version, such as `shots.v1`, and tensors under a prefix of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead import _files
from mivhead._schema import from_json
from mivhead._version import __version__
from mivhead.backbones.base import Backbone, Identity, named_by_file
from mivhead.decision import DecisionRule
from mivhead.errors import InputError, ModelFileError
from mivhead.fewshot import FewShotClassifier
from mivhead.images.imageset import check_names
from mivhead.methods.registry import Classifier, make_method, method_name

FORMAT = 1
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class ModelInfo:
    """What a model file says about itself: its JSON document.

    Parameters
    ----------
    format : int
        Version of the file format.
    method : str
        Name of the method, such as `miv`.
    recipe : dict or None
        How the head was trained and combined; None for a method that has no recipe.
    config : dict
        What else the method needs to be rebuilt: blocks, shots per class.
    classes : list
        The labels: all strings, or all integers.
    backbone : dict or None
        Identity of the backbone; None if the model was trained on features of unknown origin.
    seed : int
        Random seed of the initial weights.
    library : str
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


@dataclass(frozen=True)
class Section:
    """An optional part of a model file, versioned on its own.

    A file of an earlier version lacks it. A section that changes in an incompatible way gets a new
    name; the old one stays in `SECTIONS` for reading.

    Parameters
    ----------
    name : str
        Its key in the JSON document: a word, `.v` and its version, such as `"shots.v1"`.
    prefix : str
        First part of the names of its tensors, such as `"views"` for `views.block0.map`; no other
        part of a file uses it.
    write : callable
        Called with the model that is saved, a `FewShotClassifier` or an estimator on features.
        Returns the JSON value and the tensors by name, without the prefix; None if the model has
        no such part.
    read : callable
        Called with the loaded `FewShotClassifier`, the JSON value and the tensors, neither of which
        can be trusted. Checks everything, raises `InputError`, and sets attributes of the model.
    """

    name: str
    prefix: str
    write: Callable[[FewShotClassifier | Classifier], tuple[Any, Mapping[str, Tensor]] | None]
    read: Callable[[FewShotClassifier, Any, Mapping[str, Tensor]], None]


def _write_decision(
    model: FewShotClassifier | Classifier,
) -> tuple[Any, Mapping[str, Tensor]] | None:
    classifier = model.classifier_ if isinstance(model, FewShotClassifier) else model
    rule: DecisionRule | None = getattr(classifier, "decision_", None)
    if rule is None:
        return None
    document, arrays = rule.state()
    return document, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _read_decision(model: FewShotClassifier, document: Any, tensors: Mapping[str, Tensor]) -> None:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    model.classifier_.decision_ = DecisionRule.from_state(document, arrays)


SECTIONS: tuple[Section, ...] = (
    Section("decision.v1", "decision", _write_decision, _read_decision),
)
_SCALE = "scale"  # key of `config`: `FeatureClassifier.scale_`, if it is not 0
_SECTION_NAME = re.compile(r"[a-z_]+\.v[0-9]+")


def save(model: FewShotClassifier | Classifier, path: str | Path) -> None:
    """Write a fitted model to one file, atomically.

    The file contains features of the support images: treat it like the images themselves.

    Parameters
    ----------
    model : FewShotClassifier, or an estimator on features such as MIVClassifier
        The fitted model.
    path : str or Path
        The file to write.

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
    identity, trained = None, model
    if isinstance(model, FewShotClassifier):
        identity, trained = model.identity_, model.classifier_
    config, tensors = trained._state()
    if any(scale := getattr(trained, "scale_", ())):
        config[_SCALE] = list(scale)
    document = {
        "format": FORMAT,
        "method": method_name(trained),
        "recipe": config.pop("recipe", None),
        "config": config,
        "classes": _plain_classes(trained.classes_),
        "backbone": None if identity is None else identity.as_json(),
        "seed": trained.seed_,
        "library": __version__,
    }
    for section in SECTIONS:
        if (part := section.write(model)) is not None:
            document[section.name], own = part
            tensors |= {f"{section.prefix}.{name}": tensor for name, tensor in own.items()}
    _files.write(path, tensors, document)


def load(
    path: str | Path,
    *,
    backbone: str | Backbone | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
) -> FewShotClassifier:
    """Read a model file.

    Parameters
    ----------
    path : str or Path
        The file.
    backbone : str, Backbone or None, default=None
        The backbone of a model that was trained on one of your own. A backbone that mivhead knows
        by name is loaded with the first image. The address of a service is never taken from the
        file: give it here.
    weights : str, Path or None, default=None
        The checkpoint of a model that was trained with a checkpoint of your own.
    device : str or None, default=None
        Where to predict.

    Returns
    -------
    FewShotClassifier
        It predicts on features without a backbone. On images it predicts if the file names a
        backbone, or one is given.
    """
    tensors, document = _files.read(path)
    _files.check_format(path, document, FORMAT)
    parts = _take_sections(path, document, tensors)
    try:
        info = from_json(ModelInfo, document, "the description")
        classifier = _unfitted(info.method, device)
        classifier.classes_ = _read_classes(info.classes)
        classifier.seed_ = info.seed
        config = {**info.config, "recipe": info.recipe}
        if _SCALE in config:
            vars(classifier)["scale_"] = _read_scale(config.pop(_SCALE))
        classifier._restore(config, tensors)
        _check_scale(classifier)
        identity = None if info.backbone is None else Identity.from_json(info.backbone)
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    if identity is not None and backbone is None:
        backbone = named_by_file(identity)
    # What the model was fitted with, so that it can be fitted again.
    model = FewShotClassifier(
        backbone,
        weights=weights,
        method=info.method,
        method_params=info.config.get("params"),
        recipe=getattr(classifier, "recipe", None),
        device=device,
    )
    if identity is None and model.needs_images:
        raise ModelFileError(f"{path} cannot be used: it names no backbone for its adapters.")
    model._set_fitted(classifier, identity)
    try:
        for section, value, own in parts:
            section.read(model, value, own)
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    return model


def read_info(path: str | Path) -> ModelInfo:
    """Read what a model file says about itself; without its optional sections."""
    tensors, document = _files.read(path)
    _files.check_format(path, document, FORMAT)
    _take_sections(path, document, tensors)
    try:
        return from_json(ModelInfo, document, "the description")
    except InputError as error:
        raise ModelFileError(f"{path} is not a model file: {error}") from error


def _take_sections(
    path: str | Path, document: dict[str, Any], tensors: dict[str, Tensor]
) -> list[tuple[Section, Any, dict[str, Tensor]]]:
    """Remove the optional sections of a file from its document and tensors, and return them."""
    parts = []
    for section in SECTIONS:
        if section.name in document:
            start = f"{section.prefix}."
            own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(start)}
            own = {name.removeprefix(start): tensor for name, tensor in own.items()}
            parts.append((section, document.pop(section.name), own))
    if newer := sorted(name for name in document if _SECTION_NAME.fullmatch(name)):
        raise ModelFileError(
            f"{path} was written by a newer version of mivhead: it has the section {newer[0]!r}, "
            "which this version cannot read; update it with `pip install -U mivhead`."
        )
    return parts


def _unfitted(method: str, device: str | None) -> Classifier:
    module = method.partition(":")[0]
    if ":" in method and module not in sys.modules:  # loading a file must not run code
        raise InputError(
            f"it was fitted with the method {method!r}, which a file alone cannot import: import "
            f"{module} first, or register the method as an entry point of its package."
        )
    classifier: Classifier = make_method(method, device=device)
    return classifier


def _read_scale(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(power) is int for power in value):
        raise InputError(f"config.{_SCALE} is not valid: {value!r:.80}.")
    return tuple(value)


def _check_scale(classifier: Classifier) -> None:
    scale = getattr(classifier, "scale_", ())
    blocks = {name.partition(".")[0] for name in getattr(classifier, "layout_", ())}
    if scale and len(scale) != len(blocks):
        raise InputError(f"config.{_SCALE} has {len(scale)} entries for {len(blocks)} blocks.")


def _plain_classes(classes: NDArray[Any]) -> list[Any]:
    values: list[Any] = classes.tolist()
    if not (all(type(v) is str for v in values) or all(type(v) is int for v in values)):
        raise InputError(
            "Only classes that are all strings or all integers can be saved, "
            f"got {values[0]!r}: convert the labels to strings before fitting."
        )
    check_names(value for value in values if isinstance(value, str))
    return values


def _read_classes(values: list[Any]) -> NDArray[Any]:
    if not 2 <= len(values) <= MAX_CLASSES:
        raise InputError(f"it has {len(values)} classes; 2 to {MAX_CLASSES:,} are allowed.")
    if not all(
        type(value) is str or abs(value) < 2**63 for value in values if type(value) in (str, int)
    ):
        raise InputError("its classes are integers of more than 64 bits.")
    classes = np.asarray(_plain_classes(np.asarray(values, dtype=object)))
    if not np.array_equal(np.unique(classes), classes):
        raise InputError("its classes are not distinct and sorted.")
    return classes
