"""The models of a service, and the engine that computes the images of all clients with them.

`Models` loads models by name, and again when their files change. `Engine` decodes images within
limits and computes them in batches: while a batch is being computed, the images of other requests
queue up and form the next one. No request waits for others to come, and batches grow with the load.
The queue is bounded. While the head scores a batch, the next one passes the backbone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from PIL import Image
from starlette.exceptions import HTTPException

from mivhead._util.files import stamp
from mivhead.backbones.base import to_picture
from mivhead.decision import Prior
from mivhead.errors import ImageError, InputError, MivError, reading
from mivhead.features import Features
from mivhead.fewshot import load
from mivhead.images.decoding import count_pixels, load_image
from mivhead.model.base import Scores
from mivhead.model.exported import ExportedClassifier
from mivhead.service.middleware import RETRY, Limits, Metrics

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.decision import Thresholds
    from mivhead.prediction import Prediction

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What is reported of it
ESTIMATE = ("right_names", "wrong_names", "accuracy", "low", "high", "tested")
BATCH = 16  # images per call: larger ones cost memory and gain no speed on a CPU
DECODERS = max(2, os.cpu_count() or 2)  # threads
LARGE = 16 * 2**20  # pixels, beyond which images are decoded one at a time


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
        if isinstance(model, ExportedClassifier):
            return model
        model.cache = False  # images of clients leave no traces
        if model.identity_ is not None:
            key = model.identity_.key
            if key not in self._backbones:
                self._backbones[key] = model.load_backbone()
            model.backbone = self._backbones[key]
        return model


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One version of a model, in memory."""

    name: str  # in requests
    path: Path
    model: Any  # a FewShotClassifier, or an exported model
    version: str  # start of the SHA-256 of the file
    size: int | None  # of the backbone's input images in pixels; None if it takes no images
    facts: dict[str, Any]  # what the service reports about it

    def classify_features(self, features: Any, prior: Prior | None) -> list[Prediction]:
        """Predict features: tensors by name, or vectors of shape (image, channel)."""
        named = isinstance(features, dict)
        given = Features.from_tensors(features) if named else Features(features)
        predictions: list[Prediction] = self.model.classify(given, class_prior=prior)
        return predictions


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
        on_reload: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        self._load, self._on_reload = load or ModelLoader(), on_reload
        self._models: dict[str, ServedModel] = {}
        self._problems: dict[str, str | None] = {}
        self._tried: dict[str, object] = {}  # stamp of the last file that was read
        for name, path in name_files(files).items():
            with reading(f"The model {path}"):
                self._tried[name] = stamp(path)
            self._models[name] = self._read(name, path)

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they were given."""
        return list(self._models)

    def get(self, name: str | None = None) -> ServedModel:
        """Return a model; without a name, the only one."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        names = ", ".join(self._models)
        if name is None:
            raise InputError(f"Name the model: the models are {names}.")
        if name not in self._models:
            raise HTTPException(404, f"There is no model {name!r:.80}: the models are {names}.")
        return self._models[name]

    def describe(self) -> list[dict[str, Any]]:
        """Return what the service reports about each model."""
        return [
            {**served.facts, "problem": self._problems.get(name)}
            for name, served in self._models.items()
        ]

    def reload_changed(self) -> None:
        """Read the files that have changed; a bad file never replaces a good model."""
        for name, served in self._models.items():
            try:
                now: object = stamp(served.path)
            except OSError as error:
                now = error.errno
            if now == self._tried[name]:
                continue
            self._tried[name] = now
            problem, bug = None, None
            try:
                self._models[name] = self._read(name, served.path)
            except MivError as error:
                problem = str(error)
            except Exception as error:  # whatever it is, the old model continues to serve
                problem, bug = "It could not be loaded; see the log.", error
            self._problems[name] = problem
            facts = {"model": name, "version": self._models[name].version, "problem": problem}
            _log.info("a model file has changed", exc_info=bug, extra={"facts": facts})
            self._on_reload(name, "failed" if problem else "ok")

    def _read(self, name: str, path: Path) -> ServedModel:
        model = self._load(path)
        with reading(f"The model {path}"):
            version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        identity, counts = model.identity_, model.shot_counts
        estimate = getattr(model, "estimate_", None)
        exported = isinstance(model, ExportedClassifier)
        takes_images = model.needs_images if exported else identity is not None
        size = identity.preprocessing.size if takes_images else None
        facts = {
            "name": name,
            "file": path.name,
            "version": version,
            "classes": [str(label) for label in model.classes_.tolist()],
            "shots": counts and {str(label): count for label, count in counts.items()},
            "estimate": estimate and {key: getattr(estimate, key) for key in ESTIMATE},
            "backbone": identity and identity.name,
            "image_size": size,
        }
        if takes_images:  # a missing package or backbone is an error now
            model.classify_pictures([Image.new("RGB", (8, 8), "grey")])
        return ServedModel(name, path, model, version, size, facts)


def name_files(files: Iterable[str | Path]) -> dict[str, Path]:
    """Return the file of every model by its name.

    >>> name_files(["birds.miv", "old=models/birds-2024.miv"])
    {'birds': PosixPath('birds.miv'), 'old': PosixPath('models/birds-2024.miv')}
    """
    named: dict[str, Path] = {}
    for file in files:
        name, equals, rest = str(file).partition("=")
        path = Path(rest if equals else name)
        name = name if equals else path.stem
        if not re.fullmatch(r"[\w.-]{1,100}", name):
            raise InputError(
                f"A model cannot be served as {name!r}: use letters, digits, '.', '-' and '_', and "
                "name it with NAME=FILE."
            )
        if name in named:
            raise InputError(f"Two models would have the name {name!r}: name one with NAME=FILE.")
        named[name] = path
    if not named:
        raise InputError("There is nothing to serve: give a model file.")
    return named


