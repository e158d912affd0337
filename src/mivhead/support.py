"""The support set: what a classifier is fitted to, in one object from the images to the fit.

`SupportSet.read` checks features and labels of any kind, as scikit-learn's `fit` takes them, and
orders them by class. The shots of a model (`mivhead.model.shots`) are in that order already.
Unlabelled images and vectors of class names are part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead._util.estimator import read_labels
from mivhead.errors import InputError, check_no_missing
from mivhead.features import Features


class ClassVectors(NamedTuple):
    """Vectors of the names of all classes, in the space of the last block."""

    vectors: NDArray[np.float32]  # (class, channel), of length 1
    seen: NDArray[np.int64]  # (class with shots,): which of the classes have shots


@dataclass(frozen=True, eq=False)
class SupportSet:
    """A checked support set, its images ordered by class."""

    features: Any  # Features; pixels (image, R, R, 3) for a method that tunes the backbone
    labels: NDArray[np.int64]  # numbers of the classes with shots, ascending
    views: Any  # augmented views of the images, like `features`; None if there are none
    view_rows: NDArray[np.int64]  # the image that each view was made from
    unlabelled: Features | None = None  # images without labels
    class_vectors: ClassVectors | None = None  # of the names of the classes
    # The labels of all classes, sorted: those without shots, too. Training does not need them.
    classes: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def read(
        cls,
        features: Any,
        y: ArrayLike,
        views: Any = None,
        view_of: ArrayLike | None = None,
        unlabelled: Any = None,
        class_vectors: ArrayLike | Mapping[Any, ArrayLike] | None = None,
    ) -> Self:
        """Check what is given, and order it by class.

        Parameters
        ----------
        features : Features, or pixels of shape (image, R, R, 3)
            One row per image.
        y, views, view_of, unlabelled, class_vectors
            As for `mivhead.classifier.FeatureClassifier.fit`.
        """
        named = isinstance(class_vectors, Mapping)
        classes, labels = encode(y, len(features), named=named)
        extra, rows = _read_views(views, view_of, features)
        order = np.argsort(labels, kind="stable")
        place = np.argsort(order)  # position of each image in that order
        support = cls(features[order], labels[order], extra, place[rows], classes=classes)
        return support.with_others(unlabelled, class_vectors)

    def with_others(
        self,
        unlabelled: Any = None,
        class_vectors: ArrayLike | Mapping[Any, ArrayLike] | None = None,
    ) -> Self:
        """Add unlabelled images and vectors of class names, if there are any."""
        if unlabelled is None and class_vectors is None:
            return self
        classes, vectors = self.classes, None
        if class_vectors is not None:
            width = self.features.blocks[-1].channels
            classes, vectors = _read_class_vectors(class_vectors, classes, width)
        others = None if unlabelled is None else _read_unlabelled(unlabelled, self.features)
        return replace(self, unlabelled=others, class_vectors=vectors, classes=classes)

    @property
    def view_labels(self) -> NDArray[np.int64]:
        """Class numbers of the views."""
        return self.labels[self.view_rows]

    @property
    def sources(self) -> NDArray[np.int64]:
        """The image that each of `everything` was made from."""
        return np.concatenate([np.arange(len(self.labels)), self.view_rows])

    def take(self, kept: NDArray[np.bool_]) -> SupportSet:
        """Keep some images of every class, and the views of these."""
        place = np.cumsum(kept) - 1  # position of each kept image among them
        used = kept[self.view_rows]
        views = self.views[np.flatnonzero(used)] if self.views is not None and used.any() else None
        rows = np.flatnonzero(kept)
        return SupportSet(
            self.features[rows],
            self.labels[rows],
            views,
            place[self.view_rows[used]],
            classes=self.classes if self.class_vectors is None else self.classes[self.seen],
        )

    def divide(self, exponents: Sequence[int]) -> Self:
        """Divide the values of every block by a power of two, as `Features.divide` does."""
        if not any(exponents):
            return self
        views, others = self.views, self.unlabelled
        return replace(
            self,
            features=self.features.divide(exponents),
            views=None if views is None else views.divide(exponents),
            unlabelled=None if others is None else others.divide(exponents),
        )

    @property
    def seen(self) -> NDArray[np.int64]:
        """The numbers, among all classes, of those with shots."""
        if self.class_vectors is not None:
            return self.class_vectors.seen
        return np.arange(len(self.shots))

    @property
    def shots(self) -> list[int]:
        """Images per class."""
        counts: list[int] = np.bincount(self.labels).tolist()
        return counts

    @property
    def everything(self) -> Any:
        """Images and views, the images first."""
        if self.views is None:
            return self.features
        if isinstance(self.features, Features):
            return Features.concat([self.features, self.views])
        return np.concatenate([self.features, self.views])

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """Class numbers of `everything`."""
        return np.concatenate([self.labels, self.view_labels])


def encode(y: ArrayLike, n: int, *, named: bool = False) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Check the labels of n images; return the classes, sorted, and each image's class number.

    If there are vectors of class names (`named`), fewer than two classes may have images.
    """
    if y is None:
        raise InputError("This classifier requires y to be passed, but the target y is None.")
    if isinstance(y, Iterable):  # before NumPy makes strings of None and NaN
        check_no_missing("y", y)
    values = read_labels(y)
    if len(values) != n:
        raise InputError(f"X holds {n} images, but y has {len(values)} labels.")
    classes, labels = np.unique(values, return_inverse=True)
    if len(classes) < 2 and not named:
        found = f"{len(classes)} class{'es' * (not len(classes))}"
        raise InputError(f"y holds {found}; a classifier needs at least 2 classes.")
    return classes, labels.astype(np.int64)


