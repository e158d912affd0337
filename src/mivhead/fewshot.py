"""`FewShotClassifier`: images in, names out; everything that a fitted model can do.

`mivhead.model` fits, predicts and saves; this module changes models, adds the short cuts to
`mivhead.diagnostics` and `mivhead.export`, and reads models of any kind. A changed model is fitted
to its changed shots; if anything fails, it stays as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from mivhead._util import files
from mivhead._util.estimator import check_fitted
from mivhead.backbones.base import check_origin
from mivhead.backbones.efficientnet_lite import comes_with_mivhead
from mivhead.errors import InputError, NotAvailableError, check_no_missing
from mivhead.features import FeatureTable
from mivhead.images.imageset import label_images
from mivhead.images.sources import as_image_set
from mivhead.model import file
from mivhead.model.exported import ExportedClassifier
from mivhead.model.model import Model, open_shots
from mivhead.model.shots import Change, Shots

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.diagnostics.cross_validation import CrossValidation
    from mivhead.diagnostics.evaluation import Evaluation
    from mivhead.diagnostics.explanation import Explanation
    from mivhead.export.model import Export
    from mivhead.model.exported import Input


class FewShotClassifier(Model):
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
        Side of the input in pixels, of models of timm and OpenCLIP. None: their own, or about 224
        for ViTs that were trained on larger images.
    recipe : {"mivhead", "experts", "paper"} or Recipe, default="mivhead"
        How the head is trained and combined, as for `MIVClassifier`.
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
    random_state : int, default=0
        Random seed of the views and of the initial weights.
    device : str or None, default=None
        Where the backbone runs, such as `"cpu"` or `"cuda"`.
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
    classifier_ : MIVClassifier
        The fitted classifier on features.
    identity_ : Identity or None
        The backbone that the features come from; None if it is not known.
    shots_ : Shots or None
        The shots: names, classes, hashes, and what later changes need; None for a saved
        `MIVClassifier`.
    history_ : list of Change
        The changes since the fit, oldest first.
    copies_ : dict of str to str
        Images that the last fit left out, because they are exact copies of a shot of the same
        class, and the names of these shots. Not part of a model file.
    estimate_ : Estimate or None
        What `check` found out about the accuracy; None if it was not called after the last fit or
        change.
    templates_ : tuple of str
        The sentences in which names were embedded; empty if there are none.
    fit_seconds_ : dict of str to float
        Duration of the last fit: `features` is the time for reading the images, `training` the
        rest. Not part of a model file.
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
    >>> classifier.add([light // 2], ["dusk"]).text
    'added 1 shot: dusk 1 (a new class)'
    >>> classifier.predict(light // 2).tolist()
    ['dusk']
    """

    def add(
        self, images: Any, labels: Sequence[Any] | None = None, *, skip_bad: bool = False
    ) -> Change:
        """Add shots, of new classes or of classes that the model has.

        Only the new images pass the backbone. The result of this and of all other changes equals a
        fit from scratch on all shots, bit for bit.

        Parameters
        ----------
        images, labels, skip_bad
            As for `fit`; features must come from the same backbone.

        Returns
        -------
        Change
            What was added; its notes say which images were left out, because they are duplicates.
        """
        shots = self.kept_shots()
        if isinstance(images, FeatureTable):
            table, labels = images, images.labels if labels is None else labels
            if labels is None:
                raise InputError("The table has no labels to learn from.")
            if self.identity_ is not None:
                check_origin(table.backbone, self.identity_)
        else:
            self.check_takes(features=False)
            opened = open_shots(images, labels, min_classes=1)
            image_set, labels = self.readable_shots(*opened, skip_bad=skip_bad)
            table = self.read_table(image_set)
        new = Shots.from_table(table, [shots.as_label(label) for label in labels])
        joined, added, notes = shots.add(new)
        if not len(added):
            return Change.now("add", "added nothing", notes)
        counts = ", ".join(
            f"{label} {count}" + ("" if label in shots.classes else " (a new class)")
            for label, count in added.counts.items()
        )
        text = f"added {len(added)} {'shot' if len(added) == 1 else 'shots'}: {counts}"
        return self.refit(Change.now("add", text, notes), joined)

    def remove(self, *names: Any) -> Change:
        """Remove classes, or single shots.

        Parameters
        ----------
        *names : str
            Classes, or shots by their names in `shots_`; the end of a name, such as `1.jpg`, is
            enough if only one shot has it.
        """
        if not names:
            raise InputError("Name at least one class or shot to remove.")
        left, classes, shots = self.kept_shots().remove([str(name) for name in names])
        parts = [f"the class {label}" for label in classes] + [f"the shot {name}" for name in shots]
        return self.refit(Change.now("remove", f"removed {', '.join(parts)}"), left)

    def rename(self, old: Any, new: Any, *, merge: bool = False) -> Change:
        """Rename a class, or merge it into another one.

        Parameters
        ----------
        old, new : str
            The class, and its new name.
        merge : bool, default=False
            `new` is a class of the model, and gets the shots of `old`.
        """
        shots = self.kept_shots().rename(old, new, merge=merge)
        text = f"merged {old} into {new}" if merge else f"renamed {old} to {new}"
        return self.refit(Change.now("rename", text), shots)

    def relabel(
        self, shot: str | Mapping[str, Any], label: Any = None, *, new: bool = False
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
        """
        moves = {shot: label} if isinstance(shot, str) else dict(shot)
        if not moves or None in moves.values():
            raise InputError("Give the class that the shot belongs to.")
        shots, parts = self.kept_shots(), []
        for name, target in moves.items():
            shots, full_name, old = shots.relabel(name, target, new=new)
            parts.append(f"{full_name} from {old} to {target}")
        return self.refit(Change.now("relabel", f"moved {', '.join(parts)}"), shots)

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
        images, labels, skip_bad
            As for `fit`.
        include_shots : bool, default=False
            Measure images that the model was trained on as well; by default they are left out.

        Returns
        -------
        Evaluation
            Accuracy with its interval, per class too, confusion matrix and misclassified images;
            `plot()` draws them.
        """
        from mivhead.diagnostics.evaluation import evaluate

        check_fitted(self, "classifier_")
        if (table := self.given_table(images)) is not None:
            if labels is not None:
                check_no_missing("labels", labels)
                table = replace(table, labels=tuple(map(str, labels)))
            images = table
        elif labels is not None:
            images = label_images(as_image_set(images), labels, min_classes=1)
        return evaluate(self, images, skip_bad=skip_bad, include_shots=include_shots)

    def check(self, *, folds: int = 5) -> CrossValidation:
        """Estimate the accuracy by cross-validation on the shots, and find suspicious ones.

        The model remembers the estimate (`estimate_`), and `save` writes it to the file. Models of
        folds learn from shots alone, not from unlabelled images.

        Parameters
        ----------
        folds : int, default=5
            Number of folds, and therefore of heads to train.

        Returns
        -------
        CrossValidation
            Its `estimate`, `accuracy`, `interval` and `suspects`: the shots that were predicted as
            another class.
        """
        from mivhead.diagnostics.cross_validation import cross_validate

        shots = self.kept_shots()
        if self.identity_ is not None and comes_with_mivhead(self.identity_):
            shots = self.with_missing_views(shots)
        support = shots.support(class_vectors=self.name_vectors)
        unfitted = self.classifier_.unfitted()
        result = cross_validate(unfitted, support, shots.names, folds=folds, verbose=self.verbose)
        other = str(self.other) if self.other in self.classes_ else None
        result = replace(result, other=other)
        self.estimate_ = result.estimate
        return result

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
        if (table := self.given_table(images)) is not None:
            images, single = table, False
        elif isinstance(images, str | Path):
            single = Path(images).is_file() and Path(images).suffix.lower() != ".zip"
        explanations = list(explain_images(self, images, **decision))
        return explanations[0] if single and len(explanations) == 1 else explanations

    def save(self, path: str | Path, *, pictures: bool = True) -> None:
        """Write the model to one file, which `mivhead.load` reads.

        The file contains features and small pictures of the support images: treat it like the
        images themselves.

        Parameters
        ----------
        path : str or Path
            The file to write.
        pictures : bool, default=True
            Whether to write the pictures of the shots, which explanations and later changes need.
        """
        file.save(self, path, pictures=pictures)

    def export(
        self,
        path: str | Path,
        *,
        input: Input | None = None,  # noqa: A002  # the word for it
    ) -> Export:
        """Write the model to an ONNX file, which `mivhead.load` reads and onnxruntime runs.

        Parameters
        ----------
        path : str or Path
            The file to write, `.onnx`.
        input : {"images", "features"} or None, default=None
            What the graph takes, as for `mivhead.export.model.export_model`.

        Returns
        -------
        Export
            Size, and how far the file is from the model.
        """
        from mivhead.export.model import export_model

        check_fitted(self, "classifier_")
        return export_model(self, path, input=input)


def load(
    path: str | Path,
    *,
    backbone: str | Backbone | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
) -> FewShotClassifier | ExportedClassifier:
    """Read a model file, or an exported model.

    Parameters
    ----------
    path : str or Path
        A file of `miv fit` or `FewShotClassifier.save`; or an `.onnx` file of `miv export`.
    backbone : str, Backbone or None, default=None
        The backbone of a model that was trained on one of your own. A backbone that mivhead knows
        by name is loaded with the first image. The URL of a service is never taken from the file:
        give it here. An exported model contains its backbone.
    weights : str, Path or None, default=None
        The checkpoint of a model that was trained with a checkpoint of your own.
    device : str or None, default=None
        Where the backbone runs; an exported model runs on the CPU.

    Returns
    -------
    FewShotClassifier or ExportedClassifier
        Both predict with `classify`, `predict` and `predict_proba`.
    """
    if not files.is_exported(path):
        settings: dict[str, Any] = {"backbone": backbone, "weights": weights, "device": device}
        return file.load(path, FewShotClassifier, **settings)
    if backbone is not None or weights is not None or device not in (None, "cpu"):
        raise InputError(f"{path} contains all it needs, and runs on the CPU: give no settings.")
    return ExportedClassifier(path)


@contextmanager
def changing(
    path: str | Path, output: str | Path | None = None, *, keep_old: bool = True, **settings: Any
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
    **settings : dict
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
    ...     mivhead.FewShotClassifier(None).fit(table).save(f"{folder}/model.miv")
    ...     with mivhead.changing(f"{folder}/model.miv") as model:
    ...         model.rename("cow", "bull").text
    ...     mivhead.load(f"{folder}/model.miv").classes_.tolist()
    'renamed cow to bull'
    ['bull', 'cat', 'dog']
    """
    source = Path(path)
    target = source if output is None else Path(output)
    in_place = target.absolute() == source.absolute()
    with files.locked(source) if in_place and source.is_file() else nullcontext():
        model = file.load(source, FewShotClassifier, **settings)
        if in_place and not os.access(source, os.W_OK):
            raise NotAvailableError(f"{source} is write-protected, so it was not changed.")
        before, stamp = len(model.history_), files.stamp(source)
        yield model
        if len(model.history_) == before:
            return
        if in_place and files.stamp(source) != stamp:  # by a program that ignores the lock
            raise NotAvailableError(
                f"{source} was changed by another program in the meantime, so nothing was "
                "written: run the command again."
            )
        with files.keeping(source) if in_place and keep_old else nullcontext():
            file.save(model, target)