@dataclass(frozen=True)
class Upload:
    """The bytes of one image file and the name that its owner gave it."""

    name: str
    data: bytes


@dataclass(frozen=True, eq=False)
class _Job:
    """The images of one request that could be decoded."""

    served: ServedModel
    pictures: list[Image.Image]
    names: list[str]
    thresholds: Thresholds
    result: asyncio.Future[list[Prediction]]


class Engine:
    """Predicts for all requests; called in the event loop only."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._admitted = 0  # images that wait or are being computed
        metrics.queue.set_function(lambda: self._admitted)
        self._jobs: deque[_Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_reading = False
        self._large = asyncio.Lock()
        self._decoders = ThreadPoolExecutor(DECODERS, "decoder")
        self._backbone = ThreadPoolExecutor(1, "backbone")
        self._head = ThreadPoolExecutor(1, "head")

    def close(self) -> None:
        """Finish the batches in progress."""
        for pool in (self._decoders, self._backbone, self._head):
            pool.shutdown(cancel_futures=True)

    async def predict(
        self, served: ServedModel, images: Sequence[Upload], thresholds: Thresholds
    ) -> list[Prediction | ImageError]:
        """Predict images of one request; an unreadable one does not affect the others."""
        size = served.size
        if size is None:
            raise InputError(
                f"The model {served.name} was trained on features of unknown origin: send features."
            )
        with self._admit(len(images)):
            decoding = (self._decode(image, size) for image in images)
            results: list[Any] = await asyncio.gather(*decoding)
            readable = [row for row, item in enumerate(results) if isinstance(item, Image.Image)]
            if readable:
                names = [images[row].name for row in readable]
                pictures = [results[row] for row in readable]
                result = asyncio.get_running_loop().create_future()
                self._jobs.append(_Job(served, pictures, names, thresholds, result))
                if not self._is_reading:
                    self._is_reading = True
                    self._start(self._read_batches())
                for row, prediction in zip(readable, await result, strict=True):
                    results[row] = prediction
        return results

    async def predict_features(
        self, served: ServedModel, features: Any, prior: Prior | None
    ) -> list[Prediction]:
        """Predict features of one request."""
        with self._admit(1):
            return await _run(self._head, served.classify_features, features, prior)

    @contextmanager
    def _admit(self, count: int) -> Iterator[None]:
        """Hold places in the queue; an idle server accepts a request of any size."""
        if self._admitted and self._admitted + count > self._limits.max_queue:
            raise HTTPException(503, "The server is busy: try again.", RETRY)
        self._admitted += count
        try:
            yield
        finally:
            self._admitted -= count

    async def _decode(self, image: Upload, size: int) -> Image.Image | ImageError:
        """Decode an image and resize it at once, so that few large ones are in memory."""
        try:
            if not image.data:
                raise ImageError(f"{image.name} is empty (0 bytes).")
            counted = partial(count_pixels, image.data, name=image.name)
            pixels, most = await _run(self._decoders, counted), self._limits.max_pixels
            if pixels > most:
                raise ImageError(
                    f"{image.name} has {pixels:,} pixels: at most {most:,} may be sent."
                )
            async with self._large if pixels > LARGE else nullcontext():
                return await _run(self._decoders, _decode_file, image, size)
        except ImageError as error:
            return error.with_traceback(None)  # whose frames hold the image

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_batches(self) -> None:
        """Pass one batch after another through the backbone, until none waits."""
        while jobs := self._next_batch():
            pictures = [picture for job in jobs for picture in job.pictures]
            start = time.perf_counter()
            try:
                features = await _run(self._backbone, jobs[0].served.model.read_pictures, pictures)
            # Any exception belongs to the requests of the batch, and never ends the loop.
            except Exception as error:
                _fail(jobs, error)
            else:
                self._start(self._score(jobs, features, time.perf_counter() - start))
        self._is_reading = False

    def _next_batch(self) -> list[_Job]:
        """Take the oldest job, and others of the same model that fit into the same batch."""
        batch: list[_Job] = []
        rest: deque[_Job] = deque()
        room = BATCH
        for job in self._jobs:
            if job.result.done():  # cancelled at the deadline
                continue
            if batch and (job.served is not batch[0].served or len(job.pictures) > room):
                rest.append(job)
            else:
                batch.append(job)
                room -= len(job.pictures)
        self._jobs = rest
        return batch

    async def _score(self, jobs: list[_Job], features: Any, seconds: float) -> None:
        start = time.perf_counter()
        try:
            scores = await _run(self._head, jobs[0].served.model.score_read, features)
        except Exception as error:
            _fail(jobs, error)
            return
        self._metrics.batches.observe(len(scores.probabilities))
        self._metrics.batch_seconds.inc(seconds + time.perf_counter() - start)
        first = 0
        for job in jobs:
            rows = slice(first, first := first + len(job.pictures))
            job_scores = Scores(scores.probabilities[rows], scores.unknown[rows])
            if not job.result.done():
                model = job.served.model
                job.result.set_result(model.decide(job.names, job_scores, job.thresholds))


async def _run(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _fail(jobs: Sequence[_Job], error: Exception) -> None:
    for job in jobs:
        if not job.result.done():
            job.result.set_exception(error)


def _decode_file(image: Upload, size: int) -> Image.Image:
    return to_picture(load_image(image.data, name=image.name), 0, size)
