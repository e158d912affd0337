"""The models of a service: loaded by name, and loaded again when their files change."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

from mivhead._util.files import stamp
from mivhead.ensemble.balance import Prior
from mivhead.errors import InputError, MivError, reading
from mivhead.model.base import Scores
from mivhead.model.exported import ExportedClassifier
from mivhead.model.info import Estimate
from mivhead.model.load import load
from mivhead.service.protection import Refusal

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.prediction import Prediction

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelLoader:
    """Reads model files for a service; models on the same backbone share it in memory."""

    def __init__(
        self,
        *,
        backbone: str | Backbone | None = None,
        weights: str | Path | None = None,
        device: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"backbone": backbone, "weights": weights, "device": device}
        self._backbones: dict[str, Any] = {}  # by the key of their identity

    def __call__(self, path: Path) -> Any:
        """Read one file."""
        model = load(path, **self._options)
        model.verbose = False
        return model if isinstance(model, ExportedClassifier) else self._share(model)

    @contextmanager
    def changing(self, path: Path) -> Iterator[FewShotClassifier]:
        """Load a model, let it be changed, and save it, as `mivhead.changing` does."""
        from mivhead.model.file import changing

        with changing(path, **self._options) as model:
            model.verbose = False
            yield self._share(model)

    def _share(self, model: FewShotClassifier) -> FewShotClassifier:
        model.cache = False  # images of clients leave no traces
        if model.identity_ is not None:
            key = model.identity_.key
            if key in self._backbones:
                model.backbone = self._backbones[key]
            else:
                self._backbones[key] = model.load_backbone()
        return model

    def backbone(self, path: Path) -> Backbone:
        """Return the backbone of a model file."""
        identity = getattr(self(path), "identity_", None)
        if identity is None or identity.key not in self._backbones:
            raise InputError(f"The model {path} has no backbone to serve.")
        found: Backbone = self._backbones[identity.key]
        return found


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One version of a model, in memory."""

    name: str  # in requests
    path: Path
    model: Any  # a FewShotClassifier, or an exported model
    facts: dict[str, Any]  # what the service reports about it
    version: str  # start of the SHA-256 of the file
    stamp: tuple[int, ...]  # by which a change of the file is noticed

    @property
    def size(self) -> int | None:
        """The side of the backbone's input images in pixels; None if the model takes no images."""
        size: int | None = self.facts["image_size"]
        return size

    @cached_property
    def scores(self) -> tuple[float, ...]:
        """How unlike each other its shots are: the unknown score of each, computed without it."""
        calibration = self.model.calibration
        return () if calibration is None else calibration.scores

    def read(self, pictures: Sequence[Image.Image]) -> Any:
        """Read a batch of decoded images: the first half of a prediction."""
        return self.model.read_pictures(pictures)

    def classify(self, read: Any) -> list[Prediction]:
        """Predict a batch that was read: the second half."""
        scores = self.model.score_read(read)
        found: list[Prediction] = self.model.decide([""] * len(scores.probabilities), scores)
        return found

    def with_prior(self, found: Sequence[Prediction], prior: Prior) -> list[Prediction]:
        """Decide again about predictions, for classes that are as frequent as a client says."""
        thresholds = self.model.thresholds(class_prior=prior)
        names = self.model.classes_.tolist()
        rows = [[each.probabilities[name] for name in names] for each in found]
        unknown = [each.unknown for each in found]
        scores = Scores(np.array(rows), None if None in unknown else np.array(unknown))
        decided: list[Prediction] = self.model.decide([e.id for e in found], scores, thresholds)
        return decided

    def explain(self, pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
        """Explain the predictions for a batch of decoded images."""
        if isinstance(self.model, ExportedClassifier):
            raise InputError(f"{self.name} is an exported model, which gives no explanations.")
        return [each.as_json() for each in self.model.explain(list(pictures))]

    def classify_features(self, features: Any) -> list[Prediction]:
        """Predict features: tensors by name, or vectors of shape (image, channel)."""
        given = features
        if not isinstance(self.model, ExportedClassifier):  # which needs no PyTorch
            from mivhead.features import Features

            named = isinstance(features, dict)
            given = Features.from_tensors(features) if named else Features(features)
        found: list[Prediction] = self.model.classify(given)
        return found


class Models:
    """Models by name.

    Each file is served under its name without the suffix, or as `NAME=FILE`. `on_reload` is called
    with the name of a model and `"ok"` or `"failed"`, when its file was read again.
    """

    def __init__(
        self,
        files: Iterable[str | Path],
        *,
        load: ModelLoader | None = None,
        on_reload: Callable[[str, str], object] | None = None,
    ) -> None:
        self._load = load or ModelLoader()
        self._on_reload = on_reload or (lambda *_: None)
        self._models: dict[str, ServedModel] = {}
        self._problems: dict[str, str] = {}
        self._seen: dict[str, tuple[int, ...]] = {}  # the last file that was tried
        self._lock = threading.Lock()  # one change at a time
        for name, path in name_files(files).items():
            self._models[name] = self._read(name, path)

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they were given."""
        return list(self._models)

    def get(self, name: str | None = None) -> ServedModel:
        """Return a model; without a name, the only one."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        names = ", ".join(self._models) or "none"
        if name is None:
            raise InputError(f"Name the model: the models are {names}.")
        if name not in self._models:
            raise Refusal(404, f"There is no model {name!r:.80}: the models are {names}.")
        return self._models[name]

    def describe(self, name: str) -> dict[str, Any]:
        """Return what the service reports about a model."""
        served = self.get(name)
        return {**served.facts, "problem": self._problems.get(name)}

    def reload_changed(self) -> list[str]:
        """Read the files that have changed; a bad file never replaces a good model.

        Returns
        -------
        list of str
            The names of the models that were replaced.
        """
        return [name for name in self._models if self._reload(name)]

    def change(self, name: str, apply: Callable[[Any], T]) -> tuple[T, ServedModel]:
        """Change a model in its file by `apply`, and serve it from now on.

        Returns what `apply` returned, and the new version of the model.
        """
        with self._lock:
            served = self._models[name]
            if isinstance(served.model, ExportedClassifier):
                raise InputError(f"The model {name} is exported: it cannot be changed.")
            with self._load.changing(served.path) as model:
                made = apply(model)
            changed = self._models[name] = self._read(name, served.path)
            self._problems.pop(name, None)
            self._seen.pop(name, None)  # the new file need not be read again
            facts = {"model": name, "version": changed.version}
            _log.info("model changed", extra={"facts": facts})
            return made, changed

    def _reload(self, name: str) -> bool:
        with self._lock:
            served = self._models[name]
            try:
                found = stamp(served.path)
            except OSError as error:
                self._fail(name, f"{served.path.name} cannot be read: {error.strerror}.")
                return False
            if found == served.stamp:  # it was out of reach, or another file has been taken back
                self._problems.pop(name, None)
                self._seen.pop(name, None)
            if found == self._seen.get(name, served.stamp):
                return False
            self._seen[name] = found
            try:
                self._models[name] = self._read(name, served.path)
            # If anything is wrong with the new file, the old model continues to serve.
            except Exception as error:
                expected = isinstance(error, MivError)
                reason = str(error) if expected else "it could not be loaded; see the log."
                _log.log(logging.WARNING, "reload failed", exc_info=None if expected else error)
                self._fail(name, reason)
                return False
            self._problems.pop(name, None)
            facts = {"model": name, "version": self._models[name].version}
            _log.info("model reloaded", extra={"facts": facts})
            self._on_reload(name, "ok")
            return True

    def _fail(self, name: str, reason: str) -> None:
        if self._problems.get(name) != reason:
            self._problems[name] = reason
            facts = {"model": name, "reason": reason}
            _log.warning("a changed model file was not used", extra={"facts": facts})
            self._on_reload(name, "failed")

    def _read(self, name: str, path: Path) -> ServedModel:
        with reading(f"The model {path}"):
            found = stamp(path)
        model = self._load(path)
        version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        facts = {
            "name": name,
            "file": path.name,
            "version": version,
            "loaded": datetime.now(UTC).isoformat(timespec="seconds"),
            **_facts(model),
        }
        served = ServedModel(name, path, model, facts, version, found)
        if served.size is not None:  # a missing package or backbone is an error now
            served.classify(served.read([Image.new("RGB", (8, 8), "grey")]))
        return served


def name_files(files: Iterable[str | Path]) -> dict[str, Path]:
    """Return the file of every model by its name.

    >>> name_files(["birds.miv", "old=models/birds-2024.miv"])
    {'birds': PosixPath('birds.miv'), 'old': PosixPath('models/birds-2024.miv')}
    """
    named: dict[str, Path] = {}
    for each in files:
        name, equals, file = str(each).partition("=")
        path = Path(file if equals else name)
        name = name if equals else path.stem
        if not re.fullmatch(r"[\w.-]{1,100}", name):
            raise InputError(
                f"A model cannot be served as {name!r}: use letters, digits, '.', '-' and '_', and "
                "name it with NAME=FILE."
            )
        if name in named:
            raise InputError(f"Two models would have the name {name!r}: name one with NAME=FILE.")
        named[name] = path
    return named


def _facts(model: Any) -> dict[str, Any]:
    """Return the facts about a model that the service reports."""
    identity = model.identity_
    classes = [str(label) for label in model.classes_.tolist()]
    if isinstance(model, ExportedClassifier):
        method, takes_images = model.info.method, model.needs_images
    else:
        method, takes_images = model.method, identity is not None
    counts = model.shot_counts
    return {
        "classes": classes,
        "shots": counts and {str(label): count for label, count in counts.items()},
        "estimate": _estimate(getattr(model, "estimate_", None)),
        "method": method,
        "backbone": None if identity is None else identity.name,
        "image_size": identity.preprocessing.size if takes_images else None,
    }


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    """Return the accuracy to expect, if it was estimated when the model was fitted."""
    if estimate is None or estimate.accuracy is None:
        return None
    figures = {name: getattr(estimate, name) for name in ("accuracy", "low", "high")}
    return {**figures, "shots": estimate.tested}


class Reloader:
    """Looks for changed model files every few seconds, in its own thread."""

    def __init__(self, models: Models, seconds: float) -> None:
        self._models, self._seconds = models, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reload", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns when a reload in progress is complete."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            self._models.reload_changed()
