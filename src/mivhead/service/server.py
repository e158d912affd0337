"""A uvicorn server for an ASGI application, with a time limit for every connection.

uvicorn does not limit the time that a client takes to send its request or to read the answer:
`_Connection`, between asyncio and uvicorn, does, and it answers what is not HTTP in the form of all
other errors.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mivhead.errors import NotAvailableError

DEFAULT_PORT = 8765
HEAD_SECONDS = 10.0  # to send the request line and the headers
GRACE = 2.0  # seconds after a deadline, in which the application can still answer
MAX_HEAD = 64 * 2**10  # bytes of the request line and the headers
MAX_CONNECTIONS = 800  # below 1,024, the usual limit of open files
KEEP_ALIVE = 5  # seconds that an idle connection is kept


class Server:
    """Serves an ASGI application over HTTP; `serve_forever` runs the server, `stop` stops it.

    The port is bound at once, so that an address in use is an error here and `url` is known. Port 0
    chooses a free one. One request may take `deadline` seconds, from its first byte to the last
    byte of the answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        deadline: float = 60.0,
    ) -> None:
        self.app, self.deadline = app, deadline
        self.connections: set[_Connection] = set()
        self._socket = _listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._serve,
                http=type("Connection", (_Connection,), {"server": self}),
                interface="asgi3",
                ws="none",
                loop="asyncio",  # the same everywhere, also where uvloop is installed
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=[("Server", "mivhead")],
                h11_max_incomplete_event_size=MAX_HEAD,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(deadline + GRACE) + 1,
            )
        )
        self._finished = threading.Event()

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def stopping(self) -> bool:
        """Whether the server waits for the requests in progress, and then ends."""
        return bool(self._uvicorn.should_exit)

    def serve_forever(self) -> None:
        """Serve until `stop` is called or, in the main thread, until Ctrl-C or SIGTERM.

        Requests in progress are completed first; a second Ctrl-C ends them.
        """
        # uvicorn stops at a signal and then raises it again, for whoever waits outside.
        main = threading.current_thread() is threading.main_thread()
        before = {
            each: signal.signal(each, lambda *_: None)
            for each in ((signal.SIGINT, signal.SIGTERM) if main else ())
        }
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            self.close()
            self._finished.set()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await scope["state"].pop("connection").serve(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def stop(self) -> None:
        """Stop the server, and return when the requests in progress are completed."""
        self._uvicorn.should_exit = True
        self._finished.wait()

    def close(self) -> None:
        """Release the port of a server that is not running."""
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY: an answer of two writes is not held back.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)  # here, so that clients can connect before the server runs
    except (OSError, OverflowError) as error:  # OverflowError: an invalid port number
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise NotAvailableError(
            f"Cannot listen on {host}, port {port}: {reason}; choose another with --port."
        ) from error
    return listener


class _Connection(asyncio.Protocol):
    """One connection of uvicorn's, which is aborted when any phase of a request takes too long.

    It passes on what asyncio reports, and learns from the application's messages (`serve`) when a
    request begins and ends.
    """

    server: Server
    transport: asyncio.Transport
    since: float  # when it was made, or its last request was answered
    _timer: asyncio.TimerHandle | None = None
    _head_due = True  # the timer runs for a request whose head has not been read
    _body_due = False  # some of the last request's body has not been read
    _asked = False  # a request is in progress
    _reading = False

    def __init__(self, *, app_state: dict[str, Any], **given: Any) -> None:
        # The application finds the connection in the state of its scope.
        self._http = H11Protocol(app_state={**app_state, "connection": self}, **given)
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for a request."""
        self.transport = cast("asyncio.Transport", transport)
        self.since = self._loop.time()
        self._http.connection_made(cast("asyncio.Transport", _Outgoing(self)))
        others = self.server.connections
        if len(others) >= MAX_CONNECTIONS:
            # Whoever has not asked for anything makes way, so that idle clients cannot keep out
            # others.
            silent = [each for each in others if each.is_silent]
            if not silent:
                self.refuse(503, "The server has too many connections: try again.")
                return
            min(silent, key=lambda each: each.since).transport.abort()
        others.add(self)
        self._arm(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Read what has arrived."""
        if self.transport.is_closing():
            return
        if self._timer is None:  # the first bytes of another request
            self._head_due = True
            self._arm(HEAD_SECONDS)
        self._reading = True
        try:
            self._http.data_received(data)
        except h11.LocalProtocolError:  # not HTTP, in the middle of an answer
            self.transport.abort()
        finally:
            self._reading = False

    def eof_received(self) -> None:
        """Pass on that the client sends nothing more."""
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._disarm()
        self.server.connections.discard(self)
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on that the client reads slowly."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has caught up."""
        self._http.resume_writing()

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application for one request, whose time starts now."""
        self._asked, self._head_due = True, False
        self._body_due = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        self._arm(self.server.deadline)

        async def note_body() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._body_due = False
            return message

        async def note_end(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._asked, self.since = False, self._loop.time()
                if self._is_idle():
                    self._disarm()

        await app(scope, note_body, note_end)

    def write(self, data: bytes) -> None:
        """Write for uvicorn; its own answer to what is not HTTP becomes one of ours."""
        if self._reading:  # applications never run meanwhile
            self.refuse(400, "Invalid HTTP request received.")
        else:
            self.transport.write(data)

    def refuse(self, status: int, message: str) -> None:
        """Answer without asking the application, and close the connection."""
        if self.transport.is_closing():
            return
        body = json.dumps({"error": message}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    @property
    def is_silent(self) -> bool:
        """Whether no request has been received that is not answered yet."""
        return not self._asked and not self.transport.get_write_buffer_size()

    def _is_idle(self) -> bool:
        """Return whether the last request has passed, and the client has received the answer."""
        return self.is_silent and not self._body_due and not self._head_due

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        # The grace starts now: after a stall, the application learns only now that it is late.
        self._timer = self._loop.call_later(GRACE, self._abort)

    def _abort(self) -> None:
        self._timer = None
        if not self._is_idle():
            self.transport.abort()


class _Outgoing:
    """A connection's transport as uvicorn sees it: writing passes through `_Connection.write`."""

    def __init__(self, connection: _Connection) -> None:
        self._transport, self.write = connection.transport, connection.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
