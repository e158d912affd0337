"""The ASGI application of `miv app`: access, requests and the page itself.

A server on this computer is within reach of every web page that its user opens. So the address in
the browser carries a random token, which becomes a cookie that no other site can send; requests
with the wrong `Host` or `Origin` are refused (`mivhead.service.protection`); and the page may load
and run nothing that does not come from here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mivhead._util.http import is_loopback
from mivhead.app import outputs
from mivhead.app.example import add_example, has_example
from mivhead.app.journal import HIDDEN, FolderChange
from mivhead.app.learner import Learner
from mivhead.app.project import MODEL, Photo, Project, Settings, check_class_name
from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import open_cache
from mivhead.service.protection import (
    LOOPBACK_HOSTS,
    BodyLimits,
    ErrorAnswers,
    Guard,
    Limits,
    Refusal,
)
from mivhead.service.requests import read_json
from mivhead.service.server import Server

LIMITS = Limits(max_bytes=64 * 2**20, max_memory=512 * 2**20, deadline=300.0)
POLL_SECONDS = 20.0
POLL_PAUSE = 0.1  # between two looks; also the least time between two answers
TOP = 5  # classes of a prediction that the page shows
PALETTE = "palette.css"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
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
EXPIRED = (
    "This link has expired or is incomplete. Start <code>miv app</code> again, and open the link "
    "that it prints."
)


class Token:
    """The secret in the address of the page.

    It is kept in the user's cache folder, so that a page that is open reconnects when the app is
    started again. Not in the project: whoever sent the project would know it. With `renew` a new
    one is made: all earlier links and pages expire.
    """

    def __init__(self, project: Project, *, renew: bool = False) -> None:
        self.value = secrets.token_urlsafe(32)
        cache = open_cache()
        if cache is None:
            return  # each start has a new link
        name = hashlib.sha256(os.fsencode(project.folder)).hexdigest()[:32]
        path = cache.folder / "app" / name
        with suppress(OSError, ValueError):
            found = "" if renew else path.read_text("ascii").strip()
            if len(found) >= len(self.value):
                self.value = found
                return
        with suppress(OSError):  # a full disk: the next start has a new link
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(self.value)

    def matches(self, given: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.value.encode())


class Secured:
    """Middleware: every answer carries the headers of `SECURITY`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, secured)


