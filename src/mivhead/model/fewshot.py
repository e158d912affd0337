"""`FewShotClassifier`: images in, names out; everything that a fitted model can do.

The class is the way in, with short cuts to where things are done: fitting in
`mivhead.model.fitting`, changes in `mivhead.model.changes`, names and decisions in
`mivhead.model.base`, evaluation and explanations in `mivhead.diagnostics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from mivhead._util.estimator import Estimator, check_fitted
from mivhead._util.text import one_line
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import (
    Backbone,
    Identity,
    check_origin,
    check_same,
    expected_preset,
    named_by_file,
)
from mivhead.backbones.efficientnet_lite import comes_with_mivhead
from mivhead.backbones.preprocessing import DecodedImage
from mivhead.backbones.preset import Preset
from mivhead.ensemble.balance import UNIFORM, Prior, is_uniform
from mivhead.ensemble.names import names_of
from mivhead.errors import InputError, check_no_missing
from mivhead.extraction.cache import FeatureCache, open_cache
from mivhead.features import Features, FeatureTable
from mivhead.head.recipe import Recipe
from mivhead.images.augmentation import Augmentation, ViewRule
from mivhead.images.decoding import ImageLike
from mivhead.images.imageset import (
    ImageSet,
    check_names,
    from_images,
    label_images,
)
from mivhead.images.sources import as_image_set, open_labelled
from mivhead.methods.miv import views_rule
from mivhead.methods.registry import Classifier, get_method, make_method
from mivhead.model import changes
from mivhead.model.base import ImageClassifier, Scores
from mivhead.model.decision import Calibration, DecisionRule
from mivhead.model.fitting import (
    Further,
    fit_images,
    fit_table,
    is_features,
    with_missing_views,
)
from mivhead.model.info import Estimate
from mivhead.model.naming import Vectors
from mivhead.model.prediction import Prediction, Predictions
from mivhead.model.readers import FeatureReader, Reader, reader_for
from mivhead.model.shots import Change, Shots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mivhead.diagnostics.cross_validation import CrossValidation
    from mivhead.diagnostics.evaluation import Evaluation
    from mivhead.diagnostics.explanation import Explanation
    from mivhead.export.model import Export
    from mivhead.export.storage import Storage
    from mivhead.model.exported import Input

MAX_SHOWN = 8  # classes that the short form of a model names

__all__ = ["FewShotClassifier", "Prediction", "Predictions"]


class FewShotClassifier(ImageClassifier, Estimator):
    """Few-shot image classifier on a frozen backbone.

    Images may be paths, PIL images or uint8 arrays; where many are expected, a folder, a zip or a
    single image will do as well. A fitted model also predicts on features, without its backbone:
    a `FeatureTable`, `Features`, or a two-dimensional array of floats.

    Parameters
    ----------
    backbone : str, Backbone, sequence of them or None, default="efficientnet_lite0"
        What `mivhead.backbones.load_backbone` takes, such as a name of
        `mivhead.backbones.list_backbones()`, or a `Backbone` of your own. Several backbones in a
        list are used together. None: for images the default backbone, for a table of features the
        backbone that the table names.
    weights : str, Path or None, default=None
        A checkpoint for a backbone given by name.
    image_size : int or None, default=None
        Side of the input in pixels, of models of timm, OpenCLIP and transformers. None: their own,
        or about 224 for ViTs that were trained on larger images.
    method : str, default="miv"
        The name of a method (`mivhead.methods.list_methods()`), or a class of your own as
        `module:Class`.
    method_params : Mapping or None, default=None
        Hyperparameters of the method, by name.
    recipe : str, Recipe or None, default=None
        How the MIV-head is trained: `"mivhead"`, `"paper"`, or a `Recipe`. None: the method's own.
    names : bool or None, default=None
        Use the names of the classes as knowledge, embedded by the text tower of the backbone. None:
        for backbones that have one. Names that do not help are not used (`names_used`). True: it is
        an error if the backbone has none.
    templates : sequence of str or None, default=None
        Sentences in which `{}` stands for the name of a class, such as `"a photo of a {}, a bird"`.
        None: `mivhead.backbones.text.TEMPLATES`.
    threshold : int or None, default=None
        T: classes with at most T shots get augmented views, as many as `views_rule` of the recipe
        says; 0 switches augmentation off. None: the threshold of the backbone's preset.
    augmentation : Augmentation or None, default=None
        How views are made. None: flip, grayscale and RandAugment, as in the paper.
    other : object, default="other"
        A class of this name stands for everything else. It is trained like a class, its images are
        background for decisions, and it is never predicted as a name: an image of it is "none of
        these". None: it is a class like all others.
    class_prior : {"uniform", "shots"} or mapping of class to frequency, default="uniform"
        How frequent the classes are among new images: all alike, in proportion to their numbers of
        shots, or as given. `classify(class_prior=...)` replaces it.
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
    shots_ : Shots or None
        The shots: names, classes, hashes, and what later changes need. None for a method that
        tunes the backbone.
    history_ : list of Change
        The changes since the fit, oldest first.
    copies_ : dict of str to str
        Images that the last fit left out, because they are exact copies of a shot of the same
        class, and the names of these shots. Not part of a model file.
    estimate_ : Estimate or None
        What `check` found out about the accuracy; None if it was not called after the last fit or
        change.
    templates_ : tuple of str
        The sentences in which names were embedded; empty if there are none, or vectors were given.
    fit_seconds_ : dict of str to float
        Duration of the last fit: `features` (or `reading`, for a method that tunes the backbone) is
        the time for reading the images, `training` the rest. Not part of a model file.
    skipped_ : list of Skipped
        Images that the last call with `skip_bad` left out.

    Notes
    -----
    A model may predict in several threads, and in processes that are forked after it has predicted.

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
    shots_: Shots | None
    history_: list[Change]
    copies_: dict[str, str]
    estimate_: Estimate | None
    fit_seconds_: dict[str, float]
    templates_: tuple[str, ...] = ()

    def __init__(
        self,
        backbone: str | Backbone | Sequence[str | Backbone] | None = DEFAULT_BACKBONE,
        *,
        weights: str | Path | None = None,
        image_size: int | None = None,
        method: str = "miv",
        method_params: Mapping[str, Any] | None = None,
        recipe: str | Recipe | None = None,
        names: bool | None = None,
        templates: Sequence[str] | None = None,
        threshold: int | None = None,
        augmentation: Augmentation | None = None,
        other: Any = "other",
        class_prior: Prior = UNIFORM,
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
        self.names = names
        self.templates = templates
        self.threshold = threshold
        self.augmentation = augmentation
        self.other = other
        self.class_prior = class_prior
        self.random_state = random_state
        self.device = device
        self.cache = cache
        self.verbose = verbose

    def fit(
        self,
        images: str | Path | Iterable[ImageLike] | FeatureTable = (),
        labels: Sequence[Any] | None = None,
        *,
        skip_bad: bool = False,
        unlabelled: Any = None,
        classes: Sequence[Any] = (),
        class_vectors: Vectors | None = None,
    ) -> Self:
        """Train on labelled images.

        Parameters
        ----------
        images : path, ImageSet, iterable of images, or FeatureTable, default=()
            The shots: a folder of class folders, a zip of one, or a CSV of paths and labels;
            images, with `labels`; or features that were extracted before, as for `fit_table`. There
            may be none, or those of one class, if all classes have names or vectors.
        labels : sequence or None, default=None
            A label per image, if the images do not come with labels.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.
        unlabelled : images, features or None, default=None
            Images without labels, to learn from as well: what `predict` takes. They should look
            like the images to predict, and some may show none of the classes. The method must be
            `miv` with its default recipe. The model does not keep them. Of more than 500, a random
            sample is used.
        classes : sequence, default=()
            Names of further classes, of which there are no images. The backbone must have a text
            tower, or `class_vectors` must be given.
        class_vectors : mapping of label to vector, FeatureTable or None, default=None
            Vectors of all classes, in the space of the last block of the features, instead of those
            of the backbone's text tower; or a table of them with labels.

        Returns
        -------
        FewShotClassifier
            Itself.
        """
        how = {"unlabelled": unlabelled, "classes": classes, "class_vectors": class_vectors}
        if isinstance(images, FeatureTable):
            return self.fit_table(images, labels, **how)
        if is_features(images):
            raise InputError(
                "fit takes images. To train on features, use MIVClassifier().fit(X, y), or "
                "FewShotClassifier(backbone=None).fit_table(table)."
            )
        if labels is None:
            if isinstance(images, str | Path | ImageSet):
                return self.fit_folder(images, skip_bad=skip_bad, **how)
            images, labels = tuple(images), ()
            if images:
                raise InputError("Give a label for every image, or a folder of class folders.")
        if isinstance(images, str | Path | ImageSet):
            shots = as_image_set(images)
        else:
            shots = from_images(images)
        named = bool(classes) or class_vectors is not None
        shots = label_images(shots, labels, min_classes=0 if named else 2)
        fit_images(self, shots, labels, Further(**how), skip_bad=skip_bad)
        return self

    def fit_folder(
        self,
        path: str | Path | ImageSet,
        *,
        skip_bad: bool = False,
        label: str | None = None,
        encoding: str | None = None,
        unlabelled: Any = None,
        classes: Sequence[Any] = (),
        class_vectors: Vectors | None = None,
    ) -> Self:
        """Train on a folder of class folders, a zip of one, or a CSV of paths and labels.

        Parameters
        ----------
        path : str, Path or ImageSet
            The folder, zip or CSV, or labelled images that have been opened already.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.
        label : str or None, default=None
            The column of the labels in a CSV; None: `label` or `class`.
        encoding : str or None, default=None
            The encoding of a CSV, such as `"cp1252"`; None: UTF-8.
        unlabelled : images, features or None, default=None
            Images without labels, as for `fit`.
        classes, class_vectors : optional
            Classes without images, and vectors of classes, as for `fit`.

        Returns
        -------
        FewShotClassifier
            Itself.
        """
        if isinstance(path, ImageSet):
            images = path
        else:
            fewest = 1 if classes or class_vectors is not None else 2
            images = open_labelled(path, label=label, encoding=encoding, min_classes=fewest)
        further = Further(unlabelled, classes, class_vectors)
        fit_images(self, images, None, further, skip_bad=skip_bad)
        return self

    def fit_table(
        self,
        table: FeatureTable,
        labels: Sequence[Any] | None = None,
        *,
        unlabelled: Any = None,
        classes: Sequence[Any] = (),
        class_vectors: Vectors | None = None,
    ) -> Self:
        """Train on features that were extracted before, by `extract` or elsewhere.

        Parameters
        ----------
        table : FeatureTable
            Features, and perhaps labels, views and the identity of the backbone.
        labels : sequence or None, default=None
            A label per image, instead of the table's.
        unlabelled : images, features or None, default=None
            Images without labels, as for `fit`.
        classes, class_vectors : optional
            Classes without images, and vectors of classes, as for `fit`.

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
        fit_table(self, table, labels, Further(unlabelled, classes, class_vectors))
        return self

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
            Features, ids, labels and views, for `fit_table`, `predict` or a file. Labelled images
            come with their hashes and small pictures, which a model needs when it is changed.
        """
        images = as_image_set(images)
        check_names(images.ids)  # a table holds them
        if images.labels is not None:
            self._check_params()
        backbone = self.load_backbone()
        images = self.readable(images, skip_bad=skip_bad)
        rule = None if images.labels is None else self._view_rule(backbone.preset)
        return self._feature_reader().table(images, rule)

    @property
    def calibration(self) -> Calibration | None:
        """Out-of-fold scores of the shots, from which thresholds follow; None if there are none."""
        check_fitted(self, "classifier_")
        rule: DecisionRule | None = self.classifier_.decision_
        return None if rule is None else rule.calibration

    @property
    def no_decision(self) -> str | None:
        """Why the model always gives a name; None if it can be unsure or say "none of these"."""
        if self.classifier_.decision_ is not None:
            return None
        if self.needs_images:
            return f"{self.method} tunes the backbone and leaves no shot out while it is fitted."
        return (
            "the model file comes from an earlier version of mivhead, which kept no out-of-fold "
            "scores; fit the model again."
        )

    @property
    def shot_counts(self) -> dict[Any, int] | None:
        """Number of shots per class; None if it is not known."""
        if self.shots_ is not None:
            return self.shots_.counts
        counts = getattr(self.classifier_, "shots_", None)
        if counts is None:
            return None
        return dict(zip(self.classes_.tolist(), map(int, counts), strict=True))

    @property
    def view_count(self) -> int:
        """Number of augmented views that the model was trained on."""
        if self.shots_ is not None:
            return self.shots_.view_count
        return getattr(self.classifier_, "views_", 0)

    def add(
        self,
        images: Any,
        labels: Sequence[Any] | None = None,
        *,
        skip_bad: bool = False,
        unlabelled: Any = None,
        class_vectors: Vectors | None = None,
    ) -> Change:
        """Add shots, of new classes or of classes that the model has.

        Only the new images pass the backbone. The result equals a fit from scratch on all shots,
        bit for bit; this holds for all changes but `rename`, which does not fit.

        Parameters
        ----------
        images : path, ImageSet, iterable of images, or FeatureTable
            A folder of class folders, a zip of one, or a CSV of paths and labels; images, with
            `labels`; or features with labels, of the same backbone.
        labels : sequence or None, default=None
            A label per image, if the images do not come with labels.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped_`.
        unlabelled : images, features or None, default=None
            Images without labels, as for `fit`. Without them, the changed model learns from its
            shots alone.
        class_vectors : mapping of label to vector, FeatureTable or None, default=None
            Vectors of new classes, for a model that was fitted with class vectors.

        Returns
        -------
        Change
            What was added; its notes say which images were left out, because they are duplicates.

        Examples
        --------
        >>> import numpy as np
        >>> from mivhead import FewShotClassifier
        >>> dark, light = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
        >>> classifier = FewShotClassifier(threshold=0).fit([dark, light], ["night", "day"])
        >>> classifier.add([light // 2], ["dusk"]).text
        'added 1 shot: dusk 1 (a new class)'
        >>> classifier.predict(light // 2).tolist()
        ['dusk']
        """
        further = Further(unlabelled, class_vectors=class_vectors)
        return changes.add(self, images, labels, further, skip_bad=skip_bad)

    def remove(self, *names: Any, unlabelled: Any = None) -> Change:
        """Remove classes, or single shots.

        A model that knows its classes by name keeps a class whose shots are all removed.

        Parameters
        ----------
        *names : str
            Classes, or shots by their names in `shots_`; the end of a name, such as `1.jpg`, is
            enough if only one shot has it.
        unlabelled : images, features or None, default=None
            As for `add`.

        Returns
        -------
        Change
            What was removed.
        """
        return changes.remove(self, [str(name) for name in names], Further(unlabelled))

    def rename(self, old: Any, new: Any, *, merge: bool = False, unlabelled: Any = None) -> Change:
        """Rename a class, or merge it into another one.

        Another name changes nothing that the model learned, so predictions stay the same. A fit
        from scratch differs in the last digits if the classes come into another order. Only for
        the method `miv`: a model of another method, one that uses the names of its classes, or one
        whose class for everything else is renamed, is fitted again, as for all other changes.

        Parameters
        ----------
        old, new : str
            The class, and its new name.
        merge : bool, default=False
            `new` is a class of the model, and gets the shots of `old`.
        unlabelled : images, features or None, default=None
            As for `add`.

        Returns
        -------
        Change
            What was renamed.
        """
        return changes.rename(self, old, new, Further(unlabelled), merge=merge)

    def relabel(
        self,
        shot: str | Mapping[str, Any],
        label: Any = None,
        *,
        new: bool = False,
        unlabelled: Any = None,
    ) -> Change:
        """Move a shot to another class, or several shots at once.

        Parameters
        ----------
        shot : str or mapping
            Name of the shot, as for `remove`; or the classes of several shots, by their names.
        label : str or None, default=None
            The class that the shot belongs to; not given for a mapping.
        new : bool, default=False
            Whether it may be a new class.
        unlabelled : images, features or None, default=None
            As for `add`.

        Returns
        -------
        Change
            What was moved.
        """
        moves = {shot: label} if isinstance(shot, str) else dict(shot)
        return changes.relabel(self, moves, Further(unlabelled), new=new)

    # How good the model is, and why it decides as it does: short cuts to `mivhead.diagnostics`.

    def evaluate(
        self,
        images: Any,
        labels: Sequence[Any] | None = None,
        *,
        skip_bad: bool = False,
        include_shots: bool = False,
    ) -> Evaluation:
        """Measure the model on labelled images that it was not trained on.

        Parameters
        ----------
        images : path, ImageSet, iterable of images, or features
            A folder of class folders, a zip of one, or a CSV of paths and labels; images or
            features, with `labels`; or a `FeatureTable` that has labels.
        labels : sequence or None, default=None
            A label per image, if the images do not come with labels.
        skip_bad : bool, default=False
            Leave out images that cannot be read.
        include_shots : bool, default=False
            Measure images that the model was trained on as well; by default they are left out.

        Returns
        -------
        Evaluation
            Accuracy with its interval, per class too, confusion matrix and misclassified images;
            `plot()` and `plot_mistakes()` draw them.
        """
        from mivhead.diagnostics.evaluation import evaluate

        check_fitted(self, "classifier_")
        if (table := self._given_table(images)) is not None:
            if labels is not None:
                check_no_missing("labels", labels)
                table = replace(table, labels=tuple(map(str, labels)))
            images = table
        elif labels is not None:
            images = label_images(as_image_set(images), labels, min_classes=1)
        return evaluate(self, images, skip_bad=skip_bad, include_shots=include_shots)

    def check(self, *, folds: int = 5) -> CrossValidation:
        """Estimate the accuracy by cross-validation on the shots, and find suspicious ones.

        The model remembers the estimate (`estimate_`), and `save` writes it to the file.

        Parameters
        ----------
        folds : int, default=5
            Number of folds, and therefore of heads to train.

        Returns
        -------
        CrossValidation
            Its `accuracy`, `interval` and `suspects`: the shots that were predicted as another
            class.

        Notes
        -----
        Models of folds learn from shots alone, not from unlabelled images. Classes without shots
        take no part; if fewer than two classes have shots, nothing can be tested. A model of a
        compact file has no augmented views, so its estimate may differ from the one that `miv fit`
        printed.
        """
        from mivhead.diagnostics.cross_validation import CrossValidation, cross_validate_support

        shots, vectors = changes.own_shots(self), None
        if self.identity_ is not None and comes_with_mivhead(self.identity_):
            shots = with_missing_views(self, shots)
        if (names := names_of(self.classifier_)) is not None:
            seen = self.classes_[names.seen].tolist()
            vectors = dict(zip(seen, names.vectors[names.seen], strict=True))
        if len(shots.classes) < 2:  # there is no other class to take a shot for
            every = np.asarray(sorted(map(str, self.classes_.tolist())))
            untested = np.full((len(shots), len(every)), np.nan)
            labels = tuple(map(str, shots.labels.tolist()))
            result = CrossValidation(shots.names, labels, every, untested, 0)
        else:
            unfitted = self.classifier_._unfitted()  # a loaded one, too, has its settings
            support = shots.support(class_vectors=vectors)
            result = cross_validate_support(
                unfitted, support, shots.names, folds=folds, verbose=self.verbose
            )
        known = dict(zip(result.classes.tolist(), result.estimate.per_class, strict=True))
        per_class = tuple(known.get(str(label)) for label in self.classes_.tolist())
        self.estimate_ = replace(result.estimate, per_class=per_class)
        return result

    def plot_attention(
        self, image: Any, path: str | Path | None = None, *, shots: str | Path | None = None
    ) -> Figure:
        """Draw which patches of an image, and which shots, a MIV-head attends to.

        Parameters
        ----------
        image : path, PIL image, array or binary file
            One image.
        path : str, Path or None, default=None
            A .png, .svg or .pdf file to write. None writes nothing.
        shots : str, Path or None, default=None
            The folder of the shots, to draw them in full; None draws the small pictures that the
            model keeps, or bars if it keeps none.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it.
        """
        from mivhead.diagnostics.plots import Case

        check_fitted(self, "classifier_")
        return Case(self, image).plot_attention(path, shots=shots)

    def plot_tsne(
        self,
        image: Any,
        path: str | Path | None = None,
        *,
        truth: str | None = None,
        seed: int = 0,
    ) -> Figure:
        """Draw the vectors that a MIV-head compares for an image, projected by t-SNE.

        Parameters
        ----------
        image : path, PIL image, array or binary file
            One image.
        path : str, Path or None, default=None
            A .png, .svg or .pdf file to write. None writes nothing.
        truth : str or None, default=None
            The true class of the image, which gives it its colour.
        seed : int, default=0
            Random seed of t-SNE.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it.
        """
        from mivhead.diagnostics.plots import Case

        check_fitted(self, "classifier_")
        return Case(self, image).plot_tsne(path, truth=truth, seed=seed)

    def explain(self, images: Any, **decision: Any) -> Explanation | list[Explanation]:
        """Say why the model gives images their names.

        Parameters
        ----------
        images : images or features
            As for `predict`.
        **decision : dict
            Thresholds, as for `classify`.

        Returns
        -------
        Explanation, or list of Explanation
            Where the model looked, the closest shots, the runner-up and the votes of the members.
            One explanation for a single image, a list for a folder, a list of images or features.
        """
        from mivhead.diagnostics.explanation import explain_images

        check_fitted(self, "classifier_")
        single = isinstance(images, Image | bytes) or getattr(images, "ndim", 0) in (2, 3)
        if (table := self._given_table(images)) is not None:
            images, single = table, False
        elif isinstance(images, str | Path):
            single = Path(images).is_file() and Path(images).suffix.lower() != ".zip"
        found = list(explain_images(self, images, **decision))
        return found[0] if single and len(found) == 1 else found

    def save(self, path: str | Path, *, compact: bool = False) -> None:
        """Write the model to one file, which `mivhead.load` reads.

        The file contains features and small pictures of the support images: treat it like the
        images themselves.

        Parameters
        ----------
        path : str or Path
            The file to write.
        compact : bool, default=False
            Leave out what only later changes and explanations need: the pictures of the shots, and
            the features of their augmented views. If the model is changed later, it is fitted
            without views. Features that are mostly zeros are written without the zeros.
        """
        from mivhead.model.file import save

        check_fitted(self, "classifier_")
        save(self, path, compact=compact)

    def export(
        self,
        path: str | Path,
        *,
        input: Input | None = None,  # noqa: A002  # the word for it
        storage: Storage = "float32",
    ) -> Export:
        """Write the model to an ONNX file, which `mivhead.load` reads and onnxruntime runs.

        Parameters
        ----------
        path : str or Path
            The file to write, `.onnx`.
        input : {"images", "pixels", "features"} or None, default=None
            What the graph takes, as for `mivhead.export.model.export_model`.
        storage : {"float32", "half", "int8"}, default="float32"
            How weights are stored.

        Returns
        -------
        Export
            Size, and how far the file is from the model.
        """
        from mivhead.export.model import export_model

        check_fitted(self, "classifier_")
        return export_model(self, path, input=input, storage=storage)

    @property
    def needs_images(self) -> bool:
        """Whether the method tunes a copy of the backbone, so that features are not enough."""
        return get_method(self.method).needs == "images"

    def make_classifier(self, preset: Preset | None = None) -> Classifier:
        """Make the estimator that `fit` trains, not fitted yet.

        Parameters
        ----------
        preset : Preset, default=None
            Settings of the backbone; None: derived from the shapes of the features.

        Returns
        -------
        FeatureClassifier or TuningClassifier
        """
        known = get_method(self.method).hyperparameters()
        shown: dict[str, Any] = {"verbose": self.verbose} if "verbose" in known else {}
        if not is_uniform(self.class_prior):
            if "class_prior" not in known:
                raise InputError(
                    f"{self.method} takes no class_prior: use the method miv, or give the prior "
                    "when you predict."
                )
            shown["class_prior"] = self.class_prior
        classifier: Classifier = make_method(
            self.method,
            preset=preset,
            recipe=self.recipe,
            random_state=self.random_state,
            device=self.device,
            **shown | dict(self.method_params or {}),
        )
        return classifier

    def load_backbone(self) -> Backbone:
        """Return the backbone, which is loaded on first use.

        A fitted classifier needs the one that it was fitted with: any other is an error.

        Returns
        -------
        Backbone
        """
        identity: Identity | None = getattr(self, "identity_", None)
        loaded = self._loaded_backbone
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
            self._loaded = loaded, self._backbone_params
        if identity is not None:
            check_same(loaded.identity, identity)
        return loaded

    @property
    def _loaded_backbone(self) -> Backbone | None:
        """The backbone, if it is loaded, and the parameters that name it are still the same."""
        loaded, params = getattr(self, "_loaded", (None, self._backbone_params))
        same = all(a is b for a, b in zip(params, self._backbone_params, strict=True))
        return loaded if same else None

    @property
    def _backbone_params(self) -> tuple[Any, ...]:
        return self.backbone, self.weights, self.image_size, self.device

    def read_parts(self, images: ImageSet) -> Iterator[Any]:
        """Read any number of images in bounded memory, as the fitted method takes them.

        Parameters
        ----------
        images : ImageSet
            The images; labels are ignored.

        Yields
        ------
        Features, or array of shape (n, R, R, 3)
            Features of the next images, in their order; for a method that tunes the backbone,
            their pixels.
        """
        unlabelled = replace(images, labels=None)  # labelled ones would get augmented views
        yield from self._own_reader().parts(unlabelled)

    def check_takes(self, *, features: bool, backbone: Mapping[str, Any] | None = None) -> None:
        """Raise an error if the model does not take images, or features.

        Parameters
        ----------
        features : bool
            Whether features are given, not images.
        backbone : mapping or None, default=None
            Identity of the backbone that the features come from, if it is known.
        """
        if features and self.needs_images:
            raise InputError("The model has a tuned backbone: it needs images, not features.")
        if features and self.identity_ is not None:
            check_origin(backbone, self.identity_)
        if not features and self.identity_ is None and self.backbone is None:
            raise InputError(
                "The model was trained on features of unknown origin: give it features, or the "
                "backbone they came from with `mivhead.load(path, backbone=...)`."
            )

    def read_pictures(self, pictures: Sequence[DecodedImage]) -> Any:
        """Pass a batch of decoded images through the backbone, without the feature cache.

        Parameters
        ----------
        pictures : sequence of PIL images or uint8 arrays
            Of any size; those of the backbone's size are not resized.

        Returns
        -------
        Features, or array of shape (n, R, R, 3)
            Their features; for a method that tunes the backbone, their pixels.
        """
        return self._own_reader().pictures(pictures)

    def score_read(self, read: Any) -> Scores:
        """Score a batch that was read.

        Parameters
        ----------
        read : Features, or array of shape (n, R, R, 3)
            What `read_pictures` returns and `read_parts` yields.

        Returns
        -------
        Scores
        """
        return Scores(*self.classifier_.score_unknown(read))

    @property
    def names_used(self) -> bool | None:
        """Whether the model uses the names of its classes; None if it was not given any."""
        names = names_of(self.classifier_)
        return None if names is None else names.used

    def _check_params(self) -> None:
        """Check all parameters that can be checked without a backbone and without images."""
        self.make_classifier()._check_params()

    def _view_rule(self, preset: Preset) -> ViewRule | None:
        """Return how many augmented views shots have, and how they are made, if any are used."""
        rule = views_rule(self.method, self.recipe, self.method_params)
        if rule is None:
            return None
        threshold = preset.threshold if self.threshold is None else self.threshold
        return ViewRule(threshold, rule, self.random_state, self.augmentation or Augmentation())

    def _given_features(self, X: Any) -> Any | None:
        """Return the features in X, or None if it holds images."""
        check_fitted(self, "classifier_")
        if not is_features(X):
            return None
        is_table = isinstance(X, FeatureTable)
        self.check_takes(features=True, backbone=X.backbone if is_table else None)
        return X.features if is_table else X

    def _given_table(self, X: Any) -> FeatureTable | None:
        """Return the features in X as a table, numbered if they have no names, or None."""
        features = self._given_features(X)
        if features is None or isinstance(X, FeatureTable):
            return X if features is not None else None
        return FeatureTable(Features(features), tuple(map(str, range(len(features)))))

    def _own_reader(self) -> Reader:
        """Return what reads images for the fitted method."""
        self.check_takes(features=False)
        reader = self._reader(self.classifier_)
        reader.attach(self.classifier_)
        return reader

    def _reader(self, classifier: Classifier) -> Reader:
        return reader_for(
            classifier,
            self.load_backbone(),
            cache=self._cache(),
            augmentation=self.augmentation,
            verbose=self.verbose,
        )

    def _feature_reader(self) -> FeatureReader:
        return FeatureReader(self.load_backbone(), self._cache(), self.verbose)

    def _origin(self, table: FeatureTable) -> tuple[Preset | None, Identity | None]:
        """Find the settings and the identity of the backbone that features come from, if known."""
        if self.backbone is None:
            if table.backbone is None:
                return None, None  # the settings follow from the shapes
            given = named_by_file(Identity.from_json(table.backbone))
            loaded = load_backbone(given, weights=self.weights, device=self.device)
            self._loaded = loaded, self._backbone_params
        backbone = self.load_backbone()
        check_origin(table.backbone, backbone.identity)
        found, expected = len(table.features.blocks), len(backbone.preset.blocks)
        if found != expected:
            raise InputError(
                f"The features have {found} block{'s' * (found != 1)}, those of the backbone "
                f"{backbone.identity.name!r} have {expected}: for features from elsewhere, use "
                "FewShotClassifier(backbone=None)."
            )
        return backbone.preset, backbone.identity

    def _cache(self) -> FeatureCache | None:
        given = self.backbone
        parts = given if isinstance(given, list | tuple) else [given]
        by_name = all(part is None or isinstance(part, str) for part in parts)
        wanted = by_name if self.cache is None else self.cache
        return open_cache(None if wanted is True else wanted) if wanted else None

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Say what a fitted model knows; otherwise its parameters, as scikit-learn does."""
        if not hasattr(self, "classifier_"):
            return super().__repr__(N_CHAR_MAX)
        names = [str(name) for name in self.classes_[:MAX_SHOWN]]
        more = len(self.classes_) - len(names)
        listed = ", ".join(names) + (f" and {more} more" if more else "")
        origin = "features of unknown origin" if self.identity_ is None else self.identity_.name
        count = len(self.classes_)
        text = f"<FewShotClassifier: {self.method} on {origin}, {count} classes: {listed}>"
        return one_line(text)  # a file names classes as it likes

    _repr_html_ = None  # a notebook shows the same text, not scikit-learn's diagram of parameters

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self)}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the backbone out of pickles; it is loaded again where it is needed."""
        return {key: value for key, value in vars(self).items() if key != "_loaded"}
