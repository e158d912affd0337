"""The ASGI application of `miv serve`: what a request contains, and how it is answered.

A request holds images in one of several forms, or features, and how to predict them.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from anyio import to_thread
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mivhead._util.schema import parse_json
from mivhead.decision import Prior, read_prior
from mivhead.errors import ImageError, InputError
from mivhead.service.engine import Engine, ModelLoader, Models, Upload
from mivhead.service.middleware import (
    ERROR_HANDLERS,
    ApiKeys,
    BodyLimits,
    Guard,
    Limits,
    Metrics,
    Observer,
)
from mivhead.service.openapi import SCHEMA

OPEN_PATHS = ("/healthz", "/readyz")  # without a key
RELOAD_SECONDS = 2.0
MAX_VALUES = 2_000_000  # numbers, strings, lists and objects in a JSON document
MAX_NAME = 200  # characters of the name of an image
MAX_FIELDS = 16  # of a form, besides images
OPTIONS = ("model", "top", "prior")

HINT = (
    "Send images as multipart/form-data in fields named `images`, one image as the body with its "
    'type (image/jpeg, ...), or application/json: {"images": ["base64 of an image file", ...]}.'
)


class Service:
    """The endpoints over some models."""

    def __init__(self, models: Models, limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = models, limits, metrics
        self.engine = Engine(limits, metrics)
        self.routes = [
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.show_schema),
            Route("/v1/models", self.list_models),
            Route("/v1/predict", self.predict, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        """Answer as long as the process runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Report whether requests are being served."""
        return JSONResponse({"status": "ready", "models": self.models.names})

    async def show_metrics(self, _: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def show_schema(self, _: Request) -> Response:
        """Return the OpenAPI schema."""
        return JSONResponse(SCHEMA)

    async def list_models(self, _: Request) -> Response:
        """Describe the models."""
        return JSONResponse({"models": self.models.describe()})

    async def predict(self, request: Request) -> Response:
        """Predict images or features; an image that cannot be used gets an error."""
        content = await read_request(request, self.limits)
        name, top, prior = content.read_options()
        served = self.models.get(name)
        thresholds = served.model.thresholds(class_prior=prior)  # refuses a bad prior
        request.scope["miv"].update(model=served.name, images=len(content.images))  # for the log
        if content.features is not None:
            results: list[Any] = await self.engine.predict_features(served, content.features, prior)
        else:
            results = await self.engine.predict(served, content.images, thresholds)
        rows = []
        for position, result in enumerate(results):
            if isinstance(result, ImageError):
                rows.append({"file": content.images[position].name, "error": str(result)})
            else:
                rows.append(result.as_json(top))
                self.metrics.predictions.labels(served.name, str(result.decision)).inc()
        answer = {"model": served.name, "version": served.version, "predictions": rows}
        if all("error" in row for row in rows):  # nothing to answer with
            return JSONResponse({"error": rows[0]["error"], **answer}, 400)
        return JSONResponse(answer)

    async def watch_files(self, seconds: float) -> None:
        """Look for changed model files, until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await to_thread.run_sync(self.models.reload_changed)


def create_app(
    models: Iterable[str | Path],
    *,
    load: ModelLoader | None = None,
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    hosts: Collection[str] | None = None,
    reload_seconds: float | None = RELOAD_SECONDS,
) -> Starlette:
    """Make the ASGI application that serves models.

    Parameters
    ----------
    models : iterable of str or Path
        Model files, or `NAME=FILE`.
    load : ModelLoader, optional
        Reads the files: with another backbone, on another device.
    limits : Limits, optional
        How much the service takes on.
    keys : ApiKeys, optional
        Every request but health checks must carry one; by default none is needed.
    hosts : collection of str, optional
        Host names by which the service may be addressed; by default any.
    reload_seconds : float or None, default=2.0
        Time between two looks for changed model files; None: never.
    """
    limits, metrics = limits or Limits(), Metrics()
    loaded = Models(
        models, load=load, on_reload=lambda name, result: metrics.reloads.labels(name, result).inc()
    )
    service = Service(loaded, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch_files(reload_seconds or 1e9))
        yield
        watching.cancel()
        service.engine.close()

    paths = [route.path for route in service.routes]
    return Starlette(
        routes=service.routes,
        middleware=[
            Middleware(Observer, metrics=metrics, known_paths=paths),
            Middleware(Guard, hosts=hosts, keys=keys, open_paths=OPEN_PATHS),
            Middleware(BodyLimits, limits=limits),
        ],
        exception_handlers=ERROR_HANDLERS,
        lifespan=lifespan,
    )