class Gate:
    """Middleware: refuse requests without the token.

    It is in the address of the page at first, and then in a cookie.
    """

    def __init__(self, app: ASGIApp, token: Token) -> None:
        self.app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        answer = self._check(scope) if scope["type"] == "http" else None
        await (answer or self.app)(scope, receive, send)

    def _check(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        cookie = f"miv-app-{(scope.get('server') or ('', 0))[1]}"  # ports share cookies
        given = QueryParams(scope["query_string"]).get("token")
        if scope["path"] == "/" and given is not None and self._token.matches(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, given, httponly=True, samesite="strict", path="/")
            return answer
        try:
            jar = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            jar = SimpleCookie()
        if cookie in jar and self._token.matches(jar[cookie].value):
            return None
        if scope["path"] == "/":
            page = f"<!doctype html><meta charset=utf-8><title>mivhead</title><p>{EXPIRED}"
            return HTMLResponse(page, 401)
        raise Refusal(401, "This page has expired: open the link that `miv app` prints.")


class Site:
    """Answers the page; `phone` is the link for other devices, None if they cannot reach it."""

    def __init__(self, project: Project, learner: Learner, phone: str | None = None) -> None:
        self.project, self.learner, self.phone = project, learner, phone
        self._readers = CapacityLimiter(3)  # threads that decode
        self._thumbs = CapacityLimiter(2)  # changes do not wait for them
        self._frames = CapacityLimiter(1)  # of cameras, which nothing else waits for
        self._exports = CapacityLimiter(1)
        self.is_stopping: Callable[[], bool] = lambda: False
        self._run = secrets.token_hex(4)  # versions of different runs cannot be compared
        self.routes = [
            Route("/", self.page),
            Route("/static/{path:path}", self.static),
            Route("/api/state", self.state),
            Route("/api/photos", self.upload, methods=["POST"]),
            Route("/api/change", self.change, methods=["POST"]),
            Route("/api/name", self.name, methods=["POST"]),
            Route("/api/prepare/{what}", self.prepare, methods=["POST"]),
            Route("/api/explain/{id}", self.explain),
            Route("/thumb/{id}", self.thumb),
            Route("/photo/{id}", self.photo),
            Route("/look/{id}", self.look),
            Route("/download/{what}", self.download),
            Route("/qr.svg", self.qr),
        ]

    async def page(self, _: Request) -> Response:
        """Return the page."""
        return _static("index.html")

    async def static(self, request: Request) -> Response:
        """Return a file of the page."""
        return _static(request.path_params["path"])

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
        return f"{self._run}.{self.project.version}.{self.learner.version}"

    def _state(self) -> dict[str, Any]:
        version = self._version  # before the rest, so that nothing is missed
        found, known = self.project.snapshot(), self.learner.known
        model = self.project.folder / MODEL
        return {
            "version": version,
            "project": self.project.folder.name,
            "folder": str(self.project.folder),
            "classes": [
                {"name": name, "photos": [self._photo(each) for each in photos]}
                for name, photos in found.classes.items()
            ],
            "new": [self._photo(each) for each in found.new],
            "predictions": {
                each.id: _prediction(known.predictions[each.id])
                for each in found.new
                if each.id in known.predictions
            },
            "suggested": known.suggested,
            "learner": {
                "stage": known.stage,
                "problem": known.problem,
                "seconds": round(known.seconds, 1),
                "fitted": len(known.shots),
            },
            "estimate": known.estimate,
            "model": str(model) if known.model is not None and model.exists() else None,
            "exports": outputs.can_export(),
            "webExports": outputs.can_export_web(),
            "other": self.learner.other,
            "unlabelled": {
                "on": self.project.settings.unlabelled,
                "possible": self.learner.can_use_unlabelled,
                "used": known.unlabelled,
            },
            "example": has_example(),
            "phone": self.phone,
            "undo": _undoable(self.project.next_undo),
            "redo": _undoable(self.project.next_redo),
        }

    def _photo(self, photo: Photo) -> dict[str, str]:
        shown = {"id": photo.id, "name": photo.name}
        problem = self.project.problem(photo)
        return shown if problem is None else shown | {"problem": problem}

    async def upload(self, request: Request) -> Response:
        """Add a photo: the body, with its name, class and batch in the query."""
        asked = request.query_params
        data = await request.body()
        label = asked.get("class")
        photo = await self._in_thread(
            self.project.add_photo, data, asked.get("name", "photo"), label, asked.get("batch", "")
        )
        return JSONResponse({"id": photo.id, "name": photo.name})

    async def change(self, request: Request) -> Response:
        """Change the project, by a JSON object with an `action`."""
        if request.headers.get("content-type") != "application/json":
            raise Refusal(415, "A change must be sent as application/json.")
        asked = read_json(await request.body())
        actions: dict[str, Callable[[], Any]] = {
            "add class": lambda: self.project.add_class(_text(asked, "name")),
            "rename class": lambda: self.project.rename_class(
                _text(asked, "name"), _text(asked, "to")
            ),
            "delete class": lambda: self.project.remove_class(_text(asked, "name")),
            "move": lambda: self._move(asked),
            "delete": lambda: self.project.remove(_ids(asked)),
            "undo": lambda: self.project.undo(_text(asked, "id") if "id" in asked else None),
            "redo": self.project.redo,
            "settings": lambda: self.project.set(Settings(asked.get("unlabelled") is True)),
            "example": lambda: add_example(self.project),
        }
        action = asked.get("action")
        if not isinstance(action, str) or action not in actions:
            raise InputError(f"The action {action!r:.80} is unknown.")
        await self._in_thread(actions[action])
        last = self.project.next_undo
        return JSONResponse({"version": self._version, "change": last[0].id if last else None})

    def _move(self, asked: dict[str, Any]) -> None:
        """Move photos; with `create`, to a class that is made if there is none of this name."""
        label = _text(asked, "to") if asked.get("to") is not None else None
        batch = ""
        if label is not None and asked.get("create") is True:
            known = self.project.class_named(check_class_name(label))
            if known is None:
                batch = secrets.token_hex(8)
                self.project.add_class(label, batch)
            label = known or check_class_name(label)
        self.project.move(_ids(asked), label, batch)

    async def name(self, request: Request) -> Response:
        """Name a picture that is not kept: the body."""
        data = await request.body()
        found = await to_thread.run_sync(self.learner.name, data, limiter=self._frames)
        return JSONResponse(_prediction(found))

    async def prepare(self, request: Request) -> Response:
        """Make a file that takes a while, for a download that follows; tell its size."""
        what = request.path_params["what"]
        if what not in outputs.SLOW:
            raise Refusal(404, f"There is no download {what!r:.80}.")
        path = await to_thread.run_sync(
            outputs.prepare, what, self.project, self.learner, limiter=self._exports
        )
        return JSONResponse({"bytes": path.stat().st_size})

    async def qr(self, _: Request) -> Response:
        """Return the link for other devices, as a QR code."""
        if self.phone is None:
            raise Refusal(404, "Other devices cannot reach this server.")
        return Response(qr_code(self.phone), media_type="image/svg+xml")

    async def thumb(self, request: Request) -> Response:
        """Return the small picture of a photo."""
        _, photo = self.project.find(request.path_params["id"])
        path = await to_thread.run_sync(self.project.thumbnail, photo, limiter=self._thumbs)
        return FileResponse(path, headers=_FOREVER, media_type="image/jpeg")

    async def photo(self, request: Request) -> Response:
        """Return a larger picture of a photo."""
        _, photo = self.project.find(request.path_params["id"])

        def encode() -> bytes:
            buffer = BytesIO()
            self.project.preview(photo).save(buffer, "JPEG", quality=88)
            return buffer.getvalue()

        return Response(await self._in_thread(encode), headers=_FOREVER, media_type="image/jpeg")

    async def look(self, request: Request) -> Response:
        """Return a photo, tinted where the model looked."""
        _, photo = self.project.find(request.path_params["id"])
        data = await self._in_thread(self.learner.heat, photo)
        return Response(data, media_type="image/jpeg")

    async def explain(self, request: Request) -> Response:
        """Return the shots that a photo is closest to."""
        _, photo = self.project.find(request.path_params["id"])
        return JSONResponse(await self._in_thread(self.learner.explain, photo))

    async def download(self, request: Request) -> Response:
        """Return a file to keep."""
        what = request.path_params["what"]
        if what not in outputs.KINDS:
            raise Refusal(404, f"There is no download {what!r:.80}.")
        answer: Response = await self._in_thread(outputs.make, what, self.project, self.learner)
        return answer

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await to_thread.run_sync(function, *args, limiter=self._readers)


_FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}  # ids never mean another photo


