"""The ASGI application of `miv serve` and `miv backbones serve`: routes and how they answer.

`create_app` puts it together; `Service.routes` can be mounted by another application, which then
wraps everything in the same protections (`protect`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import ASGIApp, Scope

from mivhead.errors import InputError
from mivhead.service.changes import change_routes
from mivhead.service.engine import Engine, Unreadable
from mivhead.service.inference_protocol import protocol_routes
from mivhead.service.label_studio import LabelStudio, label_studio_routes
from mivhead.service.models import ModelLoader, Models, Reloader
from mivhead.service.observation import Metrics, Observer, note
from mivhead.service.openapi import openapi
from mivhead.service.protection import ApiKeys, BodyLimits, ErrorAnswers, Guard, Limits
from mivhead.service.requests import read_request

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone

OPEN_PATHS = ("/healthz", "/readyz")  # without a key
RELOAD_SECONDS = 2.0


class Service:
    """The endpoints over some models, a backbone, or both.

    The backbone is served at `/v1/backbone` and `/v1/features`; images of Label Studio's tasks are
    fetched from its server.
    """

    def __init__(
        self,
        models: Models,
        limits: Limits,
        metrics: Metrics,
        backbone: Backbone | None = None,
        *,
        label_studio: LabelStudio | None = None,
        allow_changes: bool = False,
    ) -> None:
        self.engine = Engine(models, limits, metrics)
        self.models, self.limits, self.metrics = models, limits, metrics
        self.backbone = backbone
        self._label_studio, self._allow_changes = label_studio, allow_changes

    @property
    def routes(self) -> list[BaseRoute]:
        """What the service answers."""
        routes: list[BaseRoute] = [
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.schema),
        ]
        if self.models.names:
            routes += [
                Route("/v1/models", self.list_models),
                Route("/v1/models/{name}", self.show_model),
                Route("/v1/predict", self.predict, methods=["POST"]),
                Route("/v1/explain", self.explain, methods=["POST"]),
                *protocol_routes(self.engine),
                *label_studio_routes(self.engine, self._label_studio),
            ]
        if self._allow_changes:
            routes += change_routes(self.engine)
        if self.backbone is not None:
            from mivhead.service.backbone import backbone_routes

            routes += backbone_routes(self.engine, self.backbone)
        return routes

    async def health(self, _: Request) -> Response:
        """Answer as long as the process runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Report whether requests are being served."""
        return JSONResponse({"status": "ready", "models": self.models.names})

    async def show_metrics(self, _: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def schema(self, _: Request) -> Response:
        """Return the OpenAPI schema."""
        paths = [route.path for route in self.routes if isinstance(route, Route)]
        return JSONResponse(openapi(paths, self.limits))

    async def list_models(self, _: Request) -> Response:
        """List the models."""
        found = [self.models.describe(name) for name in self.models.names]
        return JSONResponse({"models": found, "limits": asdict(self.limits)})

    async def show_model(self, request: Request) -> Response:
        """Describe one model."""
        return JSONResponse(self.models.describe(request.path_params["name"]))

    async def predict(self, request: Request) -> Response:
        """Predict images or features."""
        sent = await read_request(request, self.limits)
        served = self.models.get(sent.option("model"))
        top, prior = sent.number("top"), sent.prior()
        if prior is not None:
            served.model.thresholds(class_prior=prior)  # an error now, before anything is computed
        note(request.scope, model=served.name, images=len(sent.images))
        document: dict[str, Any] = {"model": served.name, "version": served.version}
        if sent.features is not None:
            predictions = await self.engine.predict_features(served, sent.features)
            if prior is not None:
                predictions = served.with_prior(predictions, prior)
            document["predictions"] = [each.as_json(top) for each in predictions]
            return JSONResponse(document)
        results = await self.engine.predict(served, sent.images)
        if prior is not None:
            good = [each for each in results if not isinstance(each, Unreadable)]
            decided = iter(served.with_prior(good, prior) if good else [])
            results = [e if isinstance(e, Unreadable) else next(decided) for e in results]
        found = [each if isinstance(each, Unreadable) else each.as_json(top) for each in results]
        return _answer(document, "predictions", found)

    async def explain(self, request: Request) -> Response:
        """Explain predictions."""
        sent = await read_request(request, self.limits, ("model",))
        served = self.models.get(sent.option("model"))
        note(request.scope, model=served.name, images=len(sent.images))
        if sent.features is not None:
            raise InputError("Only images can be explained here.")
        results = await self.engine.explain(served, sent.images)
        found = [
            each if isinstance(each, Unreadable) else {**each, "file": image.name}
            for image, each in zip(sent.images, results, strict=True)
        ]
        return _answer({"model": served.name, "version": served.version}, "explanations", found)


def _answer(document: dict[str, Any], key: str, results: list[Any]) -> Response:
    """Answer with one result per image; an image that cannot be used has an error instead."""
    unreadable = [each for each in results if isinstance(each, Unreadable)]
    document[key] = [
        {"file": each.name, "error": each.reason} if isinstance(each, Unreadable) else each
        for each in results
    ]
    if len(unreadable) == len(results):  # nothing to answer with
        return JSONResponse({"error": unreadable[0].reason, **document}, 400)
    return JSONResponse(document)


def create_app(
    models: Iterable[str | Path] = (),
    *,
    backbone: Backbone | None = None,
    load: ModelLoader | None = None,
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    hosts: Collection[str] | None = None,
    reload_seconds: float | None = RELOAD_SECONDS,
    label_studio: LabelStudio | None = None,
    allow_changes: bool = False,
) -> ASGIApp:
    """Make the ASGI application that serves models, a backbone, or both.

    Parameters
    ----------
    models : iterable of str or Path
        Model files, or `NAME=FILE`.
    backbone : Backbone, optional
        Served at `/v1/backbone` and `/v1/features`.
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
    label_studio : LabelStudio, optional
        The Label Studio server that images of its tasks are fetched from.
    allow_changes : bool, default=False
        Whether models can be changed over HTTP; needs `keys`.

    Returns
    -------
    ASGI application
    """
    if allow_changes and keys is None:
        raise InputError("Changes of models need a key: give one with --key or --key-file.")
    limits = limits or Limits()
    metrics = Metrics()
    found = Models(
        models, load=load, on_reload=lambda name, how: metrics.reloads.labels(name, how).inc()
    )
    if not found.names and backbone is None:
        raise InputError("There is nothing to serve: give a model file.")
    service = Service(
        found,
        limits,
        metrics,
        backbone,
        label_studio=label_studio,
        allow_changes=allow_changes,
    )

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        reloader = Reloader(found, reload_seconds) if reload_seconds and found.names else None
        if reloader is not None:
            reloader.start()
        yield
        if reloader is not None:
            reloader.stop()
        service.engine.close()

    routes = service.routes
    router = Router(routes, lifespan=lifespan, redirect_slashes=False)
    return protect(router, routes, metrics, limits, keys=keys, hosts=hosts)


def protect(
    app: ASGIApp,
    routes: Iterable[BaseRoute],
    metrics: Metrics,
    limits: Limits,
    *,
    keys: ApiKeys | None = None,
    hosts: Collection[str] | None = None,
) -> ASGIApp:
    """Wrap an application in everything that stands between it and the network.

    Requests are counted by its routes; OPEN_PATHS need no key. For the rest see `create_app`.
    """
    known = list(routes)

    def path_of(scope: Scope) -> str:
        for route in known:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                return route.path
        return "other"

    app = BodyLimits(app, limits)
    app = Guard(app, hosts=hosts, keys=keys, open_paths=OPEN_PATHS)
    return Observer(ErrorAnswers(app), metrics, path_of)
