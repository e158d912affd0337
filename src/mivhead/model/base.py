"""The one door for pictures: every model lists, scores and decides in the same way.

`FewShotClassifier` and `ExportedClassifier` differ in how they read and score pictures. Names,
decisions and sets of classes follow from the scores here. Whoever has decoded pictures (the
service, the app's camera, jobs) enters at `read_pictures` or `classify_pictures`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from mivhead.backbones.preprocessing import DecodedImage
from mivhead.ensemble.balance import UNIFORM, Prior, log_prior
from mivhead.errors import InputError
from mivhead.images.imageset import ImageSet, Skipped, check_images
from mivhead.images.sources import as_image_set
from mivhead.model.decision import MAX_ERRORS, REJECT, Calibration, Thresholds
from mivhead.model.prediction import Prediction, Predictions, predictions

Floats: TypeAlias = NDArray[np.floating[Any]]


class Scores(NamedTuple):
    """What a model computes for a batch of images."""

    probabilities: Floats  # (image, class)
    unknown: Floats | None  # (image,): how unlike the shots it is; None if the model cannot tell


class ImageClassifier(ABC):
    """The base class of models that predict the classes of images.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels, sorted.
    skipped_ : list of Skipped
        Images that the last call with `skip_bad` left out.
    """

    classes_: NDArray[Any]
    skipped_: list[Skipped]
    class_prior: Prior = UNIFORM

    @property
    @abstractmethod
    def calibration(self) -> Calibration | None:
        """Out-of-fold scores of the shots, from which thresholds follow; None if there are none."""

    @property
    @abstractmethod
    def no_decision(self) -> str | None:
        """Why the model always gives a name; None if it can be unsure or say "none of these"."""

    @property
    @abstractmethod
    def shot_counts(self) -> dict[Any, int] | None:
        """Number of shots per class; None if it is not known."""

    @abstractmethod
    def check_takes(self, *, features: bool, backbone: Mapping[str, Any] | None = None) -> None:
        """Raise an error if the model does not take images, or features.

        Parameters
        ----------
        features : bool
            Whether features are given, not images.
        backbone : mapping or None, default=None
            Identity of the backbone that the features come from, if it is known.
        """

    @abstractmethod
    def read_pictures(self, pictures: Sequence[DecodedImage]) -> Any:
        """Turn a batch of decoded images into what `score_read` takes.

        Parameters
        ----------
        pictures : sequence of PIL images or uint8 arrays
            Of any size; those of the backbone's size are not resized.

        Returns
        -------
        Features, pixels, or the input of a graph
        """

    @abstractmethod
    def read_parts(self, images: ImageSet) -> Iterator[Any]:
        """Read any number of images in bounded memory, one part after another.

        Parameters
        ----------
        images : ImageSet
            The images; labels are ignored.

        Yields
        ------
        Features, pixels, or the input of a graph
            Those of the next images, in their order, as `score_read` takes them.
        """

    @abstractmethod
    def score_read(self, read: Any) -> Scores:
        """Score a batch that was read.

        Parameters
        ----------
        read : Features, pixels, or the input of a graph
            What `read_pictures` returns and `read_parts` yields.

        Returns
        -------
        Scores
        """

    @abstractmethod
    def _given_features(self, given: Any) -> Any | None:
        """Return features as `score_read` takes them, or None if images were given."""

    def predict_proba(self, images: Any) -> Floats:
        """Predict probabilities.

        Parameters
        ----------
        images : images or features
            Images, a folder, a zip or a single image; or features: a `FeatureTable`, `Features`,
            or a two-dimensional array of floats.

        Returns
        -------
        ndarray of shape (n_images, n_classes)
            In the order of `classes_`.
        """
        if (features := self._given_features(images)) is not None:
            return self.score_read(features).probabilities
        parts = map(self.score_read, self.read_parts(as_image_set(images)))
        return np.concatenate([part.probabilities for part in parts])

    def classify_pictures(
        self,
        pictures: Sequence[DecodedImage],
        ids: Sequence[str] | None = None,
        thresholds: Thresholds | None = None,
    ) -> list[Prediction]:
        """Predict a batch of decoded images, without the feature cache.

        Parameters
        ----------
        pictures : sequence of PIL images or uint8 arrays
            A few: all of them are in memory at once.
        ids : sequence of str or None, default=None
            Their names in the predictions; None: empty ones.
        thresholds : Thresholds or None, default=None
            When not to give a name; None: as `thresholds()` returns them.

        Returns
        -------
        list of Prediction
            One per picture, in their order.
        """
        scores = self.score_read(self.read_pictures(pictures))
        return self.decide(ids or [""] * len(pictures), scores, thresholds)

    def decide(
        self, ids: Sequence[str], scores: Scores, thresholds: Thresholds | None = None
    ) -> list[Prediction]:
        """Turn scores into predictions.

        Parameters
        ----------
        ids : sequence of str
            Names of the images.
        scores : Scores
            Their scores.
        thresholds : Thresholds or None, default=None
            When not to give a name; None: as `thresholds()` returns them.

        Returns
        -------
        list of Prediction
        """
        return predictions(ids, self.classes_, *scores, thresholds or self.thresholds())

    def classify(
        self,
        images: Any,
        *,
        skip_bad: bool = False,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        coverage: float | None = None,
        class_prior: Prior | None = None,
    ) -> Predictions:
        """Predict names and probabilities, and decide whether a name can be given.

        Parameters
        ----------
        images : images or features
            Images, a folder, a zip or a single image; or features, as for `predict`.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.
        reject : float or None, default=0.1
            Share of the images of known classes that may be rejected as "none of these". A larger
            share rejects more images of other things; None or 0 rejects none.
        max_errors : float or None, default=0.1
            Share of wrong names among the names that are given; other images are "unsure". None
            is never unsure.
        coverage : float or None, default=None
            Share of prediction sets that hold the true class, such as 0.9; None makes no sets.
        class_prior : {"uniform", "shots"}, mapping of class to frequency, or None, default=None
            How frequent the classes are among the images: all alike, in proportion to their shots,
            or as given. None: as the model was fitted, by default all alike.

        Returns
        -------
        Predictions
            A list with one `Prediction` per image, in their order. A notebook shows it as a table
            with thumbnails; `to_frame()` makes it a pandas `DataFrame`.
        """
        thresholds = self.thresholds(reject, max_errors, coverage, class_prior)
        if (features := self._given_features(images)) is not None:
            scores = self.score_read(features)
            ids = getattr(images, "ids", None) or [*map(str, range(len(scores.probabilities)))]
            return Predictions(self.decide(ids, scores, thresholds))
        readable = self.readable(as_image_set(images), skip_bad=skip_bad)
        parts = self.classify_parts(readable, thresholds)
        return Predictions((each for part in parts for each in part), readable.load)

    def classify_parts(
        self, images: Any, thresholds: Thresholds | None = None
    ) -> Iterator[list[Prediction]]:
        """Predict any number of images in bounded memory, one list of predictions after another.

        Parameters
        ----------
        images : images
            As for `classify`.
        thresholds : Thresholds or None, default=None
            When not to give a name; None: as `thresholds()` returns them.

        Yields
        ------
        list of Prediction
            The predictions of the next images, in their order.
        """
        thresholds = thresholds or self.thresholds()
        image_set = as_image_set(images)
        ids = iter(image_set.ids)
        for scores in map(self.score_read, self.read_parts(image_set)):
            yield self.decide(list(islice(ids, len(scores.probabilities))), scores, thresholds)

    def thresholds(
        self,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        coverage: float | None = None,
        class_prior: Prior | None = None,
    ) -> Thresholds:
        """Return the thresholds of decisions, with the parameters of `classify`.

        A model without a decision rule (`no_decision` says why) always gives a name.

        Parameters
        ----------
        reject : float or None, default=0.1
            Share of the images of known classes that may be rejected as "none of these".
        max_errors : float or None, default=0.1
            Share of wrong names among the names that are given.
        coverage : float or None, default=None
            Share of prediction sets that hold the true class.
        class_prior : {"uniform", "shots"}, mapping of class to frequency, or None, default=None
            How frequent the classes are.

        Returns
        -------
        Thresholds
        """
        found = Thresholds()
        if (calibration := self.calibration) is not None:
            found = calibration.thresholds(reject, max_errors, coverage)
        elif coverage is not None:
            raise InputError(f"There are no prediction sets: {self.no_decision}")
        if class_prior is None:
            return found
        counts, names = self.shot_counts, self.classes_.tolist()
        shots = None if counts is None else [counts[name] for name in names]
        own, wanted = (log_prior(each, names, shots) for each in (self.class_prior, class_prior))
        if np.isneginf(own).any():
            raise InputError(
                "The model was fitted with a class that never occurs, so its prior cannot be "
                "changed: fit it again."
            )
        added = wanted - own
        return replace(found, prior=tuple(np.exp(added).tolist())) if added.any() else found

    @overload
    def predict(self, images: Any, *, coverage: None = None) -> NDArray[Any]: ...

    @overload
    def predict(self, images: Any, *, coverage: float) -> list[tuple[Any, ...]]: ...

    def predict(
        self, images: Any, *, coverage: float | None = None
    ) -> NDArray[Any] | list[tuple[Any, ...]]:
        """Predict the most probable class of each image, or a set of classes.

        Parameters
        ----------
        images : images or features
            As for `predict_proba`.
        coverage : float or None, default=None
            Predict sets, as small as possible, so that this share of them contains the true class.

        Returns
        -------
        ndarray of shape (n_images,), or list of tuple
            Class labels; or per image a set of them, the most probable first.
        """
        if coverage is not None:
            return [each.prediction_set or () for each in self.classify(images, coverage=coverage)]
        probabilities, other = self.predict_proba(images), self.thresholds().other
        if other is not None:
            probabilities[:, other] = -1.0  # never a name
        chosen: NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return chosen

    def readable(self, images: ImageSet, *, skip_bad: bool = True) -> ImageSet:
        """Leave out images that cannot be read, and list them in `skipped_`.

        Parameters
        ----------
        images : ImageSet
            The images.
        skip_bad : bool, default=True
            Whether to check them; otherwise nothing is left out.

        Returns
        -------
        ImageSet
        """
        self.skipped_ = check_images(images) if skip_bad else []
        return images.without(self.skipped_)
