"""The model file: one safetensors file that is safe to load from anyone.

Its metadata key `mivhead` holds a JSON document with a closed schema (`Document`). Its tensors are
the trained parameters (`params.*`, `experts.*`), the features of the support images (`support.*`),
which are part of the model, and what later changes and decisions need (`shots.*`, `names.*`,
`decision.*`). Loading runs no code from the file, needs no backbone, and checks every name, type,
shape and value.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from mivhead._util import files
from mivhead._util.estimator import check_fitted
from mivhead._util.schema import from_json, split_tensors, to_json
from mivhead._version import __version__
from mivhead.backbones.base import Backbone, Identity, named_by_file
from mivhead.backbones.efficientnet_lite import comes_with_mivhead
from mivhead.classifier import MIVClassifier
from mivhead.decision import DecisionRule
from mivhead.ensemble.names import Names
from mivhead.ensemble.unlabelled import UnlabelledUse
from mivhead.errors import InputError, ModelFileError, NotAvailableError
from mivhead.model.base import Estimate, ModelInfo, plain_classes, read_classes
from mivhead.model.model import Model
from mivhead.model.shots import Change, SavedShots, Shots

FORMAT = 1
OF_CLASSIFIER = ("support", "params", "experts")  # first parts of the names of tensors
OF_MODEL = ("shots", "names", "decision")

Tensors = dict[str, NDArray[Any]]
M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Document(ModelInfo):
    """The JSON document of a model file."""

    decision: dict[str, Any]
    shots: SavedShots | None = None
    names: dict[str, Any] | None = None
    templates: tuple[str, ...] = ()  # sentences in which the names of the classes were embedded
    unlabelled: UnlabelledUse | None = None
    estimate: Estimate | None = None
    history: tuple[Change, ...] = ()


def save(model: Model | MIVClassifier, path: str | Path, *, pictures: bool = True) -> None:
    """Write a fitted model to one file, atomically.

    The file contains features of the support images and, for a `FewShotClassifier`, small pictures
    of them: treat it like the images themselves.

    Parameters
    ----------
    model : FewShotClassifier or MIVClassifier
        The fitted model.
    path : str or Path
        The file to write.
    pictures : bool, default=True
        Whether to write the pictures, which later changes and explanations need.

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
    model = as_model(model)
    classifier, identity, shots = model.classifier_, model.identity_, model.shots_
    tensors = classifier.state()[1]
    document = to_json(info_of(model)) | {
        "templates": list(model.templates_),
        "unlabelled": None if classifier.unlabelled_ is None else to_json(classifier.unlabelled_),
        "estimate": None if model.estimate_ is None else to_json(model.estimate_),
        "history": [to_json(replace(change, notes=())) for change in model.history_],
    }
    parts = {"decision": classifier.decision_.state()}
    if classifier.ensemble_ is not None and classifier.ensemble_.names is not None:
        parts["names"] = classifier.ensemble_.names.state()
    if shots is not None:
        shots = shots if pictures else shots.without_pictures()
        if identity is not None and comes_with_mivhead(identity) and shots.can_make_views:
            shots = shots.without_views()
        parts["shots"] = shots.state(classifier.support_, classifier.head_.taken)
    for name, (value, arrays) in parts.items():
        document[name] = value
        tensors |= {f"{name}.{key}": array for key, array in arrays.items()}
    files.write(path, tensors, document)


def as_model(model: Model | MIVClassifier) -> Model:
    """Return a fitted model as it is, and a classifier as a model without backbone and shots."""
    check_fitted(model, "classes_")
    if isinstance(model, Model):
        return model
    made = Model(None, recipe=model.recipe, other=None)
    made.set_fitted(model, None, None)
    return made


def info_of(model: Model) -> ModelInfo:
    """Return what a file of a fitted model would say about it."""
    identity, classifier = model.identity_, model.classifier_
    return ModelInfo(
        format=FORMAT,
        **classifier.state()[0],
        classes=plain_classes(classifier.classes_),
        backbone=None if identity is None else identity.as_json(),
        seed=classifier.seed_,
        library=__version__,
    )


def read_info(path: str | Path) -> ModelInfo:
    """Read what a model file says about itself; `load` checks its tensors."""
    document = _read_document(path, files.read(path, arrays=False)[1])
    return ModelInfo(**{field.name: getattr(document, field.name) for field in fields(ModelInfo)})


def _read_document(path: str | Path, meta: Mapping[str, Any]) -> Document:
    if meta.get("format") != FORMAT:
        raise ModelFileError(f"{path} was written by another version of mivhead.")
    try:
        return from_json(Document, meta, "the description")
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error


