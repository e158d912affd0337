"""What the app knows about a project: the model, how good it is, and names for the new photos.

A thread follows the project. After every change it fits the model, names the new photos,
cross-validates and saves the model, and starts again as soon as the project has changed meanwhile.
Only new photos pass the backbone, because features are cached.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from mivhead._util.files import stamp
from mivhead.app.history import HIDDEN
from mivhead.app.project import ERRORS, MODEL, Photo, Project, Snapshot, to_jpeg
from mivhead.errors import ImageError, InputError, MivError
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet, ImageSource, free_name, given, natural_key

if TYPE_CHECKING:
    from mivhead.diagnostics.cross_validation import CrossValidation
    from mivhead.diagnostics.explanation import Explanation
    from mivhead.fewshot import FewShotClassifier
    from mivhead.prediction import Prediction

_log = logging.getLogger(__name__)

DEBOUNCE = 0.4  # seconds without a change before the model is fitted
PART = 32  # new photos named at a time
RESCAN = 2.0  # seconds between two looks for changes in a file manager
NO_MODEL = "There is no model yet: give at least two classes some photos."
MAX_CLOSEST = 4  # shots that the page shows for a photo
SUGGESTIONS = 10  # photos to label next: as many as `miv suggest` names

Shots = tuple[tuple[Photo, str], ...]  # photos with their classes
Stage = Literal["waiting", "reading", "fitting", "naming", "checking", "ready", "failed"]


@dataclass(frozen=True)
class LearnerState:
    """What the learner has found out; replaced as a whole."""

    stage: Stage = "waiting"  # what it is doing
    problem: str = ""  # why it failed, or what the user should know
    model: FewShotClassifier | None = None  # the model that was fitted last
    shots: Shots = ()  # that it was fitted to
    predictions: dict[str, Prediction] = field(default_factory=dict)  # by the id of a new photo
    estimate: dict[str, Any] | None = None  # how good the model is, as JSON


class Learner:
    """Keeps the model of a project up to date, in a thread of its own.

    Every fit starts with a copy of `model`, which is not fitted, after `debounce` seconds without a
    change.
    """

    def __init__(
        self, project: Project, model: FewShotClassifier, *, debounce: float = DEBOUNCE
    ) -> None:
        self.project = project
        self.state = LearnerState()
        self.version = 0  # grows with every change of `state`
        self.other = model.other  # the class that stands for everything else
        self._settings = model  # unfitted; holds the backbone once it is loaded
        self._debounce = debounce
        self._stopped = threading.Event()
        self.busy = threading.Lock()  # held while something is learned
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._checked: Shots = ()  # of the model that was checked and saved

    def start(self) -> None:
        """Start to follow the project."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; a fit in progress is not waited for."""
        self._stopped.set()

    @property
    def model(self) -> FewShotClassifier:
        """The model that was fitted last."""
        if self.state.model is None:
            raise InputError(NO_MODEL)
        return self.state.model

    @property
    def predictions(self) -> dict[str, Prediction]:
        """Predictions by the id of a new photo, decided with the project's `max_errors`."""
        state = self.state
        if state.model is None:
            return {}
        classes, decided = state.model.classes_.tolist(), {}
        thresholds = state.model.thresholds(max_errors=self.project.max_errors)
        for id_, found in state.predictions.items():
            row = np.array([found.probabilities[name] for name in classes])
            decided[id_] = replace(found, decision=thresholds.decide(row, found.unknown, classes))
        return decided

    @property
    def file(self) -> Path | None:
        """The file of the model, if it is written."""
        path = self.project.folder / MODEL
        return path if self.state.model is not None and path.exists() else None

    def _run(self) -> None:
        learned: Snapshot | None = None
        looked = time.monotonic()
        while not self._stopped.wait(0.05):
            if time.monotonic() - looked > RESCAN:
                self.project.rescan()
                looked = time.monotonic()
            snapshot = self.project.snapshot
            if snapshot is learned:
                continue
            if self._stopped.wait(self._debounce):
                return
            if self.project.snapshot is not snapshot:  # more is coming
                continue
            learned = snapshot
            try:
                with self.busy:
                    self._learn(snapshot)
            except Exception as error:  # the thread must survive, and the page must say so
                if self._stopped.is_set():  # the interpreter may be shutting down
                    return
                reason = str(error)
                if not isinstance(error, MivError):
                    _log.error("learning failed", exc_info=error)
                    reason = f"The model could not be fitted: {reason:.200} (see the terminal)."
                self._tell(stage="failed", problem=reason)

    def _tell(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self.version += 1

    def _learn(self, snapshot: Snapshot) -> None:
        """Follow a change; return early if another one was made meanwhile."""
        self._tell(stage="reading", problem="")
        shots = tuple(
            (photo, label)
            for label, photos in snapshot.classes.items()
            for photo in self._readable(photos)
        )
        new = self._readable(snapshot.new)
        if len({label for _, label in shots}) < 2:
            self._checked = ()
            self._tell(**vars(LearnerState()))
            return
        if shots != self.state.shots:
            images = self._images([photo for photo, _ in shots], [label for _, label in shots])
            table = self._settings.extract(images)
            if self.project.snapshot is not snapshot:
                return
            self._tell(stage="fitting")
            model = _copy(self._settings).fit(table)
            self._tell(model=model, shots=shots, predictions={})
        self._name(new, snapshot)
        if shots != self._checked and self.project.snapshot is snapshot:
            self._check()
            self._checked = shots
        self._tell(stage="ready")

    def _readable(self, photos: Sequence[Photo]) -> list[Photo]:
        """Return the photos that can be decoded; thumbnails are made on the way."""
        readable = []
        for photo in photos:
            try:
                self.project.thumbnail(photo)
            except ImageError:
                self.version += 1  # the page shows the reason
                continue
            except OSError:  # a full disk: the photo itself may be fine
                pass
            readable.append(photo)
        return readable

    def _images(self, photos: Sequence[Photo], labels: Sequence[str] | None = None) -> ImageSet:
        sources = tuple(
            ImageSource(photo.path, given(self.project.folder / photo.path), photo.name)
            for photo in photos
        )
        return ImageSet(sources, None if labels is None else tuple(labels))

    def _name(self, new: Sequence[Photo], snapshot: Snapshot) -> None:
        known = self.state.predictions
        named = {photo.id: known[photo.id] for photo in new if photo.id in known}
        missing = [photo for photo in new if photo.id not in named]
        if missing:
            self._tell(stage="naming")
        for start in range(0, len(missing), PART):
            part = missing[start : start + PART]
            predictions = self.model.classify(self._images(part))
            named |= {p.id: prediction for p, prediction in zip(part, predictions, strict=True)}
            self._tell(predictions=dict(named))
            if self.project.snapshot is not snapshot:
                return
        self._tell(predictions=named)

    def _check(self) -> None:
        """Estimate how good the model is, and save it with the estimate."""
        self._tell(stage="checking")
        result = self.model.check()
        id_of = {photo.path: photo.id for photo, _ in self.state.shots}
        self._tell(estimate=describe(result, id_of), problem=self._save())

    def _save(self) -> str:
        """Write the model; a file that someone else has written is set aside, not overwritten."""
        path = self.project.folder / MODEL
        mark = self.project.folder / HIDDEN / "model.stamp"
        note = ""
        with suppress(FileNotFoundError):
            if not mark.exists() or repr(stamp(path)).encode() != mark.read_bytes():
                folder = self.project.folder
                free = free_name("model (from elsewhere).miv", lambda n: (folder / n).exists())
                path.rename(folder / free)
                note = f"{MODEL} was changed by another program: it is now called {free}."
        self.model.save(path)
        with suppress(OSError):
            mark.write_bytes(repr(stamp(path)).encode())
        return note

    # What the page asks for.

    def name(self, picture: bytes) -> Prediction:
        """Name a picture that is not kept, such as what a camera sees."""
        thresholds = self.model.thresholds(max_errors=self.project.max_errors)
        pictures = [load_image(picture, name="frame")]
        return self.model.classify_pictures(pictures, thresholds=thresholds)[0]

    def explain(self, photo: Photo) -> dict[str, Any]:
        """Return why a new photo got its name, and the shots that it is closest to."""
        explanation = self._explanation(photo)
        classes = self.project.snapshot.classes.values()
        id_of = {shot.path: shot.id for photos in classes for shot in photos}
        shots = [
            {"id": id_of[shot.name], "class": str(shot.label)}
            for shot in explanation.shots[:MAX_CLOSEST]
            if shot.name in id_of  # else it was moved meanwhile
        ]
        return {"reason": explanation.words, "shots": shots}

    def heat(self, photo: Photo) -> bytes:
        """Return a JPEG of the photo, tinted where the model looked."""
        from mivhead.diagnostics.pictures import overlay

        heat = self._explanation(photo).heat
        picture = self.project.preview(photo)
        if heat is not None:
            pixels = (255 * overlay(picture, [heat])).clip(0, 255).astype(np.uint8)
            picture = Image.fromarray(pixels).resize(picture.size)
        return to_jpeg(picture)

    def _explanation(self, photo: Photo) -> Explanation:
        from mivhead.diagnostics.explanation import explain_images

        return next(explain_images(self.model, self._images([photo]), pictures=False))

    def suggest(self) -> dict[str, str]:
        """Return which new photos to label next, by id and with the reason, the best ones first."""
        from mivhead.diagnostics.suggestion import suggest

        named = [p for p in self.project.snapshot.new if p.id in self.state.predictions]
        named.sort(key=lambda photo: natural_key(photo.path))  # as `miv suggest` reads a folder
        if not named:
            return {}
        id_of = {photo.path: photo.id for photo in named}
        suggestions = suggest(self._images(named), SUGGESTIONS, model=self.model)
        return {id_of[suggestion.id]: suggestion.reason for suggestion in suggestions}


def _copy(model: FewShotClassifier) -> FewShotClassifier:
    """Return a copy that shares the backbone, which `copy` would load again."""
    copied: FewShotClassifier = object.__new__(type(model))
    copied.__dict__.update(model.__dict__)
    return copied


def describe(result: CrossValidation, id_of: dict[str, str]) -> dict[str, Any]:
    """Return a cross-validation as JSON for the page; `id_of` has ids of photos by their paths."""
    labels, estimate, mistakes = np.asarray(result.labels), result.estimate, result.suspects
    tested, wrong = Counter(labels[result.tested].tolist()), Counter(m.label for m in mistakes)
    confused = Counter((mistake.label, mistake.predicted) for mistake in mistakes)
    steps = [replace(result, max_errors=max_errors).estimate for max_errors in ERRORS]
    return {
        "accuracy": estimate.accuracy,
        "interval": [estimate.low, estimate.high],
        "names": [[step.right_names, step.wrong_names] for step in steps],  # by `ERRORS`
        "tested": estimate.tested,
        "right": estimate.right,
        "classes": {  # shots, tested ones, right ones
            name: [count, tested[name], tested[name] - wrong[name]]
            for name, count in Counter(result.labels).items()
        },
        "confusions": [[count, *pair] for pair, count in confused.most_common()],
        "suspects": [asdict(m) | {"id": id_of[m.id]} for m in mistakes if m.mislabelled],
    }
