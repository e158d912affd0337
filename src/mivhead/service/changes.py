"""Changes of a model over HTTP: shots are added, removed or relabelled, classes removed or renamed.

A change is made in the model's file, whose old version stays next to it, and only then served: if
anything fails, the service continues with the model that it had.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mivhead.errors import InputError
from mivhead.images.imageset import ImageSet, ImageSource, given
from mivhead.service.engine import Engine
from mivhead.service.observation import note
from mivhead.service.protection import Refusal
from mivhead.service.requests import read_json, read_request

if TYPE_CHECKING:
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.shots import Change

MAX_LABEL = 200  # characters


def change_routes(engine: Engine) -> list[BaseRoute]:
    """Return the endpoints that change models."""

    async def change(
        request: Request, apply: Callable[[FewShotClassifier], Change], status: int = 200
    ) -> Response:
        name = request.path_params["name"]
        engine.models.get(name)
        made, served = await to_thread.run_sync(engine.models.change, name, apply)
        note(request.scope, model=name, change=made.action)
        facts = engine.models.describe(served.name)
        return JSONResponse({**made.as_json(), "model": facts}, status)

    async def show(request: Request) -> Response:
        """List the shots of a model by class."""
        served = engine.models.get(request.path_params["name"])
        shots = getattr(served.model, "shots_", None)
        if shots is None:
            raise InputError(f"The model {served.name} does not hold its shots.")
        found: dict[str, list[str]] = {label: [] for label in served.facts["classes"]}
        for shot, label in zip(shots.names, shots.labels, strict=True):
            found[str(label)].append(shot)
        return JSONResponse({"shots": found})

    async def add(request: Request) -> Response:
        """Add shots of one class, which may be new."""
        sent = await read_request(request, engine.limits, ("label",))
        label = _check_label(sent.option("label"))
        if not sent.images:
            raise InputError("Send images.")
        async with engine.checked(sent.images):
            sources = tuple(
                ImageSource(f"{label}/{each.name}", given(each.data), each.name)
                for each in sent.images
            )
            images = ImageSet(sources, (label,) * len(sources))
            return await change(request, lambda model: model.add(images), 201)

    async def remove_shot(request: Request) -> Response:
        """Remove a shot."""
        shot = request.path_params["shot"]
        return await change(request, lambda model: model.remove(_known_shot(model, shot)))

    async def move_shot(request: Request) -> Response:
        """Move a shot to another class."""
        shot = request.path_params["shot"]
        document = _read_options(await request.body(), "label", "new")
        label, new = _check_label(document.get("label")), document.get("new", False) is True
        return await change(
            request, lambda model: model.relabel(_known_shot(model, shot), label, new=new)
        )

    async def remove_class(request: Request) -> Response:
        """Remove a class with its shots."""
        label = request.path_params["label"]
        return await change(request, lambda model: model.remove(_known_class(model, label)))

    async def rename_class(request: Request) -> Response:
        """Rename a class, or merge it into another one."""
        label = request.path_params["label"]
        document = _read_options(await request.body(), "name", "merge")
        name, merge = _check_label(document.get("name"), "name"), document.get("merge") is True
        return await change(
            request, lambda model: model.rename(_known_class(model, label), name, merge=merge)
        )

    prefix = "/v1/models/{name}"
    return [
        _route(f"{prefix}/shots", GET=show, POST=add),
        _route(f"{prefix}/shots/{{shot:path}}", DELETE=remove_shot, PATCH=move_shot),
        _route(f"{prefix}/classes/{{label:path}}", DELETE=remove_class, PATCH=rename_class),
    ]


def _route(path: str, **handlers: Callable[[Request], Awaitable[Response]]) -> BaseRoute:
    """Return one route for all methods of a path, so that 405 lists all of them in `Allow`."""

    async def dispatch(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, dispatch, methods=list(handlers))


def _read_options(body: bytes, *allowed: str) -> dict[str, Any]:
    document = read_json(body)
    if unknown := sorted(set(document) - set(allowed)):
        raise InputError(f"{unknown[0]!r:.80} is unknown; the keys are {', '.join(allowed)}.")
    return document


def _check_label(label: Any, key: str = "label") -> str:
    if not isinstance(label, str) or not label.strip() or not label.isprintable():
        raise InputError(f"Give the name of a class as `{key}`.")
    if len(label) > MAX_LABEL:
        raise InputError(f"The name of a class may have at most {MAX_LABEL} characters.")
    return label.strip()


def _known_class(model: FewShotClassifier, label: str) -> str:
    if label not in {str(each) for each in model.classes_.tolist()}:
        raise Refusal(404, f"There is no class {label!r:.80}.")
    return label


def _known_shot(model: FewShotClassifier, shot: str) -> str:
    if model.shots_ is not None and shot not in model.shots_.names:
        raise Refusal(404, f"There is no shot {shot!r:.80}.")
    return shot
