"""Servers on this machine for tests: a toy backbone's, and one that misbehaves as the test says."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.helpers.tiny_backbone import TinyBackbone

if TYPE_CHECKING:
    from mivhead.service.server import Server


def toy() -> TinyBackbone:
    """A backbone whose features have both parts, maps and a token."""
    return TinyBackbone("toy", token=True)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread; gives its address."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Run a server of mivhead in a thread; gives its address."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def as_json(document: Any, status: int = 200, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = json.dumps(document).encode()
    return Reply(body, status, {"Content-Type": "application/json", **named})


class FaultyServer(ThreadingHTTPServer):
    """Answers POST requests with the next fault, and with `answer` when there is none left.

    A fault is a function of the handler, the request and `answer`; it sends what it likes.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[Request], Reply], faults: Sequence[Any] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _FaultyHandler)
        self.answer = answer
        self.faults = list(faults)
        self.requests: list[Request] = []

    @property
    def posts(self) -> list[Request]:
        return [each for each in self.requests if each.method == "POST"]


class _FaultyHandler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._do()

    def do_HEAD(self) -> None:
        self._do()

    def do_POST(self) -> None:
        self._do()

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers), body)
        self.server.requests.append(request)
        if self.command == "POST" and self.server.faults:
            self.server.faults.pop(0)(self, request, self.server.answer)
        else:
            self.reply(self.server.answer(request))

    def reply(self, reply: Reply, send: int | None = None) -> None:
        """Send a whole answer, or only some bytes of its body."""
        self.close_connection = True
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in ("content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[:send])
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


def says(reply: Reply) -> Any:
    return lambda handler, request, answer: handler.reply(reply)


def status(code: int, **headers: str) -> Any:
    return says(as_json({"error": f"fault {code}"}, code, **headers))


def hangs_up(handler: Any, request: Request, answer: Any) -> None:
    handler.close_connection = True


def breaks_off(handler: Any, request: Request, answer: Any) -> None:
    reply = answer(request)
    handler.reply(reply, send=len(reply.body) // 2)


def resets(handler: Any, request: Request, answer: Any) -> None:
    breaks_off(handler, request, answer)
    now = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    handler.connection.close()


def drips(handler: Any, request: Request, answer: Any) -> None:
    """One byte at a time: no single read is slow, all of them together are."""
    reply = answer(request)
    handler.reply(reply, send=1)
    try:
        for byte in reply.body[1:]:
            time.sleep(0.05)
            handler.wfile.write(bytes([byte]))
    except OSError:  # the client gave up
        handler.close_connection = True


def drips_headers(handler: Any, request: Request, answer: Any) -> None:
    """Send one header after another, for a minute."""
    handler.close_connection = True
    try:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(1200):
            handler.wfile.write(b"X-Header-%d: x\r\n" % number)
            time.sleep(0.05)
    except OSError:  # the client gave up
        pass


def writes(raw: bytes) -> Any:
    """Send exactly these bytes and hang up."""

    def fault(handler: Any, request: Request, answer: Any) -> None:
        handler.close_connection = True
        handler.wfile.write(raw)

    return fault


def changed(change: Callable[[bytes], bytes]) -> Any:
    def fault(handler: Any, request: Request, answer: Any) -> None:
        reply = answer(request)
        handler.reply(Reply(change(reply.body), reply.status, reply.headers))

    return fault
