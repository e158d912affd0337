"""`FewShotClassifier`: a few labelled images in, a classifier out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from mivhead._progress import progress_bar
from mivhead.backbones import DEFAULT_BACKBONE, named
from mivhead.backbones.base import Backbone, Identity, LazyBackbone
from mivhead.backbones.module import ModuleBackbone
from mivhead.backbones.preprocessing import preprocess, to_pixels
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError, check_one_of
from mivhead.extraction.cache import FeatureCache, open_cache
from mivhead.extraction.pipeline import NO_VIEWS, PART, ViewPlan, extract_table, iter_features
from mivhead.features import FeatureTable
from mivhead.head.recipe import Recipe
from mivhead.images.augmentation import Augmentation, augment, plan_views
from mivhead.images.decoding import ImageLike
from mivhead.images.imageset import ImageSet, Skipped, check_images, from_images, label_images
from mivhead.images.sources import as_image_set, open_labelled
from mivhead.methods import METHODS, make_method, make_tuner, method_name
from mivhead.methods.ablation import views_rule
from mivhead.methods.tuning.base import Network, Pixels, TuningClassifier
from mivhead.preset import Preset

__all__ = ["FewShotClassifier", "Prediction"]


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # sklearn: untyped
    """Few-shot image classifier on a frozen backbone.

    Images may be paths, PIL images or uint8 arrays; where many are expected, a folder, a zip or a
    single image will do as well.

    Parameters
    ----------
    backbone
        What `mivhead.backbones.load_backbone` takes, such as a name of
        `mivhead.backbones.list_backbones()`, or a `Backbone` of your own.
    weights
        A checkpoint for a backbone by name.
    method
        `"miv"`, or the name of a rival or ablation (`mivhead.methods.list_methods()`).
    method_params
        Hyperparameters of the method, by name.
    recipe
        How the MIV-head is trained: `"mivhead"`, `"paper"`, a `Recipe`, or None: as the method is.
    threshold
        T: classes with at most T shots get augmented views; 0 switches augmentation off; None
        takes the backbone's preset.
    augmentation
        How views are made; None: flip, grayscale and RandAugment, as in the paper.
    views_rule
        Views per image: `"ceil"` (T / S rounded up), `"floor"`, or None for the recipe's.
    random_state
        Seed of the views and of the initial weights.
    device
        Where to run, such as `"cpu"` or `"cuda"`.
    cache
        Folder in which the features of every image are kept, so that the backbone sees it once;
        True for the usual folder, False for none. None means True for backbones by name, and False
        for one of your own, whose identity may not tell when it has changed.
    verbose
        Show progress bars for what takes more than two seconds, if a person is watching.

    Attributes
    ----------
    classes_
        The labels, sorted.
    classifier_
        The trained classifier on features.
    identity_
        Which backbone the features come from.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import FewShotClassifier
    >>> dark, light = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    >>> classifier = FewShotClassifier(threshold=0).fit([dark, light], ["night", "day"])
    >>> classifier.predict(light).tolist()
    ['day']
    """

    classifier_: FeatureClassifier | TuningClassifier

    def __init__(
        self,
        backbone: str | Backbone = DEFAULT_BACKBONE,
        *,
        weights: str | Path | None = None,
        method: str = "miv",
        method_params: Mapping[str, Any] | None = None,
        recipe: str | Recipe | None = None,
        threshold: int | None = None,
        augmentation: Augmentation | None = None,
        views_rule: str | None = None,
        random_state: int = 0,
        device: str | None = None,
        cache: bool | str | Path | None = None,
        verbose: bool = True,
    ) -> None:
        self.backbone = backbone
        self.weights = weights
        self.method = method
        self.method_params = method_params
        self.recipe = recipe
        self.threshold = threshold
        self.augmentation = augmentation
        self.views_rule = views_rule
        self.random_state = random_state
        self.device = device
        self.cache = cache
        self.verbose = verbose

    def fit(self, images: Iterable[ImageLike], labels: Sequence[Any]) -> Self:
        """Train on images and their labels."""
        self._forget()
        return self._fit_images(label_images(from_images(images), labels), labels)

    def fit_folder(self, path: str | Path, *, skip_bad: bool = False) -> Self:
        """Train on a folder of class folders, a zip of one, or a CSV of paths and labels.

        With `skip_bad`, images that cannot be read are left out and listed in `skipped_`.
        """
        self._forget()
        return self._fit_images(open_labelled(path), skip_bad=skip_bad)

    def _fit_images(
        self, images: ImageSet, labels: Sequence[Any] | None = None, *, skip_bad: bool = False
    ) -> Self:
        if not self.tunes_backbone:
            return self.fit_table(self.extract(images, skip_bad=skip_bad), labels)
        params = {"verbose": self.verbose, **(self.method_params or {})}
        tuner = make_tuner(self.method, random_state=self.random_state, **params)
        tuner._check_params()
        backbone = self._load_backbone()
        network = network_of(backbone, self.method)
        tuner.check(network)  # before the images are read
        images = self._readable(images, skip_bad)
        plan = self._plan(images, backbone.preset)
        pixels, views = load_pixels(images, network.size, plan, self.augmentation, self.verbose)
        given = images.labels if labels is None else labels
        tuner.fit(network, pixels, np.asarray(given), views=views, view_of=plan[0])
        self.classifier_, self.classes_, self.identity_ = tuner, tuner.classes_, backbone.identity
        return self

    @property
    def tunes_backbone(self) -> bool:
        """Whether the method tunes a copy of the backbone: it needs images, not features."""
        check_one_of("method", self.method, METHODS)
        return METHODS[self.method].needs == "images"

    def fit_table(self, table: FeatureTable, labels: Sequence[Any] | None = None) -> Self:
        """Train on features that were extracted before, such as `extract` or a file gives."""
        labels = table.labels if labels is None else labels
        if labels is None:
            raise InputError("The table has no labels to learn from.")
        backbone = self._load_backbone()
        identity = backbone.identity
        named.check_origin(table.backbone, identity)
        fitted = self.make_classifier(backbone.preset).fit(
            table.features, np.asarray(labels), views=table.views, view_of=table.view_of
        )
        self.classifier_, self.classes_, self.identity_ = fitted, fitted.classes_, identity
        return self

    def make_classifier(self, preset: Preset) -> FeatureClassifier:
        """Make the classifier on features that `fit` trains, not fitted yet."""
        has_recipe = self.method in METHODS and METHODS[self.method].configurable
        return make_method(
            self.method,
            preset=preset,
            recipe=self.recipe if has_recipe else None,
            random_state=self.random_state,
            device=self.device,
            **(self.method_params or {}),
        )

    def extract(self, images: ImageSet, *, skip_bad: bool = False) -> FeatureTable:
        """Pass images, and for labelled ones their augmented views, through the backbone once.

        With `skip_bad`, images that cannot be read are left out and listed in `skipped_`.
        """
        backbone = self._load_backbone()
        if images.labels is not None and not self.tunes_backbone:
            self.make_classifier(backbone.preset)._check_params()  # before any work
        images = self._readable(images, skip_bad)
        plan = self._plan(images, backbone.preset)
        how = self.augmentation or Augmentation()
        return extract_table(backbone, images, plan, how, cache=self._cache(), verbose=self.verbose)

    def _readable(self, images: ImageSet, skip_bad: bool) -> ImageSet:
        self.skipped_: list[Skipped] = check_images(images) if skip_bad else []
        return images.without(self.skipped_)

    def _plan(self, images: ImageSet, preset: Preset) -> ViewPlan:
        """Plan the augmented views of labelled images, if the method uses them."""
        check_one_of("method", self.method, METHODS)
        rule = views_rule(self.method, self.recipe, self.method_params)
        if images.labels is None or rule is None:
            return NO_VIEWS
        if self.views_rule is not None:
            check_one_of("views_rule", self.views_rule, ("ceil", "floor"))
            rule = "floor" if self.views_rule == "floor" else "ceil"
        threshold = preset.threshold if self.threshold is None else self.threshold
        return plan_views(images.labels, threshold, rule, self.random_state)

    def classify(self, images: Any, *, skip_bad: bool = False) -> list[Prediction]:
        """Names and probabilities of images, a folder, a zip or a single image."""
        check_is_fitted(self, "classifier_")
        readable = self._readable(as_image_set(images), skip_bad)
        return [each for part in self.classify_parts(readable) for each in part]

    def classify_parts(self, images: ImageSet) -> Iterator[list[Prediction]]:
        """Yield names and probabilities of any number of images, part by part."""
        ids = iter(images.ids)
        for found in self._probabilities(images):
            yield predictions(list(islice(ids, len(found))), self.classes_, found)

    def classify_table(self, table: FeatureTable) -> list[Prediction]:
        """Names and probabilities of images whose features were extracted before."""
        if isinstance(self.classifier_, TuningClassifier):
            raise InputError("The model has a tuned backbone: it needs images, not features.")
        found = self.classifier_.predict_proba(table.features)
        return predictions(table.ids, self.classes_, found)

    def _probabilities(self, images: ImageSet) -> Iterator[NDArray[np.floating[Any]]]:
        """Probabilities (image, class) of one part of the images after the other."""
        unlabelled = replace(images, labels=None)  # labelled ones would get augmented views
        backbone = self._load_backbone()
        if isinstance(self.classifier_, TuningClassifier):
            return tuned_probabilities(self.classifier_, backbone, unlabelled, self.verbose)
        parts = iter_features(backbone, unlabelled, cache=self._cache(), verbose=self.verbose)
        return map(self.classifier_.predict_proba, parts)

    def predict_proba(self, images: Any) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        check_is_fitted(self, "classifier_")
        return np.concatenate(list(self._probabilities(as_image_set(images))))

    def predict(self, images: Any) -> NDArray[Any]:
        """Labels of the most probable classes, one per image."""
        chosen: NDArray[Any] = self.classes_[self.predict_proba(images).argmax(axis=1)]
        return chosen

    def save(self, path: str | Path) -> None:
        """Write the model to one file; `mivhead.load` reads it. It holds the support features."""
        from mivhead.model_file import save

        check_is_fitted(self, "classifier_")
        save(self, path)

    @classmethod
    def _restored(
        cls,
        classifier: FeatureClassifier | TuningClassifier,
        identity: Identity,
        backbone: str | Backbone | None,
        weights: str | Path | None,
        device: str | None,
    ) -> Self:
        """Make a fitted classifier from the parts of a model file."""
        chosen = named.named_by_file(identity) if backbone is None else backbone
        new = cls(chosen, weights=weights, device=device)
        new.classifier_, new.classes_, new.identity_ = classifier, classifier.classes_, identity
        return new

    def _forget(self) -> None:
        """Drop what belongs to an earlier fit, perhaps with other parameters."""
        for name in ("identity_", "_loaded"):
            self.__dict__.pop(name, None)

    def _cache(self) -> FeatureCache | None:
        wanted = isinstance(self.backbone, str) if self.cache is None else self.cache
        return open_cache(None if wanted is True else wanted) if wanted else None

    def _load_backbone(self) -> Backbone:
        """Load the backbone on first use; a fitted classifier needs the one it was fitted with."""
        identity: Identity | None = getattr(self, "identity_", None)
        loaded: Backbone | None = getattr(self, "_loaded", None)
        if loaded is None:
            preset = None if identity is None else named.expected_preset(identity)
            loaded = named.backbone_of(self.backbone, self.weights, preset, self.device)
            self._loaded = loaded
        if identity is not None:
            named.check_same(loaded.identity, identity)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """Leave the backbone out of copies that go to other processes; it is loaded again there."""
        return {key: value for key, value in super().__getstate__().items() if key != "_loaded"}


# What a classifier says of images: names and probabilities.


@dataclass(frozen=True)
class Prediction:
    """What the classifier says of one image."""

    id: str
    label: Any
    probability: float
    probabilities: dict[Any, float]  # by falling probability


def predictions(
    ids: Sequence[str], classes: NDArray[Any], probabilities: NDArray[np.floating[Any]]
) -> list[Prediction]:
    """Name images from their probabilities (image, class).

    >>> predictions(["a.jpg"], np.array(["cat", "dog"]), np.array([[0.25, 0.75]]))[0].label
    'dog'
    """
    found = []
    names = classes.tolist()
    for id_, row in zip(ids, probabilities, strict=True):
        ranked = {names[i]: float(row[i]) for i in np.argsort(-row, kind="stable")}
        best = next(iter(ranked))
        found.append(Prediction(id_, best, ranked[best], ranked))
    return found


# From a backbone to a network that a method may tune, and from images to its pixels.


def network_of(backbone: Backbone, method: str) -> Network:
    """Copy the backbone's module for a method that tunes it; the backbone stays as it is."""
    name = backbone.identity.name
    loaded = backbone.loaded() if isinstance(backbone, LazyBackbone) else backbone
    if not isinstance(loaded, ModuleBackbone):
        raise InputError(
            f"{method} tunes the backbone, so it needs a torch module that gradients can flow "
            f"through; {name} only gives features, as an ONNX file, a service or a function does: "
            "take a backbone of timm or `from_module`, or a method on features, such as miv."
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
    view_of, seeds = plan
    pixels = np.empty((len(images), size, size, 3), np.uint8)
    views = np.empty((len(view_of), size, size, 3), np.uint8)
    with progress_bar("reading", len(images), show=verbose) as advance:
        for row in range(len(images)):
            picture = images.load(row)
            pixels[row] = to_pixels(picture, row, size)
            for view in np.flatnonzero(view_of == row):
                views[view] = np.asarray(augment(picture, size, int(seeds[view]), how))
            advance(1)
    return pixels, views


def tuned_probabilities(
    tuner: TuningClassifier, backbone: Backbone, images: ImageSet, verbose: bool
) -> Iterator[NDArray[np.floating[Any]]]:
    """Yield probabilities (image, class), `PART` images at a time, from a tuned copy.

    The copy of the backbone is made anew after loading.
    """
    if not tuner.attached:
        tuner.attach(network_of(backbone, method_name(tuner)))
    for start in range(0, max(1, len(images)), PART):
        part = images.take(range(start, min(start + PART, len(images))))
        pixels, _ = load_pixels(part, tuner.network_.size, verbose=verbose)
        yield tuner.predict_proba(pixels)
