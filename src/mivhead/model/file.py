"""The model file: one safetensors file that is safe to load from anyone.

Its metadata key `mivhead` holds a JSON document: `format`, `method`, `recipe`, `config`, `classes`,
`backbone`, `seed` and `library`. Its tensors are the trained parameters (`params.*`) and the
features of the support images (`support.*`), which are part of the model. Loading runs no code from
the file, needs no backbone, and checks every name, type, shape and value.

What a model may have, but need not have, is an optional section (`SECTIONS`): one more key of the
document, which ends in its version, such as `shots.v1`, and tensors under a prefix of its own.

A compact file leaves out the zeros of features that are mostly zeros (`_sparse`). In all others,
every reader of safetensors finds the tensors under their names.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mivhead._util import files
from mivhead._util.estimator import check_fitted
from mivhead._util.schema import from_json, to_json
from mivhead._version import __version__
from mivhead.backbones.base import Backbone, Identity, expected_preset, named_by_file
from mivhead.backbones.efficientnet_lite import comes_with_mivhead
from mivhead.classifier import FeatureClassifier, MIVClassifier
from mivhead.ensemble.balance import UNIFORM
from mivhead.ensemble.names import Names, compared, names_of
from mivhead.ensemble.unlabelled import UnlabelledUse
from mivhead.errors import InputError, ModelFileError, NotAvailableError
from mivhead.features import FeatureTable
from mivhead.images.augmentation import ViewRule
from mivhead.methods.registry import METHODS, Classifier, make_method, method_name
from mivhead.model.decision import DecisionRule
from mivhead.model.fewshot import FewShotClassifier
from mivhead.model.fitting import set_fitted
from mivhead.model.info import Estimate, ModelInfo, plain_classes, read_classes
from mivhead.model.shots import Change, Shots

Array = NDArray[Any]

FORMAT = 1


@dataclass(frozen=True)
class Section:
    """An optional part of a model file, versioned on its own.

    A file of an earlier version lacks it. A section that changes in an incompatible way gets a new
    name; the old one stays in `SECTIONS` for reading.
    """

    name: str  # its key in the JSON document: a word, `.v` and its version, such as `"shots.v1"`
    # First part of the names of its tensors, such as `"views"` for `views.block0.map`; no other
    # part of a file uses it
    prefix: str
    # Called with the model that is saved. Returns the JSON value and the tensors by name, without
    # the prefix; None if the model has no such part.
    write: Callable[[FewShotClassifier], tuple[Any, Mapping[str, Array]] | None]
    # Called with the loaded `FewShotClassifier`, the JSON value and the tensors, neither of which
    # can be trusted. Checks everything, raises `InputError`, and sets attributes of the model.
    read: Callable[[FewShotClassifier, Any, Mapping[str, Array]], None]


def _write_decision(model: FewShotClassifier) -> tuple[Any, Mapping[str, Array]] | None:
    rule: DecisionRule | None = model.classifier_.decision_
    return None if rule is None else rule.state()


def _read_decision(model: FewShotClassifier, document: Any, tensors: Mapping[str, Array]) -> None:
    rule = DecisionRule.from_state(document, tensors, len(model.classes_))
    model.classifier_.decision_ = rule
    names = model.classes_.tolist()
    if rule.other is not None:
        model.other = names[rule.other]
    elif model.other in names:  # a class like all others
        model.other = None


def _write_shots(model: FewShotClassifier) -> tuple[Any, Mapping[str, Array]] | None:
    if (shots := model.shots_) is None:
        return None
    if model.identity_ is not None and comes_with_mivhead(model.identity_) and shots.can_make_views:
        shots = shots.without_views()
    classifier: FeatureClassifier = model.classifier_
    return shots.to_file(classifier._stored_support, classifier._view_blocks)


def _read_shots(model: FewShotClassifier, document: Any, tensors: Mapping[str, Array]) -> None:
    classifier = model.classifier_
    if not isinstance(classifier, FeatureClassifier):
        raise InputError("a model with a tuned backbone has no features of shots.")
    shots = Shots.from_file(document, tensors, model.classes_, classifier._stored_support)
    if shots.features.layout != classifier.layout_:
        raise InputError(f"the shots {shots.features} do not fit {classifier.layout_}.")
    counts = list(shots.counts.values())
    if isinstance(classifier, MIVClassifier) and counts != classifier.shots_.tolist():
        raise InputError(f"shots.v1.counts are {counts}, and config.shots {classifier.shots_}.")
    model.shots_ = shots
    if shots.rule is not None:  # so that the model can be fitted again
        model.threshold, model.random_state = shots.rule.threshold, shots.rule.seed
        model.augmentation = shots.rule.augmentation


def _write_history(model: FewShotClassifier) -> tuple[Any, Mapping[str, Array]] | None:
    if not model.history_:
        return None
    return [{name: getattr(each, name) for name in _HISTORY} for each in model.history_], {}


def _read_history(model: FewShotClassifier, document: Any, tensors: Mapping[str, Array]) -> None:
    if tensors or not isinstance(document, list):
        raise InputError("history.v1 must be a list, without tensors.")
    model.history_ = [from_json(Change, each, "history.v1") for each in document]


def _write_unlabelled(model: FewShotClassifier) -> tuple[Any, Mapping[str, Array]] | None:
    use: UnlabelledUse | None = model.classifier_.unlabelled_
    return None if use is None else (to_json(use), {})


def _read_unlabelled(model: FewShotClassifier, document: Any, tensors: Mapping[str, Array]) -> None:
    use = from_json(UnlabelledUse, document, "unlabelled.v1")
    if tensors or use.images < 1 or not isinstance(model.classifier_, MIVClassifier):
        raise InputError("unlabelled.v1 does not fit the model.")
    model.classifier_.unlabelled_ = use


def _write_estimate(model: FewShotClassifier) -> tuple[Any, Mapping[str, Array]] | None:
    return None if model.estimate_ is None else (to_json(model.estimate_), {})


def _read_estimate(model: FewShotClassifier, document: Any, tensors: Mapping[str, Array]) -> None:
    estimate = from_json(Estimate, document, "estimate.v1")
    estimate.check(len(model.classes_))
    if tensors:
        raise InputError("estimate.v1 has no tensors.")
    model.estimate_ = estimate


def _write_names(model: FewShotClassifier) -> tuple[Any, Mapping[str, Array]] | None:
    names = names_of(model.classifier_)
    if names is None:
        return None
    document, tensors = names.state()
    return document | {"templates": list(model.templates_)}, tensors


def _read_names(model: FewShotClassifier, document: Any, tensors: Mapping[str, Array]) -> None:
    classifier = model.classifier_
    if not isinstance(classifier, MIVClassifier) or classifier.ensemble_ is None:
        raise InputError("names.v1 does not fit the method.")
    document = dict(document) if isinstance(document, Mapping) else {}
    templates = document.pop("templates", None)
    if not isinstance(templates, list) or not all(isinstance(each, str) for each in templates):
        raise InputError("names.v1.templates must be a list of strings.")
    width = classifier.support_.blocks[-1].channels
    names = Names.from_state(document, tensors, classifier.shots_, width)
    classifier.ensemble_ = replace(classifier.ensemble_, names=names)
    model.templates_ = tuple(templates)


def _check_shots(classifier: Any) -> None:
    """Check that every class has shots, or a name that is used; names may also be all there is."""
    if not isinstance(classifier, MIVClassifier):
        return
    if len(compared(classifier.shots_)) < len(classifier.shots_):
        names = names_of(classifier)
        if names is None or not names.used:
            raise InputError("a class has neither shots nor a name.")


_HISTORY = ("action", "text", "when")
SECTIONS: tuple[Section, ...] = (
    Section("shots.v1", "shots", _write_shots, _read_shots),
    Section("history.v1", "history", _write_history, _read_history),
    Section("decision.v1", "decision", _write_decision, _read_decision),
    Section("unlabelled.v1", "unlabelled", _write_unlabelled, _read_unlabelled),
    Section("estimate.v1", "estimate", _write_estimate, _read_estimate),
    Section("names.v1", "names", _write_names, _read_names),
)
_SCALE = "scale"  # key of `config`: `FeatureClassifier.scale_`, if it is not 0
_SPARSE = "sparse.v1"  # section of the tensors without their zeros; it is read before all others
_FEATURES, _LARGE = ("support.", "shots.support.", "shots.views."), 2**16  # what is worth it
_SECTION_NAME = re.compile(r"[a-z_]+\.v[0-9]+")


def save(model: FewShotClassifier | Classifier, path: str | Path, *, compact: bool = False) -> None:
    """Write a fitted model to one file, atomically.

    The file contains features of the support images and, for a `FewShotClassifier`, small pictures
    of them: treat it like the images themselves.

    Parameters
    ----------
    model : FewShotClassifier, or an estimator on features such as MIVClassifier
        The fitted model.
    path : str or Path
        The file to write.
    compact : bool, default=False
        Write a smaller file, as `FewShotClassifier.save` does.

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
    if compact and (shots := model.shots_) is not None:
        model = copy(model)
        model.shots_ = shots.compact()
    document, tensors = _contents(model)
    for section in SECTIONS:
        if (part := section.write(model)) is not None:
            document[section.name], own = part
            tensors |= {f"{section.prefix}.{name}": tensor for name, tensor in own.items()}
    if compact:
        shapes, tensors = _sparse(tensors)
        document |= {_SPARSE: shapes} if shapes else {}
    files.write(path, tensors, document)


