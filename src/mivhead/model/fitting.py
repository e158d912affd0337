"""Fitting a model: from images or features to what a `FewShotClassifier` has learned.

Images are read as the method takes them (`mivhead.model.readers`), exact copies are left out, and
the classifier is fitted to one `SupportSet`: shots, views, unlabelled images and class vectors. If
anything fails, the model stays as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead.backbones.background import background_vectors
from mivhead.backbones.base import Backbone, Identity, check_origin
from mivhead.classifier import MIVClassifier
from mivhead.ensemble.unlabelled import LIMIT
from mivhead.errors import InputError, check_no_missing
from mivhead.features import Features, FeatureTable, is_array
from mivhead.images.imageset import ImageSet
from mivhead.images.sources import as_image_set
from mivhead.model.decision import DecisionRule
from mivhead.model.naming import Vectors, name_classes
from mivhead.model.shots import Shots, digests
from mivhead.support import SupportSet

if TYPE_CHECKING:
    from mivhead.model.fewshot import FewShotClassifier

CORE_SPEED = 2e10  # operations of fitting per second of one core, measured
LONG = 10.0  # minutes of fitting that are worth a warning

ClassVectors: TypeAlias = dict[Any, NDArray[Any]]

_log = logging.getLogger(__name__)


class Further(NamedTuple):
    """What a model learns from besides its shots, as `FewShotClassifier.fit` takes it."""

    unlabelled: Any = None
    classes: Sequence[Any] = ()  # without shots
    class_vectors: Vectors | None = None


@contextmanager
def _unchanged_by_errors(model: FewShotClassifier) -> Iterator[None]:
    """Leave a model as it was, fitted or not, if a fit fails."""
    before = dict(vars(model))
    try:
        yield
    except BaseException:
        vars(model).clear()
        vars(model).update(before)
        raise


def fit_images(
    model: FewShotClassifier,
    images: ImageSet,
    labels: Sequence[Any] | None,
    further: Further,
    *,
    skip_bad: bool,
) -> None:
    """Fit a model to labelled images; `labels`, of any type, replace the strings of the images."""
    with _unchanged_by_errors(model):
        model._check_params()  # before the backbone is loaded
        for name in ("identity_", "_loaded"):  # of an earlier fit, perhaps with other parameters
            model.__dict__.pop(name, None)
        started = time.perf_counter()
        backbone = model.load_backbone()
        classifier: Any = model.make_classifier(backbone.preset)
        reader = model._reader(classifier)
        reader.attach(classifier)  # refuses a network that does not suit, before images are read
        model.skipped_ = []
        unlabelled = read_unlabelled(
            model, further.unlabelled, classifier, backbone.identity, skip_bad=skip_bad
        )
        unreadable = model.skipped_
        names, images = images.ids, model.readable(images, skip_bad=skip_bad)
        model.skipped_ += unreadable
        kept = set(images.ids)
        given: Sequence[Any] | None = images.labels
        if labels is not None:
            given = [y for y, name in zip(labels, names, strict=True) if name in kept]
        assert given is not None, "the images are labelled"
        vectors = _name_classes(
            model, classifier, backbone, np.unique(np.asarray(given)).tolist(), further
        )
        found = reader.read(images, given, model._view_rule(backbone.preset))
        if isinstance(found, Shots):
            found = _without_copies(model, found)
        reading = {reader.what: time.perf_counter() - started}
        _fit(model, classifier, found, backbone.identity, unlabelled, vectors, reading)


def fit_table(
    model: FewShotClassifier, table: FeatureTable, labels: Sequence[Any], further: Further
) -> None:
    """Fit a model to features that were extracted before."""
    with _unchanged_by_errors(model):
        check_no_missing("labels", labels)
        model._check_params()
        model.__dict__.pop("identity_", None)
        preset, identity = model._origin(table)
        classifier: Any = model.make_classifier(preset)
        unlabelled = read_unlabelled(model, further.unlabelled, classifier, identity)
        shots = _without_copies(model, Shots.from_table(table, labels).in_order())
        # Features of known origin may be named by their backbone, which is loaded already.
        backbone = None if identity is None else model.load_backbone()
        vectors = _name_classes(model, classifier, backbone, shots.classes, further)
        _fit(model, classifier, shots, identity, unlabelled, vectors)


def _fit(
    model: FewShotClassifier,
    classifier: Any,
    found: Shots | SupportSet,
    identity: Identity | None,
    unlabelled: Features | None,
    vectors: ClassVectors | None,
    reading: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Fit a method; `reading` is the time that it took to read what it is fitted to."""
    started = time.perf_counter()
    shots = None
    if isinstance(found, Shots):
        shots = found.with_unseen(vectors or ())
        found = found.support(unlabelled, vectors)
    if isinstance(classifier, MIVClassifier) and len(found.labels):
        _say_if_long(classifier, found)
    classifier.fit_support(found)
    set_fitted(model, classifier, identity, shots)
    model.fit_seconds_ = {**reading, "training": time.perf_counter() - started}


