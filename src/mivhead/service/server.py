"""A uvicorn server for an ASGI application, with a time limit for every connection.

uvicorn does not limit the time that a client takes to send its request or to read the answer:
`_Connection` does, and it answers what is not HTTP in the form of all other errors.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
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

    The port is bound at once, so that an address in use is an error here and `url` is known.

    Parameters
    ----------
    app : ASGI application
        The application to serve.
    host : str, default="127.0.0.1"
        Address to listen on.
    port : int, default=8765
        Port to listen on; 0 chooses a free one.
    deadline : float, default=60.0
        Seconds that one request may take, from its first byte to the last byte of the answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        deadline: float = 60.0,
    ) -> None:
        self.app = app
        self._socket = _listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_protocol(deadline),
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


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return a class of connections on which one request may take this many seconds."""
    return type("Connection", (_Connection,), {"request_seconds": seconds})


class _Connection(H11Protocol):
    """One connection, which is aborted when a request takes too long in any of its phases."""

    request_seconds: float
    since: float  # when it was made, or its last request was answered
    _timer: asyncio.TimerHandle | None = None
    _timed: Any = None  # the request that the timer runs for; None while its head is being sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            # Whoever has not asked for anything makes way, so that idle clients cannot keep out
            # others.
            others = [each for each in self.connections if isinstance(each, _Connection)]
            silent = [each for each in others if each is not self and each.is_silent]
            if not silent:
                self._refuse(503, "The server has too many connections: try again.")
                return
            min(silent, key=lambda each: each.since).transport.abort()
        self._arm(HEAD_SECONDS)

    @property
    def is_silent(self) -> bool:
        """Whether no request has been received that is not answered yet."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        """Read what has arrived."""
        if self.transport.is_closing():
            return
        if self._timer is None:  # the first bytes of another request
            self._timed = None
            self._arm(HEAD_SECONDS)
        super().data_received(data)
        self._time_request()

    def on_response_complete(self) -> None:
        """Wait for another request, once the rest of this one and the answer have passed."""
        super().on_response_complete()
        self.since = self.loop.time()
        self._time_request()  # one that the client has sent in advance
        if self._is_idle() and not self.conn.trailing_data[0]:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._disarm()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _time_request(self) -> None:
        """Start the timer of a request whose head has been read."""
        cycle = self.cycle
        if cycle is not None and cycle is not self._timed and not cycle.response_complete:
            self._timed = cycle
            self._arm(self.request_seconds)

    def _is_idle(self) -> bool:
        """Return whether the last request was answered and the client has received all of it."""
        answered = self._timed is not None and self._timed.response_complete
        at_rest = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE
        return answered and at_rest and not self.transport.get_write_buffer_size()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        # The grace starts now: after a stall, the application learns only now that it is late.
        self._timer = self.loop.call_later(GRACE, self._abort)

    def _abort(self) -> None:
        self._timer = None
        if not self._is_idle():
            self.transport.abort()