def as_model(model: FewShotClassifier | Classifier) -> FewShotClassifier:
    """Return a fitted model as it is, and an estimator as a model without backbone and shots."""
    check_fitted(model, "classes_")
    if isinstance(model, FewShotClassifier):
        return model
    made = FewShotClassifier(None, method=method_name(model), other=None)
    set_fitted(made, model, None, None)
    return made


def info_of(model: FewShotClassifier) -> ModelInfo:
    """Return what a file of a fitted model would say about it."""
    return ModelInfo(**_contents(model)[0])


def _contents(model: FewShotClassifier) -> tuple[dict[str, Any], dict[str, Array]]:
    """Make the document and the tensors of a model, without optional sections."""
    identity, trained = model.identity_, model.classifier_
    config, tensors = trained._state()
    if any(scale := trained.scale_):
        config[_SCALE] = list(scale)
    document = {
        "format": FORMAT,
        "method": method_name(trained),
        "recipe": config.pop("recipe", None),
        "config": config,
        "classes": plain_classes(trained.classes_),
        "backbone": None if identity is None else identity.as_json(),
        "seed": trained.seed_,
        "library": __version__,
    }
    return document, tensors


def load(
    path: str | Path,
    *,
    backbone: str | Backbone | Sequence[str | Backbone] | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
    method: type[Any] | None = None,
) -> FewShotClassifier:
    """Read a model file, with the parameters of `mivhead.load`.

    The model predicts on features without a backbone. On images it predicts if the file names a
    backbone, or one is given.
    """
    tensors, document = files.read(path)
    files.check_format(path, document, FORMAT)
    try:
        tensors = _dense(document.pop(_SPARSE, {}), tensors)
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    parts = _take_sections(path, document, tensors)
    try:
        info = from_json(ModelInfo, document, "the description")
        classifier = _unfitted(info.method, method, device)
        classifier.classes_ = read_classes(info.classes)
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
        class_prior=getattr(classifier, "class_prior", UNIFORM),
        device=device,
    )
    if identity is None and model.needs_images:
        raise ModelFileError(f"{path} cannot be used: it names no backbone for its adapters.")
    named = any(section.name == "shots.v1" for section, *_ in parts)
    shots = None if named else _unnamed_shots(classifier, identity)
    set_fitted(model, classifier, identity, shots)
    try:
        for section, value, own in parts:
            section.read(model, value, own)
        _check_shots(classifier)
    except InputError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    return model