def set_fitted(
    model: FewShotClassifier, classifier: Any, identity: Identity | None, shots: Shots | None
) -> None:
    """Make a fitted classifier that of a model, without history and estimate."""
    rule: DecisionRule | None = classifier.decision_
    if rule is not None:  # give it the background that decisions use
        vectors = None if identity is None else background_vectors(identity)
        if vectors is not None:
            rule = rule.with_background(vectors)
        names = classifier.classes_.tolist()
        if model.other in names:
            rule = rule.with_other(names.index(model.other))
        classifier.decision_ = rule
    model.classifier_, model.classes_, model.identity_ = classifier, classifier.classes_, identity
    model.shots_, model.history_, model.estimate_ = shots, [], None


def _without_copies(model: FewShotClassifier, shots: Shots) -> Shots:
    """Leave out exact copies of a shot, which would count as further shots of its class."""
    distinct, model.copies_ = shots.distinct()
    return with_missing_views(model, distinct) if model.copies_ else shots


def with_missing_views(model: FewShotClassifier, shots: Shots) -> Shots:
    """Make the views that shots of a smaller class need, if there are pictures of them."""
    if shots.rule is None or not shots.missing_views:
        return shots
    pictures, plan = shots.plan_missing_views()
    if not pictures:
        return shots
    views = model._feature_reader().views(pictures, plan, shots.rule.augmentation)
    return shots.with_views(views)


def _name_classes(
    model: FewShotClassifier,
    classifier: Any,
    backbone: Backbone | None,
    seen: Sequence[Any],
    further: Further,
) -> ClassVectors | None:
    """Return vectors of the names of the classes with shots and of further ones, if names count."""
    if further.class_vectors is not None:
        _check_ensemble(model, classifier, "class vectors")
    named = name_classes(
        backbone if classifier.has_ensemble else None,
        seen,
        further.classes,
        further.class_vectors,
        wanted=model.names,
        templates=model.templates,
    )
    model.templates_ = () if named is None else named.templates
    return None if named is None else named.vectors


def read_unlabelled(
    model: FewShotClassifier,
    unlabelled: Any,
    classifier: Any,
    identity: Identity | None,
    *,
    skip_bad: bool = False,
) -> Features | None:
    """Return features of unlabelled images, in an order that follows from their contents."""
    if unlabelled is None:
        return None
    _check_ensemble(model, classifier, "unlabelled images")
    if isinstance(unlabelled, FeatureTable) and identity is not None:
        check_origin(unlabelled.backbone, identity)
    if is_features(unlabelled):
        given = unlabelled.features if isinstance(unlabelled, FeatureTable) else unlabelled
        features = Features(given)
        found = features[_sample(len(features), model.random_state)]
    else:
        if identity is None and model.backbone is None:
            raise InputError(
                "The shots are features of unknown origin, so the unlabelled images must be "
                "features, too."
            )
        of_shots = list(getattr(model, "skipped_", []))
        images = model.readable(as_image_set(unlabelled), skip_bad=skip_bad)
        images = replace(images, labels=None)
        model.skipped_ = [*of_shots, *model.skipped_]
        images = images.take(_sample(len(images), model.random_state))
        found = model._feature_reader().table(images, None).features
    return found[np.argsort(digests(found), kind="stable")]


def _check_ensemble(model: FewShotClassifier, classifier: Any, what: str) -> None:
    """Raise an error if the method cannot learn from `what`."""
    if not classifier.has_ensemble:
        raise InputError(
            f"{model.method} cannot learn from {what} with these settings: use the method miv with "
            "its default recipe, or omit them."
        )


def _sample(count: int, seed: int) -> list[int]:
    """Return the rows of all unlabelled images or, if they are too many, of a random sample."""
    if count <= LIMIT:
        return list(range(count))
    chosen = np.random.default_rng(seed).choice(count, LIMIT, replace=False)
    return sorted(chosen.tolist())


def is_features(X: Any) -> bool:
    """Return whether X holds features; a table of floating-point numbers is not an image."""
    table = is_array(X) and X.ndim == 2
    return isinstance(X, FeatureTable | Features) or (table and "float" in str(X.dtype))


def _say_if_long(classifier: MIVClassifier, support: SupportSet) -> None:
    """Log a warning if fitting takes many minutes: the cost grows with the square of the shots."""
    from mivhead.methods.cost import BackboneWork, TaskSize
    from mivhead.methods.miv import work

    views = np.bincount(support.view_rows, minlength=len(support.labels))
    size = TaskSize.from_labels(support.labels.tolist(), views.tolist())
    counted = work(classifier, size, support.features, BackboneWork(0.0))
    minutes = (2 * counted.products + counted.others) / CORE_SPEED / 60
    if minutes > LONG:
        _log.warning(
            "Fitting %s shots takes roughly %s minutes on one core: the cost grows with the square "
            "of their number. Fewer shots per class, or a method such as ridge, take far less.",
            f"{len(support.labels):,}",
            f"{minutes:,.0f}",
        )
