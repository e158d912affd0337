"""A uvicorn server that binds its port at once and ends gracefully."""

from __future__ import annotations

import signal
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from mivhead.errors import NotAvailableError, reason_of

DEFAULT_PORT = 8765


class Server:
    """Serves an ASGI application over HTTP; `serve_forever` runs the server, `stop` stops it.

    Port 0 chooses a free one. At the end, requests in progress get `deadline` seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        deadline: float = 60.0,
    ) -> None:
        self._socket = _listen(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(deadline) + 1,
        )
        self._uvicorn = uvicorn.Server(config)
        self._finished = threading.Event()

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
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
        # uvicorn stops at a signal and then raises it again: here that does nothing.
        is_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        before = {number: signal.signal(number, lambda *_: None) for number in signals}
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
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
        reason = reason_of(error)
        raise NotAvailableError(
            f"Cannot listen on {host}, port {port}: {reason}; choose another with --port."
        ) from error
    return listener
