"""`Model`: a classifier on a frozen backbone, and the shots to change it.

`mivhead.FewShotClassifier` is this class with short cuts to diagnostics and export. Here a model is
fitted, reads images and predicts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.estimator import Estimator, check_fitted
from mivhead._util.schema import to_json
from mivhead._util.text import one_line
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import (
    Backbone,
    DecodedImage,
    Identity,
    check_origin,
    check_same,
    expected_preset,
    extract_pictures,
    named_by_file,
)
from mivhead.backbones.efficientnet_lite import background_vectors
from mivhead.backbones.text import TEMPLATES, class_vectors
from mivhead.classifier import MIVClassifier
from mivhead.decision import Calibration, check_class_names
from mivhead.ensemble.constants import LIMIT
from mivhead.errors import InputError, MivError, check_no_missing
from mivhead.extraction.cache import FeatureCache, open_cache
from mivhead.extraction.pipeline import (
    extract_table,
    extract_views,
    iter_features,
)
from mivhead.features import Features, FeatureTable, is_array
from mivhead.head.recipe import DEFAULT_RECIPE, Recipe, resolve_recipe
from mivhead.images.augmentation import Augmentation, ViewRule
from mivhead.images.decoding import ImageLike
from mivhead.images.imageset import ImageSet, check_names, from_images, label_images
from mivhead.images.sources import as_image_set, open_labelled
from mivhead.model.base import Estimate, ImageClassifier, Scores
from mivhead.model.shots import Change, Shots, digests

MAX_SHOWN = 8  # classes that the short form of a model names

NameVectors: TypeAlias = dict[Any, NDArray[Any]]  # by class

_log = logging.getLogger(__name__)


class Model(ImageClassifier, Estimator):
    """A few-shot image classifier on a frozen backbone; see `mivhead.FewShotClassifier`."""

    classifier_: MIVClassifier
    identity_: Identity | None
    shots_: Shots | None
    history_: list[Change]
    copies_: dict[str, str]
    estimate_: Estimate | None
    fit_seconds_: dict[str, float]
    templates_: tuple[str, ...] = ()

    def __init__(
        self,
        backbone: str | Backbone | None = DEFAULT_BACKBONE,
        *,
        weights: str | Path | None = None,
        image_size: int | None = None,
        recipe: str | Recipe = DEFAULT_RECIPE,
        names: bool | None = None,
        templates: Sequence[str] | None = None,
        threshold: int | None = None,
        augmentation: Augmentation | None = None,
        other: Any = "other",
        random_state: int = 0,
        device: str | None = None,
        cache: bool | str | Path | None = None,
        verbose: bool = True,
    ) -> None:
        self.backbone = backbone
        self.weights = weights
        self.image_size = image_size
        self.recipe = recipe
        self.names = names
        self.templates = templates
        self.threshold = threshold
        self.augmentation = augmentation
        self.other = other
        self.random_state = random_state
        self.device = device
        self.cache = cache
        self.verbose = verbose

    def fit(
        self,
        images: str | Path | Iterable[ImageLike] | FeatureTable,
        labels: Sequence[Any] | None = None,
        *,
        skip_bad: bool = False,
        unlabelled: Any = None,
    ) -> Self:
        """Train on labelled images. If anything fails, the model stays as it was.

        Parameters
        ----------
        images : path, ImageSet, iterable of images, or FeatureTable
            The shots: a folder of class folders, a zip of one, or a CSV of paths and labels;
            images, with `labels`; or features that were extracted before.
        labels : sequence or None, default=None
            A label per image, if the images do not come with labels.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.
        unlabelled : images, features or None, default=None
            Images without labels, to learn from as well: what `predict` takes. They should look
            like the images to predict, and some may show none of the classes. The model does not
            keep them. Of more than 500, a random sample is used.
        """
        before = dict(vars(self))
        try:
            resolve_recipe(self.recipe)  # before the backbone is loaded
            for name in ("identity_", "_loaded"):  # of an earlier fit
                self.__dict__.pop(name, None)
            if isinstance(images, FeatureTable):
                self._fit_table(images, labels, unlabelled)
            else:
                self._fit_images(*open_shots(images, labels), unlabelled, skip_bad=skip_bad)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        return self

    def _fit_images(
        self, images: ImageSet, labels: Sequence[Any], unlabelled: Any, *, skip_bad: bool
    ) -> None:
        check_class_names(labels)
        started = time.perf_counter()
        backbone = self.load_backbone()
        others = self._read_unlabelled(unlabelled, backbone.identity, skip_bad=skip_bad)
        skipped = getattr(self, "skipped_", []) if others is not None else []
        images, labels = self.readable_shots(images, labels, skip_bad=skip_bad)
        self.skipped_ = [*self.skipped_, *skipped]
        # The table is not kept: its features are as large as those of the shots.
        shots = Shots.from_table(self.read_table(images, views=True), labels)
        shots, self.copies_ = shots.in_order()
        reading = time.perf_counter() - started
        self._train(shots, backbone, others)
        self.fit_seconds_ = {"features": reading, **self.fit_seconds_}

    def _fit_table(
        self, table: FeatureTable, labels: Sequence[Any] | None, unlabelled: Any
    ) -> None:
        labels = table.labels if labels is None else labels
        if labels is None:
            raise InputError("The table has no labels to learn from.")
        check_no_missing("labels", labels)
        check_class_names(labels)
        backbone = self._backbone_of(table)
        identity = None if backbone is None else backbone.identity
        shots, self.copies_ = Shots.from_table(table, labels).in_order()
        self._train(shots, backbone, self._read_unlabelled(unlabelled, identity))

    def _train(self, shots: Shots, backbone: Backbone | None, unlabelled: Features | None) -> None:
        """Fit the classifier to shots that are in order, without exact copies."""
        started = time.perf_counter()
        classifier = MIVClassifier(
            self.recipe,
            None if backbone is None else backbone.preset,
            random_state=self.random_state,
            verbose=self.verbose,
        )
        if self.copies_:  # smaller classes may need further views
            shots = self.with_missing_views(shots)
        templates = TEMPLATES if self.templates is None else tuple(self.templates)
        tower = backbone if resolve_recipe(self.recipe).has_experts else None
        vectors = self._try_names(tower, shots.classes, templates)
        classifier.fit_support(shots.support(unlabelled, vectors))
        identity = None if backbone is None else backbone.identity
        self.set_fitted(classifier, identity, shots)
        self.templates_ = () if vectors is None else templates
        self.fit_seconds_ = {"training": time.perf_counter() - started}

    def _try_names(
        self, backbone: Backbone | None, classes: Sequence[Any], templates: Sequence[str]
    ) -> NameVectors | None:
        """Embed the names of classes if they can be used; if they are asked for, they must be."""
        wanted = True if self.templates is not None and self.names is None else self.names
        if wanted is False:
            return None
        if backbone is None or getattr(backbone, "embed_texts", None) is None:
            if wanted:
                raise InputError(
                    "Names of classes need a text-and-image backbone, such as clip_vitb32, "
                    "siglip2_base or bioclip2, and a recipe with ridge experts, as the default."
                )
            return None
        try:
            return embed_names(backbone, classes, templates)
        except MivError as error:
            if wanted:
                raise
            _log.warning("The names of the classes are not used: %s", error)
            return None

    def set_fitted(
        self, classifier: MIVClassifier, identity: Identity | None, shots: Shots | None
    ) -> None:
        """Take over a fitted classifier, without history and estimate."""
        rule = classifier.decision_
        vectors = None if identity is None else background_vectors(identity)
        if vectors is not None:
            rule = rule.with_background(vectors)
        names = classifier.classes_.tolist()
        if self.other in names and rule.other is None:
            rule = rule.with_other(names.index(self.other))
        classifier.decision_ = rule
        self.classifier_, self.classes_, self.identity_ = classifier, classifier.classes_, identity
        self.shots_, self.history_, self.estimate_ = shots, [], None

    def readable_shots(
        self, images: ImageSet, labels: Sequence[Any], *, skip_bad: bool
    ) -> tuple[ImageSet, list[Any]]:
        """Return the images that can be read, and their labels."""
        readable = self.readable(images, skip_bad=skip_bad)
        kept = set(readable.ids)
        pairs = zip(images.ids, labels, strict=True)
        return readable, [label for name, label in pairs if name in kept]

    def kept_shots(self) -> Shots:
        """Return the shots, which a model needs to be changed."""
        check_fitted(self, "classifier_")
        if self.shots_ is None:
            raise InputError("The model is a saved MIVClassifier, which does not keep its shots.")
        return self.shots_

    def refit(self, change: Change, shots: Shots) -> Change:
        """Fit to changed shots, and remember the change."""
        shots, _ = shots.in_order()
        shots = self.with_missing_views(shots)
        check_class_names(shots.classes)
        notes = list(change.notes)
        if missing := len(shots.missing_views):
            notes.append(
                f"The model is now fitted without {missing} of its augmented views, because it "
                "holds no pictures to make them of: fit it again on the images to avoid that."
            )
        use = self.classifier_.unlabelled_
        if use is not None and use.used:
            notes.append(
                f"The model had learned from {use.images} unlabelled images, which it does not "
                "keep: to use them again, fit it again."
            )
        vectors = self._changed_names(shots.classes)
        classifier = self.classifier_.unfitted()
        classifier.fit_support(shots.support(None, vectors), self.classifier_.seed_)
        change, history = replace(change, notes=tuple(notes)), self.history_
        self.set_fitted(classifier, self.identity_, shots)
        self.history_ = [*history, change]
        return change

    @property
    def name_vectors(self) -> NameVectors | None:
        """Vectors of the names of the classes; None if they are not a member."""
        ensemble = self.classifier_.ensemble_
        if ensemble is None or ensemble.names is None:
            return None
        return dict(zip(self.classes_.tolist(), ensemble.names.vectors, strict=True))

    def _changed_names(self, classes: Sequence[Any]) -> NameVectors | None:
        """Return vectors of the names of changed classes, if names are a member."""
        known = self.name_vectors
        if known is None:
            return None
        if new := [label for label in classes if label not in known]:
            known |= embed_names(self.load_backbone(), new, self.templates_)
        return {label: known[label] for label in classes}

    # Reading images.

    def load_backbone(self, named: str | Backbone | None = None) -> Backbone:
        """Return the backbone, which is loaded on first use.

        A fitted classifier needs the one that it was fitted with: any other is an error. `named` is
        what to load if the parameter `backbone` is None.
        """
        identity: Identity | None = getattr(self, "identity_", None)
        params = self.backbone, self.weights, self.image_size, self.device
        loaded, before = getattr(self, "_loaded", (None, params))
        if loaded is None or any(a is not b for a, b in zip(params, before, strict=True)):
            backbone = named if self.backbone is None else self.backbone
            preset, size = None, self.image_size
            if identity is not None:
                backbone = named_by_file(identity) if backbone is None else backbone
                preset, size = expected_preset(identity), None
            backbone = DEFAULT_BACKBONE if backbone is None else backbone
            loaded = load_backbone(
                backbone, weights=self.weights, preset=preset, image_size=size, device=self.device
            )
            self._loaded = loaded, params
        if identity is not None:
            check_same(loaded.identity, identity)
        return loaded

    def _backbone_of(self, table: FeatureTable) -> Backbone | None:
        """Load the backbone that features come from; None if it is not known."""
        origin = None
        if self.backbone is None:
            if table.backbone is None:
                return None  # the settings follow from the shapes
            origin = named_by_file(Identity.from_json(table.backbone))
        backbone = self.load_backbone(origin)
        check_origin(table.backbone, backbone.identity)
        blocks, expected = len(table.features.blocks), len(backbone.preset.blocks)
        if blocks != expected:
            raise InputError(
                f"The features have {blocks} blocks, those of the backbone "
                f"{backbone.identity.name!r} have {expected}: for features from elsewhere, use "
                "FewShotClassifier(backbone=None)."
            )
        return backbone

    def extract(self, images: Any, *, skip_bad: bool = False) -> FeatureTable:
        """Pass images, and the augmented views of labelled ones, through the frozen backbone.

        Parameters
        ----------
        images : ImageSet, or what `predict` takes
            Labelled images (`mivhead.images.sources.open_labelled`) get views if the recipe uses
            them.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.

        Returns
        -------
        FeatureTable
            Features, ids, labels and views, for `fit`, `predict` or a file. Labelled images come
            with their hashes and small pictures, which a model needs when it is changed.
        """
        images = as_image_set(images)
        check_names(images.ids)  # a table holds them
        self.load_backbone()  # before the images are read
        images = self.readable(images, skip_bad=skip_bad)
        return self.read_table(images, views=images.labels is not None)

    def read_table(self, images: ImageSet, *, views: bool = False) -> FeatureTable:
        """Read features of images and, if the recipe uses them, of `views` of labelled ones."""
        backbone, recipe = self.load_backbone(), resolve_recipe(self.recipe)
        settings: dict[str, Any] = {"cache": self._cache(), "verbose": self.verbose}
        settings["pictures"] = images.labels is not None
        if not (views and recipe.use_views):
            return extract_table(backbone, images, **settings)
        threshold = backbone.preset.threshold if self.threshold is None else self.threshold
        augmentation = self.augmentation or Augmentation()
        rule = ViewRule(threshold, recipe.views_rule, self.random_state, augmentation)
        plan = rule.plan(images.labels or ())
        table = extract_table(backbone, images, plan, augmentation, **settings)
        return replace(table, view_rule=to_json(rule))

    def with_missing_views(self, shots: Shots) -> Shots:
        """Make the views that shots of a smaller class need, if there are pictures of them."""
        if shots.rule is None or not shots.missing_views:
            return shots
        pictures, plan = shots.plan_missing_views()
        if not pictures:
            return shots
        settings: dict[str, Any] = {"cache": self._cache(), "verbose": self.verbose}
        backbone, augmentation = self.load_backbone(), shots.rule.augmentation
        return shots.with_views(extract_views(backbone, pictures, plan, augmentation, **settings))

    def _read_unlabelled(
        self, unlabelled: Any, identity: Identity | None, *, skip_bad: bool = False
    ) -> Features | None:
        """Return features of unlabelled images, in an order that follows from their contents."""
        if unlabelled is None:
            return None
        if is_features(unlabelled):
            if isinstance(unlabelled, FeatureTable):
                if identity is not None:
                    check_origin(unlabelled.backbone, identity)
                unlabelled = unlabelled.features
            features = Features(unlabelled)
            features = features[_sample(len(features), self.random_state)]
        else:
            if identity is None:
                raise InputError("The shots are features, so unlabelled images must be, too.")
            images = self.readable(as_image_set(unlabelled), skip_bad=skip_bad)
            images = replace(images, labels=None)
            images = images.take(_sample(len(images), self.random_state))
            features = self.read_table(images).features
        return features[np.argsort(digests(features), kind="stable")]

    def _cache(self) -> FeatureCache | None:
        by_name = self.backbone is None or isinstance(self.backbone, str)
        wanted = by_name if self.cache is None else self.cache
        return open_cache(None if wanted is True else wanted) if wanted else None

    # Predicting.

    @property
    def calibration(self) -> Calibration:
        """What the thresholds of decisions follow from."""
        check_fitted(self, "classifier_")
        return self.classifier_.decision_.calibration

    @property
    def shot_counts(self) -> dict[Any, int]:
        """Number of shots per class."""
        return dict(zip(self.classes_.tolist(), self.classifier_.shots_.tolist(), strict=True))

    @property
    def names_used(self) -> bool | None:
        """Whether the model uses the names of its classes; None if they could not be embedded."""
        ensemble = self.classifier_.ensemble_
        return None if ensemble is None or ensemble.names is None else ensemble.names.used

    def check_takes(self, *, features: bool, backbone: Mapping[str, Any] | None = None) -> None:
        """Raise an error if the model does not take images, or features of this backbone."""
        if features and self.identity_ is not None:
            check_origin(backbone, self.identity_)
        if not features and self.identity_ is None and self.backbone is None:
            raise InputError(
                "The model was trained on features of unknown origin: give it features, or the "
                "backbone they came from with `mivhead.load(path, backbone=...)`."
            )

    def read_parts(self, images: ImageSet) -> Iterator[Features]:
        """Read any number of images in bounded memory, one part after another."""
        self.check_takes(features=False)
        unlabelled = replace(images, labels=None)  # labelled ones would get augmented views
        settings: dict[str, Any] = {"cache": self._cache(), "verbose": self.verbose}
        yield from iter_features(self.load_backbone(), unlabelled, **settings)

    def read_pictures(self, pictures: Sequence[DecodedImage]) -> Features:
        """Pass a batch of decoded images through the backbone, without the feature cache."""
        self.check_takes(features=False)
        return extract_pictures(self.load_backbone(), pictures)

    def score_read(self, read: Any) -> Scores:
        """Score features."""
        return Scores(*self.classifier_.score_unknown(read))

    def _given_features(self, given: Any) -> Any | None:
        check_fitted(self, "classifier_")
        if not is_features(given):
            return None
        is_table = isinstance(given, FeatureTable)
        self.check_takes(features=True, backbone=given.backbone if is_table else None)
        return given.features if is_table else given

    def given_table(self, given: Any) -> FeatureTable | None:
        """Return features as a table, numbered if they have no names; None for images."""
        features = self._given_features(given)
        if features is None or isinstance(given, FeatureTable):
            return None if features is None else given
        return FeatureTable(Features(features), tuple(map(str, range(len(features)))))

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Say what a fitted model knows; otherwise its parameters, as scikit-learn does."""
        if not hasattr(self, "classifier_"):
            return super().__repr__(N_CHAR_MAX)
        names = [str(name) for name in self.classes_[:MAX_SHOWN]]
        more = len(self.classes_) - len(names)
        listed = ", ".join(names) + (f" and {more} more" if more else "")
        origin = "features of unknown origin" if self.identity_ is None else self.identity_.name
        text = f"<{type(self).__name__} on {origin}, {len(self.classes_)} classes: {listed}>"
        return one_line(text)  # a file names classes as it likes

    _repr_html_ = None  # a notebook shows the same text, not scikit-learn's diagram of parameters

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self)}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the backbone out of pickles; it is loaded again where it is needed."""
        return {key: value for key, value in vars(self).items() if key != "_loaded"}


def open_shots(
    images: Any, labels: Sequence[Any] | None, *, min_classes: int = 2
) -> tuple[ImageSet, Sequence[Any]]:
    """Open labelled images; return them with their labels, which may be of any type."""
    if is_features(images):
        raise InputError(
            "fit takes images or a FeatureTable: for other features, use MIVClassifier().fit(X, y)."
        )
    if labels is None:
        if isinstance(images, str | Path):
            images = open_labelled(images, min_classes=min_classes)
        if not isinstance(images, ImageSet) or images.labels is None:
            raise InputError("Give a label for every image, or a folder of class folders.")
        return images, images.labels
    is_set = isinstance(images, str | Path | ImageSet)
    unlabelled = as_image_set(images) if is_set else from_images(images)
    return label_images(unlabelled, labels, min_classes=min_classes), labels


def is_features(X: Any) -> bool:
    """Return whether X holds features; a table of floating-point numbers is not an image."""
    table = is_array(X) and X.ndim == 2
    return isinstance(X, FeatureTable | Features) or (table and "float" in str(X.dtype))


def embed_names(
    backbone: Backbone, classes: Sequence[Any], templates: Sequence[str]
) -> NameVectors:
    """Embed the names of classes in sentences."""
    vectors = class_vectors(backbone, [str(label) for label in classes], templates)
    return dict(zip(classes, vectors, strict=True))


def _sample(count: int, seed: int) -> list[int]:
    """Return the rows of all unlabelled images or, if they are too many, of a random sample."""
    if count <= LIMIT:
        return list(range(count))
    chosen = np.random.default_rng(seed).choice(count, LIMIT, replace=False)
    return sorted(chosen.tolist())
