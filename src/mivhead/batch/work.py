"""What a job computes: predictions, or features, of images; predictions of features.

A *work* is a small description that can be sent to another process. `prepare` runs in several
threads and turns the content of a row into a picture of the backbone's size, `compute` takes some
of them at a time, and `table` makes the rows that are written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mivhead._util.files import is_exported
from mivhead._util.optional import need
from mivhead.batch.output import ERROR
from mivhead.errors import InputError, reading
from mivhead.extraction.pipeline import extract_pictures
from mivhead.images.decoding import load_image
from mivhead.images.places import EXTRA
from mivhead.model.prediction import Prediction

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.features import FeatureTable
    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.fewshot import FewShotClassifier

# Large JPEGs are decoded at a fraction of their size, at least this many times the backbone's. That
# is three times as fast at 12 megapixels and moves probabilities by less than 0.01
# (`benchmarks/batch.py decode`). Extracted features are exact: others may have the same identity.
SCALED = 2
FILE, ID = "file", "id"  # columns


@dataclass(frozen=True)
class Failed:
    """A row that could not be read, and the reason."""

    reason: str


@dataclass(frozen=True)
class Predicting:
    """Predictions of a model."""

    model: str  # the file; on a cluster, the same on every machine
    sha256: str  # its hash, by which workers notice another file
    backbone: str | None = None
    weights: str | None = None
    device: str | None = None
    threads: int | None = None  # of an exported model
    decision: tuple[tuple[str, Any], ...] = field(default=(), hash=False)  # may hold a dict

    task = "predict"

    @property
    def identity(self) -> str:
        """What must be the same in a job that is resumed."""
        return self.sha256

    @property
    def settings(self) -> dict[str, Any]:
        """Everything else that changes the rows."""
        names = ("reject", "max_errors", "coverage")
        chosen: dict[str, Any] = dict(self.decision)
        prior = {key: chosen[key] for key in ("class_prior",) if key in chosen}
        return {
            **{name: chosen.get(name) for name in names},
            **prior,
            "backbone": self.backbone,
        }

    @classmethod
    def open(cls, model: str | os.PathLike[str], **how: Any) -> Predicting:
        """Describe the predictions of a model file; `how` are the other fields."""
        path = Path(model).absolute()
        return cls(str(path), hash_file(path), **how)

    @property
    def loaded(self) -> FewShotClassifier | ExportedClassifier:
        """The model, loaded once per process."""
        return _load_model(replace(self, decision=()))

    def check_same(self) -> None:
        """Raise an error, in another process, if the file is not the one that was opened."""
        if _hash_once(self.model) != self.sha256:
            raise InputError(f"{self.model} is not the model file that the job was started with.")

    def check(self, *, features: bool, backbone: dict[str, Any] | None = None) -> None:
        """Raise an error if the model does not take what the source holds."""
        self.loaded.check_takes(features=features, backbone=backbone)

    def prepare(self, content: Any, name: str) -> Any:
        """Decode an image and resize it, so that no large picture is kept."""
        if isinstance(content, dict):
            return content
        size = self._size
        return _picture(content, name, size, SCALED * size if size else None)

    @property
    def _size(self) -> int | None:
        model = self.loaded
        if getattr(model, "export_facts", {}).get("input") == "pixels":
            return None  # the graph resizes
        assert model.identity_ is not None
        return model.identity_.preprocessing.size

    def compute(self, contents: Sequence[Any]) -> list[Prediction]:
        """Predict pictures or features."""
        model = self.loaded
        decision: dict[str, Any] = dict(self.decision)
        if isinstance(contents[0], dict):
            return list(model.classify(_stack(contents), **decision))
        return model.classify_pictures(contents, thresholds=model.thresholds(**decision))

    def schema(self) -> Any:
        """Return the columns of a part."""
        pa = need("pyarrow", EXTRA)
        classes = [str(each) for each in self.loaded.classes_.tolist()]
        numbers = pa.struct([pa.field(name, pa.float32()) for name in classes])
        sets = [("set", pa.list_(pa.string()))] * ("coverage" in dict(self.decision))
        return pa.schema(
            [
                (FILE, pa.string()),
                ("label", pa.string()),
                ("probability", pa.float32()),
                ("decision", pa.string()),
                ("unknown", pa.float32()),
                *sets,
                ("probabilities", numbers),
                (ERROR, pa.string()),
            ]
        )

    def table(self, ids: Sequence[str], results: Sequence[Prediction | Failed]) -> Any:
        """Return the rows of a part."""
        pa = need("pyarrow", EXTRA)
        schema = self.schema()
        rows: list[dict[str, Any]] = []
        for name, each in zip(ids, results, strict=True):
            if isinstance(each, Failed):
                rows.append({FILE: name, ERROR: each.reason})
                continue
            row: dict[str, Any] = {
                FILE: name,
                "label": str(each.label),
                "probability": each.probability,
                "decision": str(each.decision),
                "unknown": each.unknown,
                "probabilities": {str(label): p for label, p in each.probabilities.items()},
            }
            if each.prediction_set is not None:
                row["set"] = [str(label) for label in each.prediction_set]
            rows.append(row)
        return pa.Table.from_pylist(rows, schema)


@dataclass(frozen=True)
class Extracting:
    """Features of a backbone."""

    backbone: str
    weights: str | None  # a checkpoint
    image_size: int | None  # side of the input in pixels
    device: str | None

    task = "extract"

    @property
    def identity(self) -> str:
        """What must be the same in a job that is resumed."""
        return self.loaded.identity.key

    @property
    def settings(self) -> dict[str, Any]:
        """Nothing else changes the rows."""
        return {}

    @property
    def loaded(self) -> Backbone:
        """The backbone, loaded once per process."""
        return _load_backbone(self)

    def check_same(self) -> None:
        """Nothing: the backbone's identity is part of the job."""

    def check(self, *, features: bool, backbone: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Raise an error if the source holds features already."""
        if features:
            raise InputError("Features are extracted from images; the source holds features.")

    def prepare(self, content: Any, name: str) -> Image.Image:
        """Decode an image and resize it."""
        return _picture(content, name, self.loaded.preset.preprocessing.size)

    def compute(self, contents: Sequence[Any]) -> list[dict[str, Any]]:
        """Pass pictures through the backbone."""
        arrays = extract_pictures(self.loaded, contents).tensors
        return [{name: array[i] for name, array in arrays.items()} for i in range(len(contents))]

    def schema(self) -> Any:
        """Return the columns of a part, which `mivhead.stores` can read."""
        return _features_schema(self)

    def table(self, ids: Sequence[str], results: Sequence[dict[str, Any] | Failed]) -> Any:
        """Return the rows of a part."""
        pa = need("pyarrow", EXTRA)
        schema = self.schema()
        failed = np.array([isinstance(each, Failed) for each in results])
        columns = [pa.array(ids, pa.string())]
        for part in list(schema)[1:-1]:
            width, kind = part.type.list_size, part.type.value_type.to_pandas_dtype()
            values = np.zeros((len(ids), width), kind)
            for i, each in enumerate(results):
                if not isinstance(each, Failed):
                    values[i] = each[part.name].reshape(-1)
            flat = pa.array(values.reshape(-1), part.type.value_type)
            columns.append(
                pa.FixedSizeListArray.from_arrays(flat, type=part.type, mask=pa.array(failed))
            )
        reasons = [each.reason if isinstance(each, Failed) else None for each in results]
        columns.append(pa.array(reasons, pa.string()))
        return pa.Table.from_arrays(columns, schema=schema)


def _picture(content: Any, name: str, size: int | None, at_least: int | None = None) -> Image.Image:
    from mivhead.backbones.preprocessing import to_picture

    if size is None:
        return load_image(content, name=name)
    return to_picture(load_image(content, name=name, at_least=at_least), 0, size)


def _stack(rows: Sequence[dict[str, Any]]) -> FeatureTable:
    """Return the features of rows as the model takes them."""
    for row in rows:
        for name, array in row.items():
            if array.shape != rows[0][name].shape:
                raise InputError(
                    f"The vectors in {name!r} have different shapes, {array.shape} and "
                    f"{rows[0][name].shape}: all vectors of a column must have the same shape."
                )
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    from mivhead.features import Features, FeatureTable

    named = any(name.startswith("block") for name in arrays)
    features = Features.from_tensors(arrays) if named else Features(list(arrays.values()))
    return FeatureTable(features, ("",) * len(rows))


@lru_cache(maxsize=1)
def _load_model(work: Predicting) -> FewShotClassifier | ExportedClassifier:
    if is_exported(work.model):
        from mivhead.model.exported import ExportedClassifier

        return ExportedClassifier(work.model, threads=work.threads, verbose=False)
    from mivhead.model.file import load

    model = load(work.model, backbone=work.backbone, weights=work.weights, device=work.device)
    model.verbose = False
    return model


@lru_cache(maxsize=1)
def _load_backbone(work: Extracting) -> Backbone:
    from mivhead.backbones import load_backbone

    return load_backbone(
        work.backbone, weights=work.weights, image_size=work.image_size, device=work.device
    )


@lru_cache(maxsize=1)
def _features_schema(work: Extracting) -> Any:
    from mivhead.features import FeatureTable
    from mivhead.stores.base import TableInfo
    from mivhead.stores.parquet import METADATA

    pa = need("pyarrow", EXTRA)
    backbone = work.loaded
    side = backbone.preset.preprocessing.size
    black = backbone.extract([Image.new("RGB", (side, side))])  # has the shapes of all images
    info = TableInfo.of(FeatureTable(black, ("",), backbone=backbone.identity.as_json()))
    value = pa.from_numpy_dtype(np.dtype(info.dtype))
    columns = [(name, pa.list_(value, int(np.prod(s)))) for name, s in info.shapes.items()]
    fields = [(ID, pa.string()), *columns, (ERROR, pa.string())]
    return pa.schema(fields, metadata={METADATA: info.to_string()})


@lru_cache(maxsize=1)
def _hash_once(path: str) -> str:
    return hash_file(Path(path))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