def _read_views(
    views: Any, view_of: ArrayLike | None, features: Any
) -> tuple[Any, NDArray[np.int64]]:
    """Return the views, None if there are none, and the row of each one's image."""
    if views is None:
        if view_of is not None:
            raise InputError("view_of is given without views.")
        return None, np.empty(0, np.int64)
    extra = views
    if isinstance(features, Features):
        extra = Features(views)
        if extra.layout != features.layout:
            raise InputError(f"views have other blocks than X: {extra} and {features}.")
    rows = np.asarray([] if view_of is None else view_of)
    if rows.shape != (len(extra),) or (len(rows) and rows.dtype.kind not in "iu"):
        raise InputError(
            f"view_of must hold one row number of X for each of the {len(extra)} views, "
            f"got shape {rows.shape} of type {rows.dtype}."
        )
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(features)):
        raise InputError(f"view_of must hold rows of X, 0 to {len(features) - 1}.")
    return extra if len(rows) else None, rows.astype(np.int64)


def _read_unlabelled(unlabelled: Any, features: Features) -> Features:
    """Check features of unlabelled images, whose layout must be that of the shots."""
    found = Features(unlabelled)
    if found.layout != features.layout:
        raise InputError(f"The unlabelled images have other blocks than X: {found} and {features}.")
    if not len(found):
        raise InputError("There are no unlabelled images: give at least one, or omit them.")
    return found


def _read_class_vectors(
    given: ArrayLike | Mapping[Any, ArrayLike], classes: NDArray[Any], width: int
) -> tuple[NDArray[Any], ClassVectors]:
    """Check class vectors; return all classes, sorted, and the vectors in their order.

    Parameters
    ----------
    given : array or mapping
        As for `FeatureClassifier.fit`.
    classes : array
        The classes that have shots, sorted.
    width : int
        Number of channels of an image's vector.
    """
    if isinstance(given, Mapping):
        missing = [label for label in classes.tolist() if label not in given]
        if missing:
            raise InputError(
                f"class_vectors has no vector for the class {missing[0]!r}: every class needs one."
            )
        check_no_missing("class_vectors", given)
        labels = read_labels(np.asarray(list(given)))
        if len(labels) < 2:
            raise InputError(
                f"There is {len(labels)} class; a classifier needs at least 2 classes."
            )
        if not len(classes):
            classes = labels[:0]  # of no class there are shots
        if labels.dtype.kind != classes.dtype.kind:
            raise InputError("The labels of class_vectors have another type than those in y.")
        rows = list(given.values())
    else:
        try:
            labels, rows = classes, list(np.asarray(given))
        except (TypeError, ValueError):  # a single value, or a ragged list
            raise InputError(
                "class_vectors must be an array with one row per class, or a mapping of classes to "
                f"vectors, got {given!r:.80}."
            ) from None
    if len(rows) != len(labels):
        raise InputError(f"class_vectors has {len(rows)} vectors for {len(labels)} classes.")
    vectors = np.empty((len(rows), width), np.float64)
    for i, (label, row) in enumerate(zip(labels.tolist(), rows, strict=True)):
        vector = _numbers(row, label)
        if vector.shape != (width,):
            raise InputError(
                f"The class vector of {label!r} has the shape {vector.shape}, expected ({width},): "
                "it must be in the space of the last block of the features, such as the text "
                "embedding of the same model."
            )
        with np.errstate(all="ignore"):
            length = float(np.linalg.norm(vector))
        if not np.isfinite(length) or not length > 0:
            raise InputError(
                f"The class vector of {label!r} has no direction: it holds NaN, infinity or only "
                "zeros."
            )
        vectors[i] = vector / length
    order = np.argsort(labels, kind="stable")
    seen = np.flatnonzero(np.isin(labels[order], classes))
    found = ClassVectors(vectors[order].astype(np.float32), seen)
    return np.concatenate([labels, classes])[order], found


def _numbers(row: Any, label: Any) -> NDArray[np.float64]:
    """Read the numbers of a class vector."""
    try:
        vector = np.asarray(row)
    except ValueError:  # a ragged list
        vector = np.empty(0, object)
    if vector.dtype.kind not in "fiu":
        raise InputError(f"The class vector of {label!r} must be a list of numbers.")
    return vector.astype(np.float64)
