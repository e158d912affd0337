"""What every model does with pictures, and says about itself (`ModelInfo`, `Estimate`).

Fitted and exported models differ in how they read and score pictures. Names and
decisions follow from the scores here. Whoever has decoded pictures (the service, the app's camera,
jobs) enters at `read_pictures` or `classify_pictures`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.text import percent
from mivhead.backbones.base import DecodedImage
from mivhead.decision import (
    MAX_ERRORS,
    REJECT,
    Calibration,
    Prior,
    Thresholds,
    check_class_names,
    class_frequencies,
)
from mivhead.errors import InputError
from mivhead.images.imageset import ImageSet, Skipped, check_images, check_names
from mivhead.images.sources import as_image_set
from mivhead.prediction import Prediction, of_hundred, predictions

Floats: TypeAlias = NDArray[np.floating[Any]]

MAX_CLASSES = 100_000
MAX_CHARACTERS = 2**24  # of an array of names, in which all take as much room as the longest
ALMOST_NOTHING = 0.1  # fraction of photos with a name that is worth a warning


class Scores(NamedTuple):
    """What a model computes for a batch of images."""

    probabilities: Floats  # (image, class)
    unknown: Floats  # (image,): how unlike the shots it is


@dataclass(frozen=True)
class ModelInfo:
    """What a model says about itself."""

    format: int  # version of the file format
    recipe: dict[str, Any]  # how the head was trained and combined
    config: dict[str, Any]  # what else the classifier is rebuilt from: blocks, shots per class
    classes: list[Any]  # the labels: all strings, all integers, all other numbers, or all booleans
    # Identity of the backbone; None if the model was trained on features of unknown origin
    backbone: dict[str, Any] | None
    seed: int  # random seed of the initial weights
    library: str  # version of mivhead that wrote the file


@dataclass(frozen=True)
class Estimate:
    """What to expect of new images, as cross-validation of the shots estimates it."""

    # Mean over classes, and its 95% interval; None if fewer than two classes have several shots
    accuracy: float | None
    low: float | None
    high: float | None
    # Fraction of new images that get the right name, and a wrong one; likewise
    right_names: float | None
    wrong_names: float | None
    # How many shots were predicted by a model that had not seen them, and how many correctly
    tested: int
    right: int

    def __str__(self) -> str:
        """Say what people get, then the accuracy.

        >>> print(Estimate(0.83, 0.7, 0.91, 0.62, 0.05, 15, 12))  # doctest: +ELLIPSIS
        Of 100 new photos like these, about 62 get the right name, 5 a wrong one, ...
        Always naming the closest class would be right for about 83% (95% interval 70% to 91%).
        """
        if self.right_names is None or self.wrong_names is None or self.accuracy is None:
            return (
                "How good the model is, is unknown: that needs two classes with two photos each, "
                "so that some can be left out to test it."
            )
        low, high = percent(self.low or 0.0), percent(self.high or 0.0)
        text = (
            f"{of_hundred(self.right_names, self.wrong_names)}\nAlways naming the closest class "
            f"would be right for about {percent(self.accuracy)} (95% interval {low} to {high})."
        )
        if self.right_names + self.wrong_names < ALMOST_NOTHING:
            text += (
                "\nIt will name almost nothing, because its classes look too alike for so few "
                "photos: add photos\n(five of each class help most), or allow more mistakes with "
                "--max-errors."
            )
        return text

    def check(self) -> None:
        """Raise an error if the values of a file cannot be true."""
        values = (self.accuracy, self.low, self.high, self.right_names, self.wrong_names)
        known = [value for value in values if value is not None]
        if (
            not 0 <= self.right <= self.tested
            or not all(0 <= value <= 1 for value in known)
            or len(known) not in (0, len(values))
        ):
            raise InputError("its estimate does not fit the model.")


class ImageClassifier(ABC):
    """The base class of models that predict the classes of images."""

    classes_: NDArray[Any]  # (class,): the labels, sorted
    skipped_: list[Skipped]  # what the last call with `skip_bad` left out

    @property
    @abstractmethod
    def calibration(self) -> Calibration:
        """What the thresholds of decisions follow from."""

    @property
    @abstractmethod
    def shot_counts(self) -> dict[Any, int]:
        """Number of shots per class."""

    @abstractmethod
    def check_takes(self, *, features: bool, backbone: Mapping[str, Any] | None = None) -> None:
        """Raise an error if the model does not take images, or features of this backbone."""

    @abstractmethod
    def read_pictures(self, pictures: Sequence[DecodedImage]) -> Any:
        """Turn a batch of decoded images, of any size, into what `score_read` takes."""

    @abstractmethod
    def read_parts(self, images: ImageSet) -> Iterator[Any]:
        """Read any number of images in bounded memory, one part after another."""

    @abstractmethod
    def score_read(self, read: Any) -> Scores:
        """Score what `read_pictures` returns and `read_parts` yields."""

    @abstractmethod
    def _given_features(self, given: Any) -> Any | None:
        """Return features as `score_read` takes them, or None if images were given."""

    def predict_proba(self, images: Any) -> Floats:
        """Predict probabilities, in the order of `classes_`.

        Parameters
        ----------
        images : images or features
            Images, a folder, a zip or a single image; or features: a `FeatureTable`, `Features`,
            or a two-dimensional array of floats.

        Returns
        -------
        ndarray of shape (n_images, n_classes)
        """
        if (features := self._given_features(images)) is not None:
            return self.score_read(features).probabilities
        parts = map(self.score_read, self.read_parts(as_image_set(images)))
        return np.concatenate([part.probabilities for part in parts])

    def predict(self, images: Any) -> NDArray[Any]:
        """Predict the most probable class of each image; they are as for `predict_proba`.

        This never says "none of these", even of an image that is unlike all shots: use `classify`.
        """
        probabilities, other = self.predict_proba(images), self.calibration.other
        if other is not None:
            probabilities[:, other] = -1.0  # never a name
        labels: NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return labels

    def classify(
        self,
        images: Any,
        *,
        skip_bad: bool = False,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        class_prior: Prior | None = None,
    ) -> list[Prediction]:
        """Predict names and probabilities, and decide whether a name can be given.

        Parameters
        ----------
        images : images or features
            As for `predict_proba`.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.
        reject : float or None, default=0.1
            Fraction of the images of known classes that may be rejected as "none of these". A
            larger one rejects more images of other things; None or 0 rejects none.
        max_errors : float or None, default=0.1
            Fraction of wrong names among the names that are given; other images are "unsure". None
            is never unsure.
        class_prior : {"uniform", "shots"}, mapping of class to frequency, or None, default=None
            How frequent the classes are among the images: all alike, in proportion to their shots,
            or as given. None: all alike.

        Returns
        -------
        list of Prediction
            One per image, in their order.
        """
        thresholds = self.thresholds(reject, max_errors, class_prior)
        if (features := self._given_features(images)) is not None:
            scores = self.score_read(features)
            ids = getattr(images, "ids", None) or [*map(str, range(len(scores.probabilities)))]
            return self.decide(ids, scores, thresholds)
        readable = self.readable(as_image_set(images), skip_bad=skip_bad)
        return list(chain.from_iterable(self.classify_parts(readable, thresholds)))

    def classify_parts(
        self, images: Any, thresholds: Thresholds | None = None
    ) -> Iterator[list[Prediction]]:
        """Predict any number of images in bounded memory, one list of predictions after another."""
        thresholds = thresholds or self.thresholds()
        image_set = as_image_set(images)
        ids = iter(image_set.ids)
        for scores in map(self.score_read, self.read_parts(image_set)):
            yield self.decide(list(islice(ids, len(scores.probabilities))), scores, thresholds)

    def classify_pictures(
        self,
        pictures: Sequence[DecodedImage],
        ids: Sequence[str] | None = None,
        thresholds: Thresholds | None = None,
    ) -> list[Prediction]:
        """Predict a batch of decoded images, without the feature cache."""
        scores = self.score_read(self.read_pictures(pictures))
        return self.decide(ids or [""] * len(pictures), scores, thresholds)

    def decide(
        self, ids: Sequence[str], scores: Scores, thresholds: Thresholds | None = None
    ) -> list[Prediction]:
        """Turn scores of images with these names into predictions."""
        return predictions(ids, self.classes_, *scores, thresholds or self.thresholds())

    def thresholds(
        self,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        class_prior: Prior | None = None,
    ) -> Thresholds:
        """Return the thresholds of decisions, with the parameters of `classify`."""
        thresholds = self.calibration.thresholds(reject, max_errors)
        if class_prior is None:
            return thresholds
        return replace(thresholds, prior=class_frequencies(class_prior, self.shot_counts))

    def readable(self, images: ImageSet, *, skip_bad: bool = True) -> ImageSet:
        """Leave out images that cannot be read, and list them in `skipped_`."""
        self.skipped_ = check_images(images) if skip_bad else []
        return images.without(self.skipped_)


def plain_classes(classes: NDArray[Any]) -> list[Any]:
    """Return labels as plain values that a file can hold."""
    values: list[Any] = classes.tolist()
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {str, int, float, bool}:
        raise InputError(
            "Only classes that are all strings, all numbers or all booleans can be saved, "
            f"got {values[0]!r}: convert the labels to strings before fitting."
        )
    if kinds == {float} and not all(map(math.isfinite, values)):
        raise InputError("classes must be finite numbers.")
    check_names(value for value in values if isinstance(value, str))
    check_class_names(values)
    return values


def read_classes(values: list[Any]) -> NDArray[Any]:
    """Check the labels of a file: distinct, sorted, all of one type.

    >>> read_classes(["robin", "wren"])
    array(['robin', 'wren'], dtype='<U5')
    """
    if not 2 <= len(values) <= MAX_CLASSES:
        raise InputError(f"it has {len(values)} classes; 2 to {MAX_CLASSES:,} are allowed.")
    longest = max(len(value) if isinstance(value, str) else 1 for value in values)
    if len(values) * longest > MAX_CHARACTERS:
        raise InputError(f"the names of its {len(values)} classes are too long.")
    if any(type(value) is int and abs(value) >= 2**63 for value in values):
        raise InputError("its classes are integers of more than 64 bits.")
    plain = plain_classes(np.asarray(values, dtype=object))
    if sorted(set(plain)) != plain:
        raise InputError("its classes are not distinct and sorted.")
    return np.asarray(plain)
