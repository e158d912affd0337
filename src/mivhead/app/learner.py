"""What the app knows about a project: the model, how good it is, and names for the new photos.

A thread follows the project. After every change it fits the model, names the new photos and
cross-validates, and starts again as soon as the shots have changed meanwhile. Only new photos pass
the backbone, because features are cached.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.app.project import MODEL, Photo, Project, Snapshot
from mivhead.errors import ImageError, InputError, MivError
from mivhead.images.imageset import ImageSet, ImageSource, given, numbered

if TYPE_CHECKING:
    from mivhead.diagnostics.cross_validation import CrossValidation
    from mivhead.diagnostics.explanation import Explanation
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.prediction import Prediction

_log = logging.getLogger(__name__)

DEBOUNCE = 0.4  # seconds without a change before the model is fitted
PART = 32  # new photos named at a time
RESCAN = 2.0  # seconds between two looks for changes in a file manager
FOLDS = 5
ENOUGH = 5  # shots of a class, below which more are advised
GOOD = 0.8  # share of the shots of a class that are named correctly, below which more are advised
MAX_WEAK = 2  # such classes that the advice names
MAX_SUSPECTS = 50
MAX_CLOSEST = 4  # shots that the page shows for a photo
MAX_SUGGESTED = 30

# Stages, in their order.
WAITING, READING, FITTING, NAMING, CHECKING, READY, FAILED = (
    *("waiting", "reading", "fitting", "naming", "checking", "ready", "failed"),
)


@dataclass(frozen=True)
class Knowledge:
    """What the learner has found out; replaced as a whole."""

    stage: str = WAITING  # what it is doing
    problem: str = ""  # why it failed, or what the user should know
    model: FewShotClassifier | None = None  # the model that was fitted last
    # The class of every photo that the model has learned from, by the id of the photo
    shots: dict[str, str] = field(default_factory=dict)
    predictions: dict[str, Prediction] = field(default_factory=dict)  # by the id of a new photo
    # Ids of new photos, those first that would help most if they were labelled
    suggested: tuple[str, ...] = ()
    estimate: dict[str, Any] | None = None  # how good the model is, as JSON
    unlabelled: int = 0  # number of new photos that the model has learned from, without names
    seconds: float = 0.0  # time from the change to the fitted model


class Learner:
    """Keeps the model of a project up to date, in a thread of its own.

    Every fit starts with a copy of `model`, which is not fitted, after `debounce` seconds without a
    change.
    """

    def __init__(
        self,
        project: Project,
        model: FewShotClassifier,
        *,
        debounce: float = DEBOUNCE,
    ) -> None:
        self.project = project
        self.known = Knowledge()
        self.version = 0  # grows with every change of `known`
        self._base = model  # unfitted; holds the backbone once it is loaded
        self._debounce = debounce
        self._stopped = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._fitted: tuple[tuple[str, str], ...] | None = None  # path and class of each shot
        self._used: tuple[str, ...] = ()  # ids of the new photos that were learned from as well
        self._stamp: tuple[int, int] | None = None  # of the model file that was written last
        self._made: dict[str, FewShotClassifier] = {}  # what was exported last, by its kind

    @property
    def other(self) -> str | None:
        """The name of the class that stands for everything else."""
        name = self._base.other
        return None if name is None else str(name)

    @cached_property
    def can_use_unlabelled(self) -> bool:
        """Whether the method can learn from photos without names."""
        return self._base.make_classifier().has_ensemble

    def start(self) -> None:
        """Start to follow the project."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; a fit in progress is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        seen = 0
        looked = time.monotonic()
        while not self._stopped.wait(0.05):
            if time.monotonic() - looked > RESCAN:
                self.project.rescan()
                looked = time.monotonic()
            version = self.project.version
            if version == seen:
                continue
            if self._stopped.wait(self._debounce):
                return
            if self.project.version != version:  # more is coming
                continue
            seen = version
            try:
                with self._busy:
                    self._learn(self.project.snapshot())
            except MivError as error:
                self._tell(stage=FAILED, problem=str(error))
            # The thread must survive whatever happens, and the page must say so.
            except Exception as error:
                if self._stopped.is_set():  # the interpreter may be shutting down
                    return
                _log.error("learning failed", exc_info=error)
                reason = f"The model could not be fitted: {error!s:.200} (see the terminal)."
                self._tell(stage=FAILED, problem=reason)

    def _tell(self, **changes: Any) -> None:
        self.known = Knowledge(**vars(self.known) | changes)
        self.version += 1

    def _learn(self, found: Snapshot) -> None:
        started = time.perf_counter()
        self._tell(stage=READING, problem="")
        shots = [(p, c) for c, photos in found.classes.items() for p in self._readable(photos)]
        new = self._readable(found.new)
        keys = tuple((photo.path, label) for photo, label in shots)
        others = new if self.project.settings.unlabelled and self.can_use_unlabelled else []
        used = tuple(sorted(each.id for each in others))
        fresh = (keys, used) != (self._fitted, self._used)
        if fresh:
            if len({label for _, label in shots}) < 2:
                self._fitted = None
                nothing = Knowledge(WAITING)
                self._tell(**vars(nothing))
                return
            images = self._images([photo for photo, _ in shots], [label for _, label in shots])
            table = self._base.extract(images)
            if self._outdated(keys):
                return
            self._tell(stage=FITTING)
            model = _twin(self._base)
            model.fit_table(table, unlabelled=self._images(others) if others else None)
            note = self._save(model)
            self._fitted, self._used = keys, used
            self._tell(
                model=model,
                shots={photo.id: label for photo, label in shots},
                seconds=time.perf_counter() - started,
                problem=note,
                predictions={},
                unlabelled=_learned_unlabelled(model),
            )
        self._name(new)
        if fresh and not self._outdated(keys):
            self._check(shots)
        self._tell(stage=READY)

    def _readable(self, photos: Sequence[Photo]) -> list[Photo]:
        """Return the photos that can be decoded; thumbnails are made on the way."""
        good = []
        for each in photos:
            try:
                self.project.thumbnail(each)
            except ImageError:
                self.version += 1  # the page shows the reason
            except OSError:  # a full disk: the photo itself may be fine
                good.append(each)
            else:
                good.append(each)
        return good

    def _images(self, photos: Sequence[Photo], labels: Sequence[str] | None = None) -> ImageSet:
        sources = tuple(
            ImageSource(each.path, given(self.project.folder / each.path), each.name)
            for each in photos
        )
        return ImageSet(sources, None if labels is None else tuple(labels))

    def _outdated(self, keys: tuple[tuple[str, str], ...]) -> bool:
        """Return whether the shots have changed meanwhile."""
        found = self.project.snapshot()
        now = {(each.path, name) for name, photos in found.classes.items() for each in photos}
        return not now.issuperset(keys) or len(now) - len(keys) > len(
            [1 for photos in found.classes.values() for p in photos if self.project.problem(p)]
        )

    def _name(self, new: Sequence[Photo]) -> None:
        model = self.known.model
        if model is None:
            return
        kept = {each.id for each in new}
        done = {key: value for key, value in self.known.predictions.items() if key in kept}
        missing = [each for each in new if each.id not in done]
        if missing:
            self._tell(stage=NAMING)
        for start in range(0, len(missing), PART):
            part = missing[start : start + PART]
            for photo, found in zip(part, model.classify(self._images(part)), strict=True):
                done[photo.id] = found
            self._tell(predictions=dict(done))
            if self._outdated(self._fitted or ()):
                return
        if len(done) != len(self.known.predictions):
            self._tell(predictions=done)
        self._suggest(new)

    def _suggest(self, new: Sequence[Photo]) -> None:
        from mivhead.diagnostics.suggestion import suggest

        id_of = {each.path: each.id for each in new}
        found = []
        if len(new) > 1:
            found = suggest(self._images(new), MAX_SUGGESTED, model=self.known.model)
        self._tell(suggested=tuple(id_of[each.id] for each in found))

    def _check(self, shots: Sequence[tuple[Photo, str]]) -> None:
        model = self.known.model
        if model is None:
            return
        self._tell(stage=CHECKING)
        result = model.check(folds=FOLDS)
        self._save(model)  # again, with the estimate
        id_of = {photo.path: photo.id for photo, _ in shots}
        self._tell(estimate=describe(result, id_of))
        counts = Counter(label for _, label in shots)
        if min(counts.values()) >= ENOUGH and not self._outdated(self._fitted or ()):
            trend = extrapolate(_twin(model).check(folds=2), result)
            self._tell(estimate={**(self.known.estimate or {}), "trend": trend})

    def _save(self, model: FewShotClassifier) -> str:
        """Write the model; a file that someone else has written is set aside, not overwritten."""
        path = self.project.folder / MODEL
        note = ""
        stamp = _stamp(path)
        if stamp is not None and stamp != self._remembered():
            free = next(
                each
                for name in numbered("model (from elsewhere).miv")
                if not (each := path.with_name(name)).exists()
            )
            path.rename(free)
            note = f"{MODEL} was changed by another program: it is now called {free.name}."
        model.save(path)
        self._stamp = _stamp(path)
        mark = self.project.folder / ".miv-app" / "model.stamp"
        with suppress(OSError):
            mark.write_text(repr(self._stamp), "utf-8")
        return note

    def _remembered(self) -> tuple[int, int] | None:
        """Return the stamp of the model file that this app has written, in this run or before."""
        if self._stamp is None:
            mark = self.project.folder / ".miv-app" / "model.stamp"
            try:
                size, when = mark.read_text("utf-8").strip("()\n").split(",")
                self._stamp = int(size), int(when)
            except (OSError, ValueError):
                return None
        return self._stamp

    # Reasons.

    def explain(self, photo: Photo) -> dict[str, Any]:
        """Return the shots that a new photo is closest to."""
        found = self.project.snapshot().classes.values()
        id_of = {each.path: each.id for photos in found for each in photos}
        return {
            "shots": [
                {"id": id_of[shot.name], "class": str(shot.label)}
                for shot in self._reasons(photo).shots[:MAX_CLOSEST]
                if shot.name in id_of  # else it was moved meanwhile
            ]
        }

    def name(self, picture: bytes) -> Prediction:
        """Name a picture that is not kept, such as what a camera sees."""
        from mivhead.images.decoding import load_image

        model = self.known.model
        if model is None:
            raise InputError("There is no model yet.")
        return model.classify_pictures([load_image(picture, name="frame")])[0]

    def heat(self, photo: Photo) -> bytes:
        """Return a JPEG of the photo, tinted where the model looked."""
        import numpy as np
        from PIL import Image

        from mivhead.diagnostics.pictures import overlay

        heat = self._reasons(photo).heat
        picture = self.project.preview(photo)
        if heat is not None:
            pixels = (255 * overlay(picture, [heat])).clip(0, 255).astype(np.uint8)
            picture = Image.fromarray(pixels).resize(picture.size)
        buffer = BytesIO()
        picture.save(buffer, "JPEG", quality=85)
        return buffer.getvalue()

    def _reasons(self, photo: Photo) -> Explanation:
        from mivhead.diagnostics.explanation import explain_images

        if self.known.model is None:
            raise InputError("There is no model yet.")
        images = self._images([photo])
        return next(explain_images(self.known.model, images, pictures=False))

    def export(self, kind: str, path: Path) -> None:
        """Write the model as an ONNX file or, to a folder, a web page, unless it is there."""
        from mivhead.export.model import export_model
        from mivhead.export.web import export_web

        with self._busy:  # tracing the backbone while it runs elsewhere is not safe
            model = self.known.model
            if model is None:
                raise InputError("There is no model yet.")
            if self._made.get(kind) is model and path.exists():
                return
            if kind == "web":
                shutil.rmtree(path, ignore_errors=True)
                export_web(model, path, title=self.project.folder.name)
            else:
                export_model(model, path)
            self._made[kind] = model


