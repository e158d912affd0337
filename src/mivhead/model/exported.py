"""Exported models: ONNX files of `miv export`, run by onnxruntime.

Nothing here imports PyTorch, scikit-learn or SciPy, so that a model starts in a fraction of a
second.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.runtime import Session, check_self_contained
from mivhead._util.schema import from_json, parse_json
from mivhead._util.text import progress_bar
from mivhead._util.threads import thread_count
from mivhead.backbones.base import DecodedImage, Identity, check_origin, normalise
from mivhead.decision import Calibration
from mivhead.errors import InputError, ModelFileError, check_file, reading
from mivhead.images.imageset import ImageSet, Skipped
from mivhead.model.base import ImageClassifier, ModelInfo, Scores, read_classes

METADATA_KEY = "mivhead"
CHECKSUM_KEY = "mivhead.checksum"
CHECKSUM_MARK = b"mivhead-crc32:"  # found without parsing the file
NO_CHECKSUM = CHECKSUM_MARK + b"00000000"
FORMAT = 1  # of the metadata
PROBABILITIES, UNKNOWN = "probabilities", "unknown"  # outputs
BATCH = 8  # images per run: a compromise between speed and memory
MAX_BYTES = 2 * 2**30  # the limit of one ONNX file
TOLERANCE = 0.01  # of the sum of probabilities

Input: TypeAlias = Literal["images", "features"]
Feed: TypeAlias = dict[str, NDArray[Any]]  # the inputs of one run


class ExportedClassifier(ImageClassifier):
    """A model that `miv export` wrote; it predicts like a `FewShotClassifier`.

    `mivhead.load` makes it from a file. Without `threads`, it runs in as many as `OMP_NUM_THREADS`
    says, or on all cores.
    """

    def __init__(
        self, path: str | Path, *, threads: int | None = None, verbose: bool = True
    ) -> None:
        self.verbose = verbose
        self.path = Path(path)
        self.threads = threads
        self._header = read_header(self.session.metadata, path)
        if not self._checked:
            raise ModelFileError(f"{path} is corrupted: it has lost its checksum.")
        self.info = self._header.model
        self.skipped_: list[Skipped] = []
        try:
            self.classes_ = read_classes(self.info.classes)
            backbone = self.info.backbone
            self.identity_ = None if backbone is None else Identity.from_json(backbone)
            if self.needs_images and (self.identity_ is None or len(self.session.inputs) != 1):
                raise InputError("it takes images, but has several inputs or no backbone.")
            decision, count = self._header.decision, len(self.classes_)
            if not len(self._header.shots) == len(decision.shots) == count or not decision.scores:
                raise InputError("its numbers of shots or its scores do not fit its classes.")
            if not 0 <= (decision.other or 0) < count:
                raise InputError("its decision does not fit its classes.")
        except InputError as error:
            raise ModelFileError(f"{path} cannot be used: {error}") from error

    @cached_property
    def session(self) -> Session:
        """The model in onnxruntime; loaded on first use."""
        content = _read(self.path)
        self._checked = has_checksum(content, self.path)
        return open_session(content, str(self.path), self.threads)

    @property
    def input(self) -> Input:
        """What the file takes."""
        return self._header.input

    @property
    def shot_counts(self) -> dict[Any, int]:
        """Number of shots per class."""
        return dict(zip(self.classes_.tolist(), self._header.shots, strict=True))

    @property
    def calibration(self) -> Calibration:
        """What the thresholds of decisions follow from."""
        return self._header.decision

    @property
    def needs_images(self) -> bool:
        """Whether the file contains the backbone, so that it takes images and not features."""
        return self._header.input != "features"

    def read_parts(self, images: ImageSet) -> Iterator[list[Feed]]:
        """Decode images in bounded memory; yield inputs of the graph, one part after another."""
        if not len(images):
            raise InputError("There are no images: give at least one.")
        with progress_bar("predicting", len(images), show=self.verbose) as advance:
            for start in range(0, len(images), BATCH):
                rows = range(start, min(start + BATCH, len(images)))
                yield self.read_pictures([images.load(row) for row in rows])
                advance(len(rows))

    def check_takes(self, *, features: bool, backbone: Mapping[str, Any] | None = None) -> None:
        """Raise an error if the model does not take images, or features of this backbone."""
        if features and self.needs_images:
            raise InputError(f"{self.path} contains its backbone: give it images, not features.")
        if features and self.identity_ is not None:
            check_origin(backbone, self.identity_)
        if not features and not self.needs_images:
            raise InputError(
                f"{self.path} was exported without its backbone: give it features, or export the "
                "model again without --features."
            )

    def read_pictures(self, pictures: Sequence[DecodedImage]) -> list[Feed]:
        """Turn a batch of decoded images into inputs of the graph, one per run."""
        self.check_takes(features=False)
        assert self.identity_ is not None
        (name,) = self.session.inputs
        x = normalise(pictures, self.identity_.preprocessing, channels_first=True)
        return [{name: x[start : start + BATCH]} for start in range(0, len(x), BATCH)]

    def score_read(self, read: list[Feed]) -> Scores:
        """Run the graph on what `read_pictures` returns or `read_parts` yields."""
        scores = [run(self.session, feed, str(self.path), len(self.classes_)) for feed in read]
        return Scores(*map(np.concatenate, zip(*scores, strict=True)))

    def _given_features(self, given: Any) -> list[Feed] | None:
        if self.needs_images:
            return None
        features = getattr(given, "features", given)  # of a FeatureTable
        tensors = getattr(features, "tensors", features)
        if not isinstance(tensors, Mapping):
            array = np.asarray(tensors)
            if array.ndim != 2 or array.dtype.kind != "f":
                raise InputError(
                    f"{self.path} takes features: Features, a mapping of names such as block0.map "
                    f"to arrays, or a two-dimensional array of floats; got {type(given).__name__}."
                )
            tensors = {"block0.token": array}
        missing = [name for name in self.session.inputs if name not in tensors]
        if missing:
            raise InputError(f"The features lack {missing[0]!r}, which {self.path} takes.")
        return [{name: np.asarray(tensors[name], np.float32) for name in self.session.inputs}]


@dataclass(frozen=True)
class Header:
    """The metadata of an exported model."""

    format: int
    input: Input  # what the graph takes; see `mivhead.export.model.export_model`
    model: ModelInfo  # what the model says about itself
    decision: Calibration  # what thresholds follow from
    shots: tuple[int, ...]  # per class


def read_header(metadata: Mapping[str, str], path: str | Path) -> Header:
    """Read and check the metadata of an exported model."""
    if METADATA_KEY not in metadata:
        raise ModelFileError(
            f"{path} is an ONNX file, but not a model that `miv export` wrote: to use it as a "
            "backbone, give it to `miv fit --backbone`."
        )
    try:
        document = parse_json(metadata[METADATA_KEY])
        header = from_json(Header, document, "the description")
    except ValueError as error:  # also of JSON
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    if header.format != FORMAT:
        raise ModelFileError(f"{path} was written by another version of mivhead.")
    return header


def with_checksum(content: bytes) -> bytes:
    """Return an exported model with the checksum of its contents in place of `NO_CHECKSUM`."""
    assert content.count(NO_CHECKSUM) == 1
    return content.replace(NO_CHECKSUM, CHECKSUM_MARK + _checksum(content))


def has_checksum(content: bytes, path: Path) -> bool:
    """Return whether a file holds its checksum; raise an error if it is wrong."""
    start = content.find(CHECKSUM_MARK)
    end = start + len(NO_CHECKSUM)
    if start >= 0 and content[start + len(CHECKSUM_MARK) : end] != _checksum(content):
        raise ModelFileError(f"{path} is corrupted: its checksum does not match its contents.")
    return start >= 0


def _checksum(content: bytes) -> bytes:
    """Return the CRC-32 of everything but the checksum itself, as eight digits."""
    start, view = content.find(CHECKSUM_MARK), memoryview(content)
    value = zlib.crc32(view[start + len(NO_CHECKSUM) :], zlib.crc32(view[:start]))
    return f"{value:08x}".encode()


def _read(path: Path) -> bytes:
    check_file(path, ModelFileError)
    with reading(path, kind=ModelFileError):
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelFileError(f"{path} is {size:,} bytes; at most {MAX_BYTES:,} are read.")
        return path.read_bytes()


def open_session(content: bytes, name: str, threads: int | None = None) -> Session:
    """Start an exported model in onnxruntime, after a look at what it contains."""
    try:
        check_self_contained(content, name)
        # onnxruntime keeps the content as well: no second copy is held.
        return Session(lambda: content, name, threads=threads or thread_count())
    except InputError as error:
        raise ModelFileError(str(error)) from error


def run(session: Session, feed: Mapping[str, NDArray[Any]], name: str, classes: int) -> Scores:
    """Return the scores of a batch; they are checked, as a file may compute anything."""
    rows = len(next(iter(feed.values())))
    shapes = {PROBABILITIES: (rows, classes), UNKNOWN: (rows,)}
    if missing := shapes.keys() - set(session.outputs):
        raise ModelFileError(f"{name} has no output {min(missing)!r}: it is corrupted.")
    outputs: dict[str, Any] = dict(zip(shapes, session.run(list(shapes), feed), strict=True))
    for output, array in outputs.items():
        if getattr(array, "shape", None) != shapes[output] or array.dtype.kind != "f":
            raise ModelFileError(
                f"{name} is corrupted: the shape of its output {output!r} is not {shapes[output]}."
            )
        if not np.isfinite(array).all():
            raise InputError(
                f"The {output} of {name} are not finite: the features are far larger than those "
                "that it was fitted on, or the file is corrupted."
            )
    probabilities = outputs[PROBABILITIES]
    if (probabilities < 0).any() or (abs(probabilities.sum(1) - 1) > TOLERANCE).any():
        raise ModelFileError(f"{name} is corrupted: what it computes are not probabilities.")
    return Scores(probabilities, outputs[UNKNOWN])
