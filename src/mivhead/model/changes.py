"""Changing a model without the images that it came from: add, remove, rename and relabel shots.

`mivhead.model.shots` makes the changed shots, and the classifier is fitted to them. Another name
for a class needs no fit: what was learned stays. If anything fails, the model stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.estimator import check_fitted
from mivhead.backbones.base import check_origin
from mivhead.ensemble.names import names_of
from mivhead.ensemble.unlabelled import UnlabelledUse
from mivhead.errors import InputError, NotAvailableError
from mivhead.features import Features, FeatureTable
from mivhead.images.imageset import ImageSet, from_images, label_images
from mivhead.images.sources import open_labelled
from mivhead.model.fitting import (
    ClassVectors,
    Further,
    read_unlabelled,
    set_fitted,
    with_missing_views,
)
from mivhead.model.naming import embed_classes, read_vectors
from mivhead.model.shots import Change, Shots

if TYPE_CHECKING:
    from mivhead.model.fewshot import FewShotClassifier


def add(
    model: FewShotClassifier,
    images: Any,
    labels: Sequence[Any] | None,
    further: Further,
    *,
    skip_bad: bool,
) -> Change:
    """Add shots, of new classes or of classes that the model has."""
    shots = own_shots(model)
    table = _labelled_table(model, images, labels, skip_bad)
    given = [shots.as_label(label) for label in table.labels or ()]
    joined, added, notes = shots.add(Shots.from_table(table, given))
    if not len(added):
        return Change.now("add", "added nothing", notes)
    counts = ", ".join(
        f"{label} {count}" + ("" if label in shots.every_class else " (a new class)")
        for label, count in added.counts.items()
    )
    text = f"added {len(added)} {'shot' if len(added) == 1 else 'shots'}: {counts}"
    return _refit(model, "add", text, joined, further, notes, skip_bad=skip_bad)


def remove(model: FewShotClassifier, names: Sequence[str], further: Further) -> Change:
    """Remove classes, or single shots."""
    named = names_of(model.classifier_) is not None
    left, classes, singles = own_shots(model).remove(names, named=named)
    parts = [f"the class {label}" for label in classes] + [f"the shot {n}" for n in singles]
    return _refit(model, "remove", f"removed {', '.join(parts)}", left, further)


def rename(
    model: FewShotClassifier, old: Any, new: Any, further: Further, *, merge: bool
) -> Change:
    """Rename a class, or merge it into another one."""
    own, estimate = own_shots(model), model.estimate_
    label = own.find_label(old)
    shots = own.rename(old, new, merge=merge)
    verb = ("merged", "into") if merge else ("renamed", "to")
    text = f"{verb[0]} {old} {verb[1]} {new}"
    name, classifier = own.as_label(new), None
    if not merge and further.unlabelled is None and model.other not in (label, name):
        classifier = model.classifier_.renamed(label, name)
    if classifier is None:
        change = _refit(model, "rename", text, shots, further, renamed=(label, name))
    else:
        change = Change.now("rename", text)
        shots = shots.by_class()
        if own.features is model.classifier_._stored_support:  # kept once
            shots = replace(shots, features=classifier._stored_support)
        model.shots_, model.history_ = shots, [*model.history_, change]
        model.classifier_, model.classes_ = classifier, classifier.classes_
        model.class_prior = classifier.class_prior
    if estimate is not None and not merge and names_of(model.classifier_) is None:
        # Another name does not change the accuracy.
        names = [name if each == label else each for each in own.classes]
        known = dict(zip(names, estimate.per_class, strict=True))
        per_class = tuple(known[name] for name in model.classes_.tolist())
        model.estimate_ = replace(estimate, per_class=per_class)
    return change


def relabel(
    model: FewShotClassifier, moves: Mapping[str, Any], further: Further, *, new: bool
) -> Change:
    """Move shots to other classes."""
    shots, parts = own_shots(model), []
    if not moves or None in moves.values():
        raise InputError("Give the class that the shot belongs to.")
    for each, target in moves.items():
        shots, name, old = shots.relabel(each, target, new=new)
        parts.append(f"{name} from {old} to {target}")
    return _refit(model, "relabel", f"moved {', '.join(parts)}", shots, further)


def own_shots(model: FewShotClassifier) -> Shots:
    """Return the shots, which a model needs to be changed."""
    check_fitted(model, "classifier_")
    if model.shots_ is not None:
        return model.shots_
    if model.needs_images:
        raise InputError(
            f"{model.method} tunes the backbone, so the model does not keep what it learned "
            "from, and it cannot be changed: fit it again on the images."
        )
    raise InputError(
        "The model does not hold the features of its shots, because an earlier version of "
        "mivhead wrote it: to change it, fit it again on the images."
    )


def _labelled_table(
    model: FewShotClassifier, images: Any, labels: Sequence[Any] | None, skip_bad: bool
) -> FeatureTable:
    """Return features of labelled images, without views."""
    if isinstance(images, FeatureTable):
        given = images.labels if labels is None else labels
        if given is None:
            raise InputError("The table has no labels to learn from.")
        if model.identity_ is not None:
            check_origin(images.backbone, model.identity_)
        return replace(images, labels=tuple(given))
    if isinstance(images, str | Path) and labels is None:
        images = open_labelled(images, min_classes=1)
    elif not isinstance(images, ImageSet):
        if labels is None:
            raise InputError("Give a label for every image.")
        images = label_images(from_images(images), labels, min_classes=1)
    model.check_takes(features=False)
    images = model.readable(images, skip_bad=skip_bad)
    return model._feature_reader().table(images, None)


def _refit(
    model: FewShotClassifier,
    action: str,
    text: str,
    shots: Shots,
    further: Further,
    notes: Iterable[str] = (),
    renamed: tuple[Any, Any] | None = None,
    *,
    skip_bad: bool = False,
) -> Change:
    """Fit to changed shots; `renamed` is the old and the new name of a class, if it has one."""
    given, own = further.unlabelled, model.classifier_
    others = read_unlabelled(model, given, own, model.identity_, skip_bad=skip_bad)
    shots = with_missing_views(model, shots.in_order())
    vectors, about_names = _changed_vectors(model, shots, further, renamed)
    prior, about_prior = _changed_prior(model, shots.every_class, renamed)
    classifier = own.refitted(shots.support(others, vectors), **prior)
    missing = [*_what_is_missing(shots), *_what_is_forgotten(model, others)]
    change = Change.now(action, text, [*notes, *missing, *about_names, *about_prior])
    history = [*model.history_, change]
    set_fitted(model, classifier, model.identity_, shots)
    model.history_ = history
    model.class_prior = prior.get("class_prior", model.class_prior)
    return change


def _changed_prior(
    model: FewShotClassifier, classes: Sequence[Any], renamed: tuple[Any, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the parameter of the classifier for its changed classes, and what users should know.

    Only for frequencies that were given class by class: other priors follow from the classes.
    """
    prior = getattr(model.classifier_, "class_prior", None)
    if prior is None or isinstance(prior, str):
        return {}, []
    names = model.classes_.tolist()
    if isinstance(prior, Mapping):
        given = {str(name): share for name, share in prior.items()}
        prior = [given[str(name)] for name in names]
    known = dict(zip(names, map(float, prior), strict=True))
    usual = sum(known.values()) / len(known)
    if renamed is not None:
        old, new = renamed
        known[new] = known.get(new, 0.0) + known.pop(old)  # the sum, if they are merged
    notes = [
        f"The class {name} is expected to be as frequent as the others on average: for another "
        "frequency, fit the model again, or give a prior when you predict."
        for name in classes
        if name not in known
    ]
    return {"class_prior": {name: known.get(name, usual) for name in classes}}, notes