def _twin(model: FewShotClassifier) -> FewShotClassifier:
    """Return a shallow copy that shares the backbone, which `copy` would load again."""
    twin: FewShotClassifier = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    return twin


def _learned_unlabelled(model: FewShotClassifier) -> int:
    use = model.classifier_.unlabelled_
    return use.images if use is not None and use.used else 0


def describe(result: CrossValidation, id_of: dict[str, str]) -> dict[str, Any]:
    """Return the result of a cross-validation as JSON for the page.

    `id_of` has the ids of the photos by their paths.
    """
    import numpy as np

    names = [str(name) for name in result.classes]
    tested = np.flatnonzero(result.tested)
    score = result.score
    per_class: dict[str, list[int]] = {name: [0, 0, 0] for name in names}  # shots, tested, right
    confused: dict[tuple[str, str], int] = {}
    for label in result.labels:
        per_class[label][0] += 1
    for row in tested:
        label, best = result.labels[row], names[int(result.probabilities[row].argmax())]
        per_class[label][1] += 1
        per_class[label][2] += label == best
        if label != best:
            confused[label, best] = confused.get((label, best), 0) + 1
    pairs = sorted(confused.items(), key=lambda pair: -pair[1])
    return {
        "accuracy": None if math.isnan(result.accuracy) else result.accuracy,
        "interval": None if math.isnan(result.accuracy) else list(result.interval),
        "tested": score.images,
        "right": score.right,
        "classes": per_class,
        "confusions": [[count, label, best] for (label, best), count in pairs],
        "suspects": [
            {
                "id": id_of[each.id],
                "label": each.label,
                "predicted": each.predicted,
                "probability": each.probability,
                "likely": each.mislabelled,
            }
            for each in result.suspects[:MAX_SUSPECTS]
        ],
        "advice": advise(per_class),
    }