def load(
    path: str | Path,
    kind: type[M],
    *,
    backbone: str | Backbone | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
) -> M:
    """Read a model file as a model of this class.

    The model predicts on features without a backbone. On images it predicts if the file names a
    backbone, or one is given.
    """
    tensors, meta = files.read(path)
    document = _read_document(path, meta)
    try:
        classes = read_classes(document.classes)
        identity = None if document.backbone is None else Identity.from_json(document.backbone)
        if identity is not None and backbone is None:
            backbone = named_by_file(identity)
        model = kind(backbone, weights=weights, device=device)
        _restore(model, document, tensors, classes, identity)
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    return model


def _restore(
    model: Model,
    document: Document,
    tensors: Tensors,
    classes: NDArray[Any],
    identity: Identity | None,
) -> None:
    """Set everything that a file holds, and the parameters that it was fitted with."""
    groups = split_tensors(tensors, (*OF_CLASSIFIER, *OF_MODEL))
    parts = dict(zip((*OF_CLASSIFIER, *OF_MODEL), groups, strict=True))
    learned = {f"{group}.{k}": v for group in OF_CLASSIFIER for k, v in parts[group].items()}
    classifier = MIVClassifier.from_state(
        document.recipe, document.config, learned, classes, document.seed
    )
    rule = DecisionRule.from_state(document.decision, parts["decision"], len(classes))
    if document.names is None:
        if parts["names"]:
            raise InputError("it has vectors of names that it does not describe.")
    elif classifier.ensemble_ is None:
        raise InputError("its recipe has no member for names.")
    else:
        width = classifier.support_.blocks[-1].channels
        names = Names.from_state(document.names, parts["names"], len(classes), width)
        classifier.ensemble_ = replace(classifier.ensemble_, names=names)
    shots = None
    if document.shots is not None:
        shots = Shots.from_state(document.shots, parts["shots"], classes, classifier.support_)
        counts = list(shots.counts.values())
        if shots.features.layout != classifier.layout_ or counts != classifier.shots_.tolist():
            raise InputError(f"its shots {shots.features} do not fit its classifier.")
        if shots.rule is not None:
            model.threshold, model.random_state = shots.rule.threshold, shots.rule.seed
            model.augmentation = shots.rule.augmentation
    elif parts["shots"]:
        raise InputError("it has tensors of shots that it does not describe.")
    if document.estimate is not None:
        document.estimate.check()
    labels = classes.tolist()
    if rule.other is not None:
        model.other = labels[rule.other]
    elif model.other in labels:  # a class like all others
        model.other = None
    model.recipe = classifier.recipe
    classifier.decision_, classifier.unlabelled_ = rule, document.unlabelled
    model.classifier_, model.classes_, model.identity_ = classifier, classes, identity
    model.shots_, model.templates_ = shots, document.templates
    model.history_, model.estimate_ = list(document.history), document.estimate


@contextmanager
def changing(
    path: str | Path,
    kind: type[M],
    output: str | Path | None = None,
    *,
    keep_old: bool = True,
    **settings: Any,
) -> Iterator[M]:
    """Load a model, let it be changed, and write it, as `mivhead.changing` does."""
    source = Path(path)
    target = source if output is None else Path(output)
    in_place = target.absolute() == source.absolute()
    with files.locked(source) if in_place and source.is_file() else nullcontext():
        model = load(source, kind, **settings)
        if in_place and not os.access(source, os.W_OK):
            raise NotAvailableError(f"{source} is write-protected, so it was not changed.")
        before, stamp = len(model.history_), files.stamp(source)
        yield model
        if len(model.history_) == before:
            return
        if in_place and files.stamp(source) != stamp:  # by a program that ignores the lock
            raise NotAvailableError(
                f"{source} was changed by another program in the meantime, so nothing was "
                "written: run the command again."
            )
        with _keeping(source) if in_place and keep_old else nullcontext():
            save(model, target)


@contextmanager
def _keeping(path: Path) -> Iterator[None]:
    """Keep the contents of a file as `.bak`, as soon as the file has been replaced."""
    kept = path.with_name(f"{path.name}.bak")
    if kept.is_dir():
        raise InputError(f"{kept} is a folder, where the old model would be kept: rename it.")
    with files.replacing(kept) as part:
        try:
            part.hardlink_to(path)  # no copy: the file is about to be replaced, not modified
        except OSError:
            shutil.copy2(path, part)
        yield