@contextmanager
def changing(
    path: str | Path,
    output: str | Path | None = None,
    *,
    keep_old: bool = True,
    **how: Any,
) -> Iterator[FewShotClassifier]:
    """Load a model, let it be changed, and write it; if anything fails, nothing is written.

    Only one process at a time changes a file: others get an error, and can try again.

    Parameters
    ----------
    path : str or Path
        The model file.
    output : str or Path or None, default=None
        Where to write the changed model; None replaces the file, atomically.
    keep_old : bool, default=True
        Keep the replaced file under its name with `.bak` added.
    **how : dict
        Parameters of `load`.

    Yields
    ------
    FewShotClassifier
        The model, to call `add`, `remove`, `rename` or `relabel` on. A model that was not changed
        is not written.

    Examples
    --------
    >>> import tempfile, numpy as np, mivhead
    >>> from mivhead.features import Features, FeatureTable
    >>> table = FeatureTable(Features(np.eye(3, 8)), ("1", "2", "3"), ("cat", "dog", "cow"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mivhead.FewShotClassifier(None).fit_table(table).save(f"{folder}/model.miv")
    ...     with mivhead.changing(f"{folder}/model.miv") as model:
    ...         model.rename("cow", "bull").text
    ...     mivhead.load(f"{folder}/model.miv").classes_.tolist()
    'renamed cow to bull'
    ['bull', 'cat', 'dog']
    """
    source = Path(path)
    target = source if output is None else Path(output)
    in_place = target.absolute() == source.absolute()
    if not in_place:
        model = load(source, **how)
        before = len(model.history_)
        yield model
        if len(model.history_) > before:
            model.save(target)
        return
    with _lock(source):
        model = load(source, **how)
        before, stamp = len(model.history_), files.stamp(source)
        yield model
        if len(model.history_) == before:
            return
        if files.stamp(source) != stamp:  # by a program that does not look at the lock
            raise NotAvailableError(
                f"{source} was changed by another program in the meantime, so nothing was "
                "written: run the command again."
            )
        if keep_old:
            _keep(source)
        model.save(source)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Make sure that no other process changes a model file."""
    if not path.is_file():
        raise ModelFileError(f"{path} does not exist.")
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise NotAvailableError(
            f"Another process is changing {path}; nothing was changed: try again when it is done."
        ) from None
    except OSError as error:
        raise NotAvailableError(f"Cannot write to {path.parent}: {error.strerror}.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def _keep(path: Path) -> None:
    """Keep the contents of a file as `.bak`, atomically."""
    with files.replacing(path.with_name(f"{path.name}.bak")) as part:
        try:
            part.hardlink_to(path)  # no copy: the file is about to be replaced, not modified
        except OSError:
            shutil.copy2(path, part)


def read_info(path: str | Path) -> ModelInfo:
    """Read what a model file says about itself, without its sections; `load` checks its tensors."""
    tensors, document = files.read(path, arrays=False)
    files.check_format(path, document, FORMAT)
    document.pop(_SPARSE, None)
    _take_sections(path, document, tensors)
    try:
        return from_json(ModelInfo, document, "the description")
    except InputError as error:
        raise ModelFileError(f"{path} is not a model file: {error}") from error


def _unnamed_shots(classifier: Classifier, identity: Identity | None) -> Shots | None:
    """Make shots of the features in a file without a section for them, as 0.1.0 wrote it."""
    if not isinstance(classifier, MIVClassifier):
        return None
    support, counts = classifier.support_, classifier.shots_
    if support.layout != classifier.layout_ or len(support) != sum(counts):  # not all is there
        return None
    names = tuple(
        f"{label} #{number}"
        for label, count in zip(classifier.classes_, counts, strict=True)
        for number in range(1, count + 1)
    )
    rule = None
    if identity is not None and classifier.head_.recipe.use_views:
        rule = to_json(
            ViewRule(expected_preset(identity).threshold, classifier.head_.recipe.views_rule)
        )
    table = FeatureTable(support, names, view_rule=rule)
    shots = Shots.from_table(table, np.repeat(classifier.classes_, counts))
    return replace(shots, unseen=tuple(classifier.classes_[counts == 0].tolist()))


def _sparse(
    tensors: Mapping[str, Array],
) -> tuple[dict[str, list[int]], dict[str, Array]]:
    """Leave the zeros out of large tensors of features, if that at least halves them.

    Such a tensor becomes two, `sparse.{name}.mask`, a bit per value, and `sparse.{name}.values`.
    Not a bit is lost: a negative zero is a value like any other.
    """
    shapes: dict[str, list[int]] = {}
    written: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if name.startswith(_FEATURES) and tensor.nbytes >= _LARGE:
            flat = np.ascontiguousarray(tensor).reshape(-1)
            used = flat.view(f"u{flat.itemsize}") != 0
            mask = np.packbits(used)
            if 2 * (mask.nbytes + np.count_nonzero(used) * flat.itemsize) <= flat.nbytes:
                shapes[name] = list(tensor.shape)
                written[f"sparse.{name}.mask"] = mask
                written[f"sparse.{name}.values"] = flat[used]
                continue
        written[name] = tensor
    return shapes, written


def _dense(shapes: Any, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Undo `_sparse`, trusting nothing."""
    if not isinstance(shapes, dict):
        raise InputError(f"{_SPARSE} must be an object.")
    found = dict(tensors)
    total = 0
    for name, shape in shapes.items():
        mask = found.pop(f"sparse.{name}.mask", None)
        values = found.pop(f"sparse.{name}.values", None)
        fits = isinstance(shape, list) and 0 < len(shape) <= 8
        if mask is None or values is None or name in found or not fits:
            raise InputError(f"{_SPARSE} does not fit the tensors: {name!r:.80}.")
        if not all(type(n) is int and n > 0 for n in shape):
            raise InputError(f"tensor {name!r:.80} has wrong sizes in {_SPARSE}.")
        size = math.prod(shape)
        total += size * values.itemsize
        if (
            mask.dtype != np.uint8
            or (values.dtype.kind, values.ndim) != ("f", 1)
            or mask.shape != (-(-size // 8),)
            or total > files.MAX_BYTES
        ):
            raise InputError(f"tensor {name!r:.80} has wrong sizes in {_SPARSE}.")
        used = np.unpackbits(mask, count=size).view(bool)
        if np.count_nonzero(used) != len(values):
            raise InputError(f"tensor {name!r:.80} has {len(values)} values for another mask.")
        flat = np.zeros(size, values.dtype)
        flat[used] = values
        found[name] = flat.reshape(shape)
    return found


def _take_sections(
    path: str | Path, document: dict[str, Any], tensors: dict[str, Array]
) -> list[tuple[Section, Any, dict[str, Array]]]:
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
            "which this version cannot read: update mivhead."
        )
    return parts


def _unfitted(name: str, own: type[Any] | None, device: str | None) -> Classifier:
    """Make the estimator that a file names: a registered one, or that of the class in hand."""
    home = None if own is None else f"{own.__module__}:{own.__qualname__}"
    registered = METHODS[name].home if name in METHODS else None
    if own is not None and home not in (name, registered):
        raise InputError(f"it was fitted with the method {name!r:.200}, not with {home}.")
    if own is None and registered is None:  # whatever is imported, a file must not run it
        raise InputError(
            f"it was fitted with the method {name!r:.200}, which is not registered: give its class "
            "with `mivhead.load(path, method=...)`, or register it with `register_method` or as an "
            "entry point of its package."
        )
    classifier: Classifier = make_method(name, device=device)
    return classifier


def _read_scale(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(power) is int for power in value):
        raise InputError(f"config.{_SCALE} is not valid: {value!r:.80}.")
    return tuple(value)


def _check_scale(classifier: Classifier) -> None:
    scale = classifier.scale_
    blocks = {name.partition(".")[0] for name in getattr(classifier, "layout_", ())}
    if scale and len(scale) != len(blocks):
        raise InputError(f"config.{_SCALE} has {len(scale)} entries for {len(blocks)} blocks.")