def _changed_vectors(
    model: FewShotClassifier, shots: Shots, further: Further, renamed: tuple[Any, Any] | None
) -> tuple[ClassVectors | None, list[str]]:
    """Return the vectors of the classes of changed shots, and what the user should know."""
    names, given = names_of(model.classifier_), further.class_vectors
    if names is None and given is None:
        return None, []
    old = {} if names is None else dict(zip(model.classes_.tolist(), names.vectors, strict=True))
    if given is not None:
        old |= {shots.as_label(name): vector for name, vector in read_vectors(given).items()}
    new = [label for label in shots.every_class if label not in old]
    notes = []
    if new and model.templates_:
        try:
            old |= embed_classes(model.load_backbone(), new, model.templates_)
        except NotAvailableError as error:
            notes.append(f"The text tower is not available: {error}")
    before = None if renamed is None else renamed[0]
    if [label for label in new if label not in old] and before in old:
        old[new[0]] = old[before]
        notes.append(f"{new[0]} keeps the vector of the name {before}.")
    if missing := [label for label in new if label not in old]:
        raise InputError(
            f"The model knows its classes by vectors of their names, and there is none for "
            f"{missing[0]!r}: give one when you add it (class_vectors, --class-vectors). "
            f"{' '.join(notes)}".strip()
        )
    return {label: old[label] for label in shots.every_class}, notes


def _what_is_missing(shots: Shots) -> list[str]:
    """Say why the result is not exactly that of a fit from scratch."""
    if not (missing := len(shots.missing_views)):
        return []
    return [
        f"The model is now fitted without {missing} of its augmented views: it holds neither "
        "them nor the pictures to make them of, because it was trained on features, is "
        "compact, or was written by an earlier version. To avoid that, fit it again on the "
        "images."
    ]


def _what_is_forgotten(model: FewShotClassifier, unlabelled: Features | None) -> list[str]:
    """Report that the refitted model no longer learns from unlabelled images."""
    before: UnlabelledUse | None = model.classifier_.unlabelled_
    if before is None or not before.used or unlabelled is not None:
        return []
    return [
        f"The model had learned from {before.images} unlabelled images, which it does not "
        "keep: it now learns from its shots alone. To use unlabelled images again, give them "
        "with the change (--unlabelled)."
    ]