def extrapolate(half: CrossValidation, most: CrossValidation) -> dict[str, float]:
    """Estimate what twice as many photos would give.

    Cross-validation with two folds shows what half of the shots give, one with more folds what most
    of them give, tested on the same shots. Errors of classifiers fall roughly as a power of the
    number of shots; its exponent is kept between 0 and 1. Returns the shares of right predictions,
    `half` and `most`, and `twice`: the accuracy to expect with twice as many photos.
    """
    share = 1 - 1 / most.folds  # of the shots that each fold learns from
    wrong = [each.score.images - each.score.right + 0.5 for each in (half, most)]
    exponent = min(1.0, max(0.0, math.log(wrong[0] / wrong[1]) / math.log(2 * share)))
    twice = 1 - (1 - most.accuracy) * 0.5**exponent
    return {"half": half.score.accuracy, "most": most.score.accuracy, "twice": twice}


def advise(per_class: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Return what would help, the most important first.

    The classes with a single photo come first, as in `miv fit`; then those in which most mistakes
    happen, however many photos they have; then all others with few photos in one piece of advice.

    >>> advise({"robin": [2, 2, 2], "wren": [8, 8, 4], "dunnock": [9, 9, 9]})
    [{'why': 'errors', 'class': 'wren', 'right': 4, 'tested': 8}, {'why': 'few', \
'classes': ['robin']}]
    >>> advise({"robin": [9, 9, 9], "wren": [1, 0, 0]})
    [{'why': 'single', 'classes': ['wren']}]
    """
    single = sorted(name for name, (n, _, _) in per_class.items() if n == 1)
    weak = sorted(
        (right / tested, name)
        for name, (_, tested, right) in per_class.items()
        if tested and right / tested < GOOD
    )[:MAX_WEAK]
    found: list[dict[str, Any]] = [{"why": "single", "classes": single}] if single else []
    found += [
        {"why": "errors", "class": name, "right": per_class[name][2], "tested": per_class[name][1]}
        for _, name in weak
    ]
    named = {*single, *(name for _, name in weak)}
    few = sorted(
        (n, name) for name, (n, _, _) in per_class.items() if n < ENOUGH and name not in named
    )
    if few:
        found.append({"why": "few", "classes": [name for _, name in few]})
    return found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  # follows links, as opening does
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
