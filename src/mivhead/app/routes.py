"""The ASGI application of `miv app`: access, requests and the page itself.

A server on this computer is within reach of every web page that its user opens. So the link in the
browser carries a random token, which becomes a cookie that no other site can send; requests with
the wrong `Host` or `Origin` are refused (`mivhead.service.middleware`); and the page may load and
run nothing that does not come from here.
"""

from __future__ import annotations

import asyncio
import hmac
import mimetypes
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mivhead._util.http import is_loopback
from mivhead._util.page import PALETTE, SHARED
from mivhead._util.schema import from_json
from mivhead._util.text import near_name
from mivhead.app import outputs
from mivhead.app.example import add_example
from mivhead.app.history import FolderChange, last_batch
from mivhead.app.learner import Learner
from mivhead.app.project import ERRORS, Photo, Project, to_jpeg
from mivhead.decision import MAX_ERRORS
from mivhead.errors import NotAvailableError, check_one_of
from mivhead.service.application import read_json
from mivhead.service.middleware import (
    ERROR_HANDLERS,
    LOOPBACK_HOSTS,
    BodyLimits,
    Guard,
    Limits,
    error_response,
)
from mivhead.service.server import Server

LIMITS = Limits(max_memory=512 * 2**20, deadline=300.0)
POLL_SECONDS = 20.0
POLL_PAUSE = 0.1  # between two looks; also the least time between two answers
TOP = 10  # classes of a prediction that the page shows
STATIC = Path(__file__).parent / "static"
mimetypes.add_type("text/javascript", ".js")  # some systems say otherwise
FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}  # ids never mean another photo
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; media-src 'self' blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
EXPIRED = "This link has expired or is incomplete: open the link that `miv app` prints."