def make_server(
    project: Project,
    learner: Learner,
    token: Token,
    port: int | None = None,
    host: str = "127.0.0.1",
) -> Server:
    """Make the server of a project.

    Port 0 chooses a free one, None that of the last time if it is free, so that a page that is open
    finds the app again. By default, only this computer can reach the server.
    """
    site = Site(project, learner)
    app = Gate(BodyLimits(Router(site.routes, redirect_slashes=False), LIMITS), token)
    outside = None if is_loopback(host) else address_for_others(host)
    hosts = LOOPBACK_HOSTS if outside is None else (*LOOPBACK_HOSTS, outside)
    secured = Secured(ErrorAnswers(Guard(app, hosts=hosts)))
    mark = project.folder / HIDDEN / "port"
    if port is None:
        try:
            last = int(mark.read_text("ascii"))
            server = Server(secured, host, last, deadline=LIMITS.deadline)
        except (OSError, ValueError, NotAvailableError):
            server = Server(secured, host, 0, deadline=LIMITS.deadline)
    else:
        server = Server(secured, host, port, deadline=LIMITS.deadline)
    site.is_stopping = lambda: server.stopping
    if outside is not None:
        site.phone = f"http://{outside}:{server.port}/?token={token.value}"
    with suppress(OSError):  # a full disk
        mark.write_text(str(server.port), "ascii")
    return server


def address_for_others(host: str) -> str:
    """Return the address by which other devices of the network reach this computer.

    It has no port; an IPv6 address is in brackets. The host `0.0.0.0` stands for all addresses of
    this computer.
    """
    if host not in ("0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    # Nothing is sent: the system only says which of its addresses it would send from.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            raise NotAvailableError(
                "This computer is not connected to a network: connect it, or name its address with "
                "--host."
            ) from None
        found: str = probe.getsockname()[0]
        return found


def qr_code(link: str) -> bytes:
    """Return a link as a QR code, in SVG."""
    import segno

    buffer = BytesIO()
    segno.make(link, micro=False).save(buffer, kind="svg", scale=6, border=3, light="#fff")
    return buffer.getvalue()


def _static(path: str) -> Response:
    """Return a file of the folder `static`, or the palette; nothing else can be named."""
    file = resources.files("mivhead.app") / "static"
    if path == PALETTE:  # shared with exported pages
        file = resources.files("mivhead.export") / "web_page"
    for part in path.split("/"):
        if not part or part.startswith("."):
            raise Refusal(404, "There is no such file.")
        file = file / part
    kind = TYPES.get(Path(path).suffix)
    if kind is None or not file.is_file():
        raise Refusal(404, "There is no such file.")
    return Response(file.read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})


def _prediction(found: Any) -> dict[str, Any]:
    # Six digits: rounded to fewer, 99.996 % would become 1, and the page would show 100 %.
    top = [[str(label), round(p, 6)] for label, p in found.top(TOP)]
    unknown = None if found.unknown is None else round(found.unknown, 4)
    return {
        "label": str(found.label),
        "decision": str(found.decision),
        "top": top,
        "unknown": unknown,
    }


def _undoable(group: list[FolderChange]) -> dict[str, Any] | None:
    if not group:
        return None
    last = group[0].action  # a class that is made for photos is not counted with them
    count = sum(len(each.moves) for each in group if each.action == last)
    return {"action": group[0].action, "class": group[0].target, "count": count}


def _text(asked: dict[str, Any], key: str) -> str:
    value = asked.get(key)
    if not isinstance(value, str):
        raise InputError(f"{key} must be a string.")
    return value


def _ids(asked: dict[str, Any]) -> list[str]:
    ids = asked.get("ids")
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise InputError("ids must be a list of strings.")
    return ids
