"""`FewShotClassifier`: images in, names out; everything that a fitted model can do.

A method sees images in one of two ways, which the two readers at the end of this module provide:
as features of a frozen backbone, or, if it tunes the backbone, as pixels for a copy of its network.
Everything else is the same for all methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mivhead._progress import progress_bar
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import (
    Backbone,
    Identity,
    LazyBackbone,
    check_origin,
    check_same,
    expected_preset,
    named_by_file,
)
from mivhead.backbones.module import ModuleBackbone
from mivhead.backbones.preprocessing import preprocess, to_pixels
from mivhead.decision import MAX_ERRORS, REJECT, DecisionRule, Thresholds
from mivhead.errors import InputError
from mivhead.extraction.cache import FeatureCache, open_cache
from mivhead.extraction.pipeline import PART, LoadedImage, extract_table, iter_features
from mivhead.features import Features, FeatureTable
from mivhead.head.recipe import Recipe
from mivhead.images.augmentation import NO_VIEWS, Augmentation, ViewPlan, plan_views
from mivhead.images.decoding import ImageLike
from mivhead.images.imageset import (
    ImageSet,
    Skipped,
    check_images,
    check_names,
    from_images,
    label_images,
)
from mivhead.images.sources import as_image_set, open_labelled
from mivhead.methods.miv import views_rule
from mivhead.methods.registry import Classifier, get_method, make_method, method_name
from mivhead.methods.tuning.base import Network, Pixels
from mivhead.prediction import Prediction, predictions
from mivhead.preset import Preset

__all__ = ["FewShotClassifier", "Prediction"]


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # sklearn: untyped
    """Few-shot image classifier on a frozen backbone.

    Images may be paths, PIL images or uint8 arrays; where many are expected, a folder, a zip or a
    single image will do as well. A fitted model also predicts on features, without its backbone:
    a `FeatureTable`, `Features`, or a two-dimensional array of floats.

    Parameters
    ----------
    backbone : str, Backbone or None, default="efficientnet_lite0"
        What `mivhead.backbones.load_backbone` takes, such as a name of
        `mivhead.backbones.list_backbones()`, or a `Backbone` of your own. None: for images the
        default backbone, for a table of features the backbone that the table names.
    weights : str, Path or None, default=None
        A checkpoint for a backbone given by name.
    image_size : int or None, default=None
        Side of the input of a backbone `timm:NAME`, in pixels. None: that of its training.
    method : str, default="miv"
        The name of a method (`mivhead.methods.list_methods()`), or a class of your own as
        `module:Class`.
    method_params : Mapping or None, default=None
        Hyperparameters of the method, by name.
    recipe : str, Recipe or None, default=None
        How the MIV-head is trained: `"mivhead"`, `"paper"`, or a `Recipe`. None: the method's own.
    threshold : int or None, default=None
        T: classes with at most T shots get augmented views; 0 switches augmentation off. None: the
        threshold of the backbone's preset.
    augmentation : Augmentation or None, default=None
        How views are made. None: flip, grayscale and RandAugment, as in the paper.
    random_state : int, default=0
        Random seed of the views and of the initial weights.
    device : str or None, default=None
        Where to run, such as `"cpu"` or `"cuda"`.
    cache : bool, str, Path or None, default=None
        Folder of the feature cache, so that the backbone sees every image once. True: the default
        folder. False: no cache. None: True for a backbone given by name, and False for one of your
        own, whose identity may stay the same when its features change.
    verbose : bool, default=True
        Show progress bars for what takes more than two seconds, in a terminal.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels, sorted.
    classifier_ : Classifier
        The fitted estimator of the method, such as a `MIVClassifier`.
    identity_ : Identity or None
        The backbone that the features come from; None if it is not known.
    skipped_ : list of Skipped
        Images that the last call with `skip_bad` left out.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import FewShotClassifier
    >>> dark, light = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    >>> classifier = FewShotClassifier(threshold=0).fit([dark, light], ["night", "day"])
    >>> classifier.predict(light).tolist()
    ['day']
    """

    classifier_: Any  # a Classifier, with further attributes of its method
    classes_: NDArray[Any]
    identity_: Identity | None

    def __init__(
        self,
        backbone: str | Backbone | None = DEFAULT_BACKBONE,
        *,
        weights: str | Path | None = None,
        image_size: int | None = None,
        method: str = "miv",
        method_params: Mapping[str, Any] | None = None,
        recipe: str | Recipe | None = None,
        threshold: int | None = None,
        augmentation: Augmentation | None = None,
        random_state: int = 0,
        device: str | None = None,
        cache: bool | str | Path | None = None,
        verbose: bool = True,
    ) -> None:
        self.backbone = backbone
        self.weights = weights
        self.image_size = image_size
        self.method = method
        self.method_params = method_params
        self.recipe = recipe
        self.threshold = threshold
        self.augmentation = augmentation
        self.random_state = random_state
        self.device = device
        self.cache = cache
        self.verbose = verbose

    def fit(self, images: Iterable[ImageLike], labels: Sequence[Any]) -> Self:
        """Train on images and their labels.

        Parameters
        ----------
        images : iterable of paths, PIL images or uint8 arrays
            The shots.
        labels : sequence
            A label per image.

        Returns
        -------
        FewShotClassifier
            Itself.
        """
        return self._fit_images(label_images(from_images(images), labels), labels)

    def fit_folder(self, path: str | Path, *, skip_bad: bool = False) -> Self:
        """Train on a folder of class folders, a zip of one, or a CSV of paths and labels.

        Parameters
        ----------
        path : str or Path
            The folder, zip or CSV.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.

        Returns
        -------
        FewShotClassifier
            Itself.
        """
        return self._fit_images(open_labelled(path), skip_bad=skip_bad)

    def fit_table(self, table: FeatureTable, labels: Sequence[Any] | None = None) -> Self:
        """Train on features that were extracted before, by `extract` or elsewhere.

        Parameters
        ----------
        table : FeatureTable
            Features, and perhaps labels, views and the identity of the backbone.
        labels : sequence or None, default=None
            A label per image, instead of the table's.

        Returns
        -------
        FewShotClassifier
            Itself.
        """
        if self.needs_images:
            raise InputError(
                f"{self.method} tunes the backbone: it needs images, and features of a frozen "
                "backbone are not enough."
            )
        labels = table.labels if labels is None else labels
        if labels is None:
            raise InputError("The table has no labels to learn from.")
        self._check_params()
        self.__dict__.pop("identity_", None)
        preset, identity = self._origin(table)
        classifier = self.make_classifier(preset)
        classifier.fit(table.features, np.asarray(labels), views=table.views, view_of=table.view_of)
        return self._set_fitted(classifier, identity)

    def extract(self, images: Any, *, skip_bad: bool = False) -> FeatureTable:
        """Pass images, and the augmented views of labelled ones, through the frozen backbone.

        Parameters
        ----------
        images : ImageSet, or what `predict` takes
            Labelled images (`mivhead.images.sources.open_labelled`) get views if the method uses
            them.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.

        Returns
        -------
        FeatureTable
            Features, ids, labels and views, for `fit_table`, `predict` or a file.
        """
        images = as_image_set(images)
        check_names(images.ids)  # a table holds them
        if images.labels is not None:
            self._check_params()
        backbone = self._load_backbone()
        images = self._readable(images, skip_bad)
        plan = self._plan(images, backbone.preset)
        return _FeatureReader(backbone, self).table(images, plan)

    def classify(
        self,
        images: Any,
        *,
        skip_bad: bool = False,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        coverage: float | None = None,
    ) -> list[Prediction]:
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

        Returns
        -------
        list of Prediction
            One per image, in their order.
        """
        thresholds = self.thresholds(reject, max_errors, coverage)
        if (features := self._given_features(images)) is not None:
            ids = images.ids if isinstance(images, FeatureTable) else map(str, range(len(images)))
            probabilities, unknown = self._score(features)
            return predictions(list(ids), self.classes_, probabilities, unknown, thresholds)
        readable = self._readable(as_image_set(images), skip_bad)
        parts = self.classify_parts(readable, thresholds)
        return [each for part in parts for each in part]

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
        """
        thresholds = thresholds or self.thresholds()
        image_set = as_image_set(images)
        ids = iter(image_set.ids)
        for probabilities, unknown in map(self._score, self._parts(image_set)):
            own = list(islice(ids, len(probabilities)))
            yield predictions(own, self.classes_, probabilities, unknown, thresholds)

    def thresholds(
        self,
        reject: float | None = REJECT,
        max_errors: float | None = MAX_ERRORS,
        coverage: float | None = None,
    ) -> Thresholds:
        """Return the thresholds of decisions, with the parameters of `classify`.

        A model without a decision rule (`no_decision` says why) always gives a name.
        """
        check_is_fitted(self, "classifier_")
        rule: DecisionRule | None = getattr(self.classifier_, "decision_", None)
        if rule is not None:
            return rule.thresholds(reject, max_errors, coverage)
        if coverage is not None:
            raise InputError(f"There are no prediction sets: {self.no_decision}")
        return Thresholds()

    @property
    def no_decision(self) -> str | None:
        """Why the model always gives a name; None if it can be unsure or say "none of these"."""
        if getattr(self.classifier_, "decision_", None) is not None:
            return None
        if self.needs_images:
            return f"{self.method} tunes the backbone and leaves no shot out while it is fitted."
        return (
            "the model file comes from an earlier version of mivhead, which kept no out-of-fold "
            "scores; fit the model again."
        )

    def predict_proba(self, images: Any) -> NDArray[np.floating[Any]]:
        """Predict probabilities.

        Parameters
        ----------
        images : images or features
            Images, a folder, a zip or a single image; or a `FeatureTable`, `Features`, or a
            two-dimensional array of floats.

        Returns
        -------
        ndarray of shape (n_images, n_classes)
            In the order of `classes_`.
        """
        check_is_fitted(self, "classifier_")
        if (features := self._given_features(images)) is not None:
            found: NDArray[np.floating[Any]] = self.classifier_.predict_proba(features)
            return found
        parts = self._parts(as_image_set(images))
        return np.concatenate([self.classifier_.predict_proba(part) for part in parts])

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
            Predict sets, as small as possible, of which this share holds the true class.

        Returns
        -------
        ndarray of shape (n_images,), or list of tuple
            Class labels; or per image a set of them, the most probable first.
        """
        if coverage is not None:
            return [each.prediction_set or () for each in self.classify(images, coverage=coverage)]
        chosen: NDArray[Any] = self.classes_[self.predict_proba(images).argmax(axis=1)]
        return chosen

    def save(self, path: str | Path) -> None:
        """Write the model to one file, which `mivhead.load` reads.

        The file contains features of the support images: treat it like the images themselves.
        """
        from mivhead.model_file import save

        check_is_fitted(self, "classifier_")
        save(self, path)

    @property
    def needs_images(self) -> bool:
        """Whether the method tunes a copy of the backbone, so that features are not enough."""
        return get_method(self.method).needs == "images"

    def make_classifier(self, preset: Preset | None = None) -> Classifier:
        """Make the estimator that `fit` trains, not fitted yet."""
        known = get_method(self.method).hyperparameters()
        shown = {"verbose": self.verbose} if "verbose" in known else {}
        classifier: Classifier = make_method(
            self.method,
            preset=preset,
            recipe=self.recipe,
            random_state=self.random_state,
            device=self.device,
            **shown | dict(self.method_params or {}),
        )
        return classifier

    def _fit_images(
        self, images: ImageSet, labels: Sequence[Any] | None = None, *, skip_bad: bool = False
    ) -> Self:
        self._check_params()  # before the backbone is loaded
        for name in ("identity_", "_loaded"):  # of an earlier fit, perhaps with other parameters
            self.__dict__.pop(name, None)
        backbone = self._load_backbone()
        classifier = self.make_classifier(backbone.preset)
        reader = self._reader(backbone, classifier)
        reader.attach(classifier)  # refuses a network that does not suit, before images are read
        images = self._readable(images, skip_bad)
        read = reader.read(images, self._plan(images, backbone.preset))
        given = images.labels if labels is None else labels
        classifier.fit(read.X, np.asarray(given), views=read.views, view_of=read.view_of)
        return self._set_fitted(classifier, backbone.identity)

    def _check_params(self) -> None:
        """Check all parameters that can be checked without a backbone and without images."""
        self.make_classifier()._check_params()

    def _plan(self, images: ImageSet, preset: Preset) -> ViewPlan:
        """Plan the augmented views of labelled images, if the method uses them."""
        rule = views_rule(self.method, self.recipe, self.method_params)
        if images.labels is None or rule is None:
            return NO_VIEWS
        threshold = preset.threshold if self.threshold is None else self.threshold
        return plan_views(images.labels, threshold, rule, self.random_state)

    def _readable(self, images: ImageSet, skip_bad: bool) -> ImageSet:
        self.skipped_: list[Skipped] = check_images(images) if skip_bad else []
        return images.without(self.skipped_)

    def _given_features(self, X: Any) -> Any | None:
        """Return the features in X, or None if it holds images."""
        table = isinstance(X, np.ndarray | Tensor) and X.ndim == 2
        if not isinstance(X, FeatureTable | Features) and not (table and "float" in str(X.dtype)):
            return None
        if _tunes(self.classifier_):
            raise InputError("The model has a tuned backbone: it needs images, not features.")
        if isinstance(X, FeatureTable):
            if self.identity_ is not None:
                check_origin(X.backbone, self.identity_)
            return X.features
        return X

    def _score(self, X: Any) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]:
        """Return probabilities (image, class), and how unlike the shots each image is."""
        if getattr(self.classifier_, "decision_", None) is None:
            return self.classifier_.predict_proba(X), None
        found: tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]
        found = self.classifier_.score_unknown(X)
        return found

    def _parts(self, images: ImageSet) -> Iterator[Any]:
        """Yield one part of the images after another, as the method takes them."""
        if self.identity_ is None and self.backbone is None:
            raise InputError(
                "The model was trained on features of unknown origin: give it features, or the "
                "backbone they came from with `mivhead.load(path, backbone=...)`."
            )
        reader = self._reader(self._load_backbone(), self.classifier_)
        reader.attach(self.classifier_)
        unlabelled = replace(images, labels=None)  # labelled ones would get augmented views
        return reader.parts(unlabelled)

    def _reader(self, backbone: Backbone, classifier: Classifier) -> _Reader:
        return (_PixelReader if _tunes(classifier) else _FeatureReader)(backbone, self)

    def _set_fitted(self, classifier: Classifier, identity: Identity | None) -> Self:
        self.classifier_, self.classes_, self.identity_ = classifier, classifier.classes_, identity
        return self

    def _origin(self, table: FeatureTable) -> tuple[Preset | None, Identity | None]:
        """Find the settings and the identity of the backbone that features come from, if known."""
        if self.backbone is None:
            if table.backbone is None:
                return None, None  # the settings follow from the shapes
            given = named_by_file(Identity.from_json(table.backbone))
            self._loaded = load_backbone(given, weights=self.weights, device=self.device)
        backbone = self._load_backbone()
        check_origin(table.backbone, backbone.identity)
        return backbone.preset, backbone.identity

    def _load_backbone(self) -> Backbone:
        """Load the backbone on first use; a fitted classifier needs the one it was fitted with."""
        identity: Identity | None = getattr(self, "identity_", None)
        loaded: Backbone | None = getattr(self, "_loaded", None)
        if loaded is None:
            given, preset = self.backbone, None
            if identity is not None:
                given = named_by_file(identity) if given is None else given
                preset = expected_preset(identity)
            loaded = load_backbone(
                DEFAULT_BACKBONE if given is None else given,
                weights=self.weights,
                preset=preset,
                image_size=self.image_size if preset is None else None,
                device=self.device,
            )
            self._loaded = loaded
        if identity is not None:
            check_same(loaded.identity, identity)
        return loaded

    def _cache(self) -> FeatureCache | None:
        by_name = self.backbone is None or isinstance(self.backbone, str)
        wanted = by_name if self.cache is None else self.cache
        return open_cache(None if wanted is True else wanted) if wanted else None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the backbone out of pickles; it is loaded again where it is needed."""
        return {key: value for key, value in super().__getstate__().items() if key != "_loaded"}


# How a method sees images.


class _Read(NamedTuple):
    """Images as a method takes them in `fit`, and their views."""

    X: Any
    views: Any
    view_of: NDArray[np.int64] | None


class _Reader(Protocol):
    """Reads images for a method."""

    def attach(self, classifier: Any) -> None:
        """Give the method what it needs of the backbone; refuse a backbone that does not suit."""

    def read(self, images: ImageSet, plan: ViewPlan) -> _Read:
        """Read labelled images and their planned views."""
        ...

    def parts(self, images: ImageSet) -> Iterator[Any]:
        """Yield any number of images, `PART` at a time."""
        ...


class _FeatureReader:
    """Features of a frozen backbone, through the extraction pipeline and its cache."""

    def __init__(self, backbone: Backbone, model: FewShotClassifier) -> None:
        self._backbone, self._model = backbone, model
        self._how: dict[str, Any] = {"cache": model._cache(), "verbose": model.verbose}

    def attach(self, classifier: Any) -> None:
        """Accept every backbone: features are all that is needed."""

    def table(self, images: ImageSet, plan: ViewPlan) -> FeatureTable:
        augmentation = self._model.augmentation or Augmentation()
        return extract_table(self._backbone, images, plan, augmentation, **self._how)

    def read(self, images: ImageSet, plan: ViewPlan) -> _Read:
        table = self.table(images, plan)
        return _Read(table.features, table.views, table.view_of)

    def parts(self, images: ImageSet) -> Iterator[Features]:
        return iter_features(self._backbone, images, **self._how)


class _PixelReader:
    """Pixels for a copy of the backbone's network, which the method tunes."""

    def __init__(self, backbone: Backbone, model: FewShotClassifier) -> None:
        self._backbone, self._model = backbone, model
        self._size = backbone.preset.preprocessing.size

    def attach(self, classifier: Any) -> None:
        if not classifier.attached:
            classifier.attach(network_of(self._backbone, method_name(classifier)))

    def read(self, images: ImageSet, plan: ViewPlan) -> _Read:
        how, verbose = self._model.augmentation, self._model.verbose
        pixels, views = load_pixels(images, self._size, plan, how, verbose)
        return _Read(pixels, views, plan.view_of)

    def parts(self, images: ImageSet) -> Iterator[Pixels]:
        for start in range(0, max(1, len(images)), PART):
            part = images.take(range(start, min(start + PART, len(images))))
            yield load_pixels(part, self._size, verbose=self._model.verbose)[0]