@dataclass(frozen=True)
class PredictRequest:
    """What a client sent."""

    images: list[Upload] = field(default_factory=list)  # image files; empty if there are features
    # Features by the name of their tensor, or vectors of shape (image, channel)
    features: dict[str, NDArray[Any]] | NDArray[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # as strings or JSON values

    def read_options(self) -> tuple[str | None, int | None, Prior | None]:
        """Return the name of the model, the number of classes to return, and the class prior."""
        if unknown := sorted(set(self.options) - set(OPTIONS)):
            names = ", ".join(OPTIONS)
            raise InputError(f"The option {unknown[0]!r:.80} is unknown; the options are {names}.")
        model, top, prior = (self.options.get(name) for name in OPTIONS)
        if not isinstance(model, str | None):
            raise InputError(f"model must be a string, got {model!r:.80}.")
        if isinstance(top, str) and top.isdecimal() and len(top) < 10:
            top = int(top)
        if top is not None and (type(top) is not int or not 0 < top < 10**9):
            raise InputError(f"top must be an integer from 1 to 999999999, got {top!s:.80}.")
        if not isinstance(prior, str | dict | None):
            raise InputError(f"prior must be a string or an object, got {prior!r:.80}.")
        return model, top, read_prior(prior) if isinstance(prior, str) else prior


async def read_request(request: Request, limits: Limits) -> PredictRequest:
    """Read the images or features of a request, and its options in the query or in the body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        content = await _from_form(request, limits)
    elif kind == "application/json":
        content = await to_thread.run_sync(_from_json, await request.body())
    elif kind.startswith("image/") or kind == "application/octet-stream":
        content = PredictRequest([Upload("image", await request.body())])
    else:
        raise HTTPException(415, f"The type {kind!r:.80} is not supported. {HINT}")
    content.options.update(request.query_params)
    if len(content.images) > limits.max_images:
        raise InputError(
            f"A request may have at most {limits.max_images} images, got {len(content.images)}."
        )
    if not content.images and content.features is None:
        raise InputError(f"There are no images. {HINT}")
    return content


async def _from_form(request: Request, limits: Limits) -> PredictRequest:
    content = PredictRequest()
    try:
        async with request.form(max_files=limits.max_images, max_fields=MAX_FIELDS) as form:
            for name, value in form.multi_items():
                if not isinstance(value, UploadFile):
                    content.options[name] = value
                elif name == "images":
                    title = (value.filename or f"image {len(content.images)}")[:MAX_NAME]
                    content.images.append(Upload(title, await value.read()))
                else:
                    raise InputError(f"The field {name!r:.80} holds a file: name it `images`.")
    # Malformed headers of a part, or a missing boundary.
    except (KeyError, UnicodeDecodeError, AssertionError) as error:
        raise InputError("The form cannot be read: it is not multipart/form-data.") from error
    return content


def read_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object of unknown origin, of bounded size in memory."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise InputError(f"The JSON document has more than {MAX_VALUES:,} values: send fewer.")
    try:
        document = parse_json(body)
        if b"\\ud" in body.lower():  # half of a character cannot be sent back, nor written
            json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:
        raise InputError("The body is not JSON, or its text is not valid Unicode.") from error
    if not isinstance(document, dict):
        raise InputError(f"The body must be a JSON object. {HINT}")
    return document


def _from_json(body: bytes) -> PredictRequest:
    document = read_json(body)
    images, features = document.pop("images", None), document.pop("features", None)
    if (images is None) == (features is None):
        raise InputError(f"Send either `images` or `features`. {HINT}")
    if features is not None:
        return PredictRequest(features=_read_features(features), options=document)
    if not isinstance(images, list):
        raise InputError(f"`images` must be a list, got {images!r:.80}.")
    uploads = [_read_image(image, position) for position, image in enumerate(images)]
    return PredictRequest(uploads, options=document)


def _read_image(value: Any, position: int) -> Upload:
    """Read one image of a JSON document: base64, or an object with `data` and perhaps `name`."""
    name = f"image {position}"
    if isinstance(value, dict) and set(value) <= {"name", "data"}:
        name, value = value.get("name", name), value.get("data")
    if not isinstance(value, str) or not isinstance(name, str):
        raise InputError(f"Image {position} must be base64, or an object with `name` and `data`.")
    if value.startswith("data:"):  # a URL
        value = value.partition(";base64,")[2]
    try:
        return Upload(name[:MAX_NAME], base64.b64decode(value, validate=True))
    except ValueError:
        raise InputError(f"Image {position} is not base64.") from None


def _read_features(value: Any) -> dict[str, NDArray[Any]] | NDArray[Any]:
    if isinstance(value, dict):
        return {name: _read_array(tensor, name) for name, tensor in value.items()}
    vectors = _read_array(value, "features")
    if vectors.ndim != 2:
        raise InputError("`features` must be a list of vectors, or named: block0.map, ...")
    return vectors


def _read_array(value: Any, name: str) -> NDArray[np.float32]:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "iuf" or not array.size:
        raise InputError(f"`{name:.80}` must hold numbers in lists of equal lengths.")
    with np.errstate(over="ignore"):  # an infinite value is refused with a better message later
        return array.astype(np.float32)