def secured(app: ASGIApp) -> ASGIApp:
    """Middleware: every answer carries the headers of `SECURITY`."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await app(scope, receive, send_secured)

    return serve


def with_token(app: ASGIApp, token: str) -> ASGIApp:
    """Middleware: refuse requests without the token, which the page has as a cookie."""

    def matches(sent: str) -> bool:
        return hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode())

    def refusal(request: Request) -> Response | None:
        is_page = request.url.path == "/"
        cookie = f"miv-app-{(request.scope.get('server') or ('', 0))[1]}"  # ports share cookies
        if is_page and matches(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
            return answer
        if matches(request.cookies.get(cookie, "")):
            return None
        if is_page:
            page = f"<!doctype html><meta charset=utf-8><title>mivhead</title><p>{EXPIRED}"
            return HTMLResponse(page, 401)
        return error_response(401, EXPIRED)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        answer = refusal(Request(scope)) if scope["type"] == "http" else None
        await (answer or app)(scope, receive, send)

    return serve


@dataclass(frozen=True)
class Change:
    """What the page asks for."""

    action: str
    name: str = ""  # of a class
    to: str | None = None  # its new name, or the class that photos go to; None: the new photos
    ids: tuple[str, ...] = ()  # of photos
    batch: str = ""  # changes and photos with the same batch are undone together
    create: bool = False  # make the class that photos go to, if there is none of this name
    sure: bool = False  # its name may be nearly that of another class
    max_errors: float = MAX_ERRORS  # fraction of wrong names to allow


class Site:
    """Answers the page: Starlette runs endpoints that are not coroutines in threads."""

    def __init__(self, project: Project, learner: Learner, *, is_shared: bool = False) -> None:
        self.project, self.learner, self._is_shared = project, learner, is_shared
        self.is_stopping: Callable[[], bool] = lambda: False
        self.routes: list[BaseRoute] = [
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            Route("/static/palette.css", lambda _: FileResponse(PALETTE)),
            Route("/static/shared.js", lambda _: FileResponse(SHARED)),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/state", self.state),
            Route("/api/photos", self.upload, methods=["POST"]),
            Route("/api/change", self.change, methods=["POST"]),
            Route("/api/name", self.name, methods=["POST"]),
            Route("/api/suggestions", self.suggestions),
            Route("/api/explain/{id}", self.explain),
            Route("/thumb/{id}", self.thumb),
            Route("/photo/{id}", self.photo),
            Route("/look/{id}", self.look),
            Route("/download/{kind}", self.download),
        ]

    async def state(self, request: Request) -> Response:
        """Return what the page shows, once it differs from what the page has."""
        since = request.query_params.get("since", "")
        until = time.monotonic() + POLL_SECONDS
        await asyncio.sleep(POLL_PAUSE if since else 0)
        while self._version == since and time.monotonic() < until and not self.is_stopping():
            await asyncio.sleep(POLL_PAUSE)
        return JSONResponse(await to_thread.run_sync(self._state))

    @property
    def _version(self) -> str:
        return f"{self.project.snapshot.version}.{self.learner.version}.{self.project.max_errors}"

    def _state(self) -> dict[str, Any]:
        version = self._version  # before the rest, so that nothing is missed
        snapshot, learned = self.project.snapshot, self.learner.state
        file, predictions = self.learner.file, self.learner.predictions
        return {
            "version": version,
            "project": self.project.folder.name,
            "folder": str(self.project.folder),
            "message": self.project.message,
            "classes": [
                {"name": name, "photos": [self._photo(photo) for photo in photos]}
                for name, photos in snapshot.classes.items()
            ],
            "new": [self._photo(photo) for photo in snapshot.new],
            "predictions": {id_: found.as_json(TOP) for id_, found in predictions.items()},
            "learner": {"stage": learned.stage, "problem": learned.problem},
            "estimate": learned.estimate,
            "errors": {"steps": ERRORS, "step": ERRORS.index(self.project.max_errors)},
            "model": None if file is None else str(file),
            "webExports": outputs.can_export_web(),
            "other": self.learner.other,
            "shared": self._is_shared,
            "undo": _undoable(self.project.history.done),
            "redo": _undoable(self.project.history.undone),
        }

    def _photo(self, photo: Photo) -> dict[str, str]:
        shown = {"id": photo.id, "name": photo.name}
        problem = self.project.problems.get(photo.id)
        return shown if problem is None else shown | {"problem": problem}

    async def upload(self, request: Request) -> Response:
        """Add a photo: the body, with its name, class and batch in the query."""
        query, data = request.query_params, await request.body()
        name, label, batch = query.get("name", "photo"), query.get("class"), query.get("batch", "")
        photo = await to_thread.run_sync(self.project.add_photo, data, name, label, batch)
        return JSONResponse({"id": photo.id, "name": photo.name})

    async def change(self, request: Request) -> Response:
        """Make a `Change`, which is sent as JSON."""
        if request.headers.get("content-type") != "application/json":
            raise HTTPException(415, "A change must be sent as application/json.")
        sent = from_json(Change, read_json(await request.body()), "change")
        project = self.project
        actions: dict[str, Callable[[], Any]] = {
            "add class": lambda: project.add_class(sent.name, sent.batch),
            "rename class": lambda: project.rename_class(sent.name, sent.to or ""),
            "delete class": lambda: project.remove_class(sent.name),
            "move": lambda: project.move(sent.ids, sent.to, create=sent.create),
            "delete": lambda: project.remove(sent.ids),
            "undo": project.undo,
            "redo": project.redo,
            "example": lambda: add_example(project),
            "allow errors": lambda: project.allow_errors(sent.max_errors),
        }
        check_one_of("action", sent.action, actions)
        to = sent.to if sent.create else None
        names = {"add class": sent.name, "rename class": sent.to, "move": to}
        new = names.get(sent.action)  # of a class that may be made
        if new and not sent.sure and not project.class_named(new):
            others = [known for known in project.snapshot.classes if known != sent.name]
            if near := near_name(new, others):  # the page asks
                return error_response(409, f"{new!r} is nearly the class {near!r}.")
        await to_thread.run_sync(actions[sent.action])
        return JSONResponse({"version": self._version})

    async def name(self, request: Request) -> Response:
        """Name a picture that is not kept: the body."""
        data = await request.body()
        named = await to_thread.run_sync(self.learner.name, data)
        return JSONResponse(named.as_json(TOP))

    def suggestions(self, _: Request) -> Response:
        """Return which new photos to label next, with the reason, the best ones first."""
        return JSONResponse(self.learner.suggest())

    def thumb(self, request: Request) -> Response:
        """Return the small picture of a photo."""
        path = self.project.thumbnail(self._find(request))
        return FileResponse(path, headers=FOREVER, media_type="image/jpeg")

    def photo(self, request: Request) -> Response:
        """Return a larger picture of a photo."""
        data = to_jpeg(self.project.preview(self._find(request)))
        return Response(data, headers=FOREVER, media_type="image/jpeg")

    def look(self, request: Request) -> Response:
        """Return a photo, tinted where the model looked."""
        return Response(self.learner.heat(self._find(request)), media_type="image/jpeg")

    def explain(self, request: Request) -> Response:
        """Return why a photo got its name, and the shots that it is closest to."""
        return JSONResponse(self.learner.explain(self._find(request)))

    def download(self, request: Request) -> Response:
        """Return a file to keep."""
        kind = request.path_params["kind"]
        if kind not in outputs.NAMES:
            raise HTTPException(404, f"There is no download {kind!r:.80}.")
        path = outputs.make(kind, self.project, self.learner)
        name = (self.project.folder.name or "project") + outputs.NAMES[kind]
        return FileResponse(path, filename=name, media_type="application/octet-stream")

    def _find(self, request: Request) -> Photo:
        return self.project.find(request.path_params["id"])[1]


def make_server(
    project: Project, learner: Learner, token: str, port: int = 0, host: str = "127.0.0.1"
) -> Server:
    """Make the server of a project, for whoever has the token; port 0 chooses a free one."""
    is_shared = not is_loopback(host)
    site = Site(project, learner, is_shared=is_shared)
    hosts = [*LOOPBACK_HOSTS, *([address_for_others(host)] if is_shared else [])]
    app = Starlette(
        routes=site.routes,
        middleware=[
            Middleware(secured),
            Middleware(Guard, hosts=hosts),
            Middleware(with_token, token=token),
            Middleware(BodyLimits, limits=LIMITS),
        ],
        exception_handlers=ERROR_HANDLERS,
    )
    server = Server(app, host, port, deadline=LIMITS.deadline)
    site.is_stopping = lambda: server.stopping
    return server


def address_for_others(host: str) -> str:
    """Return the host, without a port, by which other devices reach this computer."""
    if host not in ("0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    try:  # nothing is sent: the system only says which of its addresses it would send from
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        raise NotAvailableError("This computer is not connected to a network.") from None


def _undoable(changes: list[FolderChange]) -> dict[str, Any] | None:
    if not changes:
        return None
    group = last_batch(changes)
    made = "add class"  # one that is made for photos is not counted with them
    action = next((change.action for change in group if change.action != made), made)
    counted = [change for change in group if change.action == action]
    targets = {change.target for change in counted}
    return {
        "action": action,
        "class": targets.pop() if len(targets) == 1 else "",
        "count": sum(len(change.moves) for change in counted),
    }