def _tunes(classifier: Any) -> bool:
    return getattr(classifier, "needs", "features") == "images"


def network_of(backbone: Backbone, method: str) -> Network:
    """Copy the backbone's module for a method that tunes it; the backbone stays as it is."""
    name = backbone.identity.name
    loaded = backbone.loaded() if isinstance(backbone, LazyBackbone) else backbone
    if not isinstance(loaded, ModuleBackbone):
        raise InputError(
            f"{method} tunes the backbone, so it needs a torch module that gradients can flow "
            f"through; {name} only gives features, as an ONNX file, a service or a function does: "
            "choose a backbone of timm or `from_module`, or a method on features, such as miv."
        )
    preprocessing = loaded.preset.preprocessing
    model, tapped = loaded.copy_to_tune()
    prepare = partial(preprocess, preprocessing=preprocessing)
    return Network(model, tapped, prepare, preprocessing.size, name)


def load_pixels(
    images: ImageSet,
    size: int,
    plan: ViewPlan = NO_VIEWS,
    how: Augmentation | None = None,
    verbose: bool = True,
) -> tuple[Pixels, Pixels]:
    """Decode images and make their planned views: (image, R, R, 3) and (view, R, R, 3)."""
    if not len(images):
        raise InputError("There are no images: give at least one.")
    pixels = np.empty((len(images), size, size, 3), np.uint8)
    views = np.empty((len(plan.view_of), size, size, 3), np.uint8)
    with progress_bar("reading", len(images), show=verbose) as advance:
        for row, source in enumerate(images.sources):
            image = LoadedImage(source)
            pixels[row] = to_pixels(image.picture, row, size)
            for i in np.flatnonzero(plan.view_of == row):
                views[i] = np.asarray(image.view(int(plan.numbers[i]), plan.seed, size, how))
            advance(1)
    return pixels, views
