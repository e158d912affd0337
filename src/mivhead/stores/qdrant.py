"""Qdrant collections, in a local folder or on a server.

A token is stored as a vector, a map as a multi-vector with one vector per patch. Qdrant returns
float32, which represents every float16 value exactly. The payload of every point holds the
`TableInfo`. In its local mode Qdrant reads its files with `pickle`: never open a folder that you do
not trust.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import numpy as np

from mivhead._util.optional import need
from mivhead.errors import InputError, MivError, NotAvailableError
from mivhead.stores.base import (
    ID,
    LABEL,
    POSITION,
    VIEW_OF,
    Array,
    Columns,
    DatabaseStore,
    Rows,
    Stacker,
    TableInfo,
    strings,
)

API_KEY = "QDRANT_API_KEY"
UNNAMED = "vector"  # the name given to the only vector of a collection without names
_INFO = "mivhead"  # key of the payload
_SCROLL = 1000  # points per request for payloads only
_log = logging.getLogger(__name__)


class QdrantStore(DatabaseStore):
    """A Qdrant collection; the filter is Qdrant's JSON.

    The place is a folder for the local mode, or `http://HOST:6333`; the key of a server is read
    from the environment variable `QDRANT_API_KEY`.
    """

    def __init__(self, place: str, collection: str, columns: Columns) -> None:
        super().__init__(f"qdrant://{place}/{collection}", columns)
        self._place = place
        self._collection = collection
        self._qdrant = need("qdrant_client", "qdrant")
        self._models = self._qdrant.models
        self._connected: Any = None
        self._filter = self._read_filter(columns.where)

    def close(self) -> None:
        """Disconnect; a local folder can only be opened once at a time."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def annotate(self, ids: Sequence[str], values: Mapping[str, Sequence[str | float]]) -> None:
        """Write values, such as predictions, into the payloads."""
        point_id = _native if self._read_info() is None else _point_id
        with self._client() as client:
            for row, id_ in enumerate(ids):
                payload = {name: column[row] for name, column in values.items()}
                client.set_payload(self._collection, payload, points=[point_id(id_)])

    def _exists(self) -> bool:
        with self._client() as client:
            return bool(client.collection_exists(self._collection))

    def _read_info(self) -> TableInfo | None:
        if not self._exists():
            raise InputError(f"{self.name} does not exist.")
        with self._client() as client:
            points, _ = client.scroll(self._collection, limit=1, with_payload=[_INFO])
        text = points[0].payload.get(_INFO) if points else None
        return None if text is None else TableInfo.read(text, self.name)

    def _next_position(self) -> int:
        if not self._exists():
            return 0
        batches = self._scroll(None, _SCROLL, with_payload=[POSITION], with_vectors=False)
        return 1 + max((each.payload[POSITION] for batch in batches for each in batch), default=-1)

    def _scan(self, info: TableInfo | None, *, views: bool, batch_size: int) -> Iterator[Rows]:
        configured = self._vector_params()
        vectors = self._vectors(info, lambda: list(configured))
        cosine = [n for n in vectors if configured[n].distance == self._models.Distance.COSINE]
        self._warn_of_cosine(cosine)
        stacker = Stacker(self.name)
        id_key = self.columns.id or (ID if info is not None else None)
        label = self.columns.label or LABEL
        named = False if UNNAMED in configured else list(vectors)
        found = self._scroll(self._conditions(info, views), batch_size, with_vectors=named or True)
        for points in found:
            payloads = [point.payload for point in points]
            ids = strings([p.id if id_key is None else p.payload.get(id_key) for p in points])
            parts = {}
            for name in vectors:
                values = [_array(point.vector, name) for point in points]
                part = stacker.stack(name, ids, values)  # (n, C) or (n, patches, C)
                if name in cosine:
                    part = _normalised(part)
                if info is not None:
                    # In C order, so that training rounds the same way as with other stores.
                    part = np.moveaxis(part, -1, 1).astype(info.dtype, order="C")
                parts[name] = part
            yield Rows(
                ids,
                parts,
                strings([payload.get(label) for payload in payloads]),
                [payload.get(VIEW_OF) for payload in payloads],
                None if info is None else [payload[POSITION] for payload in payloads],
            )

    def _insert(self, info: TableInfo, batches: Iterator[Rows]) -> None:
        if info.dtype == "float64":
            raise InputError("Qdrant stores float32: convert float64 features before writing.")
        models = self._models
        with self._client() as client:
            if not client.collection_exists(self._collection):
                client.create_collection(self._collection, self._params(info))
            for rows in batches:
                if rows.view_of and rows.view_of[0] is None:  # images: replaced
                    old = models.FieldCondition(key=VIEW_OF, match=models.MatchAny(any=rows.ids))
                    client.delete(
                        self._collection, models.FilterSelector(filter=models.Filter(must=[old]))
                    )
                client.upsert(self._collection, list(self._points(rows, info)))

    def _points(self, rows: Rows, info: TableInfo) -> Iterator[Any]:
        for i, id_ in enumerate(rows.ids):
            vectors = {}
            for name, part in rows.parts.items():
                flat = part[i].reshape(len(part[i]), -1)  # (C, patches)
                vectors[name] = flat.T.tolist() if part.ndim > 2 else part[i].tolist()
            payload = {
                ID: id_,
                LABEL: None if rows.labels is None else rows.labels[i],
                VIEW_OF: None if rows.view_of is None else rows.view_of[i],
                POSITION: None if rows.positions is None else rows.positions[i],
                _INFO: info.to_string(),
            }
            yield self._models.PointStruct(id=_point_id(id_), vector=vectors, payload=payload)

    def _params(self, info: TableInfo) -> dict[str, Any]:
        """Configure the vectors for the dot product: the cosine distance would normalise them."""
        models = self._models
        several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        half = models.Datatype.FLOAT16 if info.dtype == "float16" else None
        return {
            name: models.VectorParams(
                size=shape[0],
                distance=models.Distance.DOT,
                datatype=half,
                multivector_config=several if len(shape) > 1 else None,
            )
            for name, shape in info.shapes.items()
        }

    def _vector_params(self) -> dict[str, Any]:
        with self._client() as client:
            params = client.get_collection(self._collection).config.params.vectors
        return params if isinstance(params, dict) else {UNNAMED: params}

    def _warn_of_cosine(self, vectors: Sequence[str]) -> None:
        if vectors:
            _log.warning(
                "%s uses the cosine distance for %s, for which Qdrant stores normalised vectors: "
                "they differ from the backbone's features, so use a model trained on them only "
                "with vectors of this collection.",
                self.name,
                ", ".join(vectors),
            )

    def _read_filter(self, text: str | None) -> Any:
        if text is None:
            return None
        try:
            return self._models.Filter.model_validate_json(text)
        except ValueError as error:
            raise InputError(
                f"where must be a Qdrant filter in JSON, got {text!r}; an example is "
                '{"must": [{"key": "label", "match": {"value": "cat"}}]}.'
            ) from error

    def _conditions(self, info: TableInfo | None, views: bool) -> Any:
        if info is None:
            return self._filter
        models = self._models
        no_view = models.IsEmptyCondition(is_empty=models.PayloadField(key=VIEW_OF))
        if views:
            return models.Filter(must_not=[no_view])
        return models.Filter(must=[no_view, *([self._filter] if self._filter else [])])

    def _scroll(self, conditions: Any, limit: int, **settings: Any) -> Iterator[list[Any]]:
        """Yield lists of points."""
        offset = None
        with self._client() as client:
            while True:
                points, offset = client.scroll(
                    self._collection,
                    scroll_filter=conditions,
                    limit=limit,
                    offset=offset,
                    **settings,
                )
                if points:
                    yield points
                if offset is None:
                    return

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """Connect on first use; turn Qdrant's errors into mivhead's."""
        exceptions = need("qdrant_client.http.exceptions", "qdrant")
        try:
            if self._connected is None:
                remote = self._place.startswith(("http://", "https://"))
                where = {"url": self._place, "api_key": os.environ.get(API_KEY)}
                # The version check would run in a thread and emit warnings from there.
                self._connected = self._qdrant.QdrantClient(
                    check_compatibility=False, **(where if remote else {"path": self._place})
                )
            yield self._connected
        except MivError:
            raise
        except (exceptions.ApiException, RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise NotAvailableError(f"{self.name} cannot be reached: {reason}.") from error
        except ValueError as error:
            raise InputError(f"{self.name}: {error}") from error


def _array(vector: Any, name: str) -> Array | None:
    value = vector.get(name) if isinstance(vector, dict) else vector
    return None if value is None else np.asarray(value, np.float32)


def _normalised(vectors: Array) -> Array:
    """Normalise vectors to length 1: the local mode normalises only some of them."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)


def _point_id(id_: str) -> str:
    """Derive the id of a point, which cannot be an arbitrary string, from the id of a row."""
    return str(uuid5(NAMESPACE_URL, id_))


def _native(id_: str) -> int | str:
    return int(id_) if id_.isdigit() else id_
