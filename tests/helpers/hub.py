"""A stand-in of the Hugging Face hub, on this computer."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WEIGHTS = np.random.default_rng(0).bytes(300_000)
CONFIG = b'{"model_type": "dinov2"}'


class Hub:
    """One repository, served as the hub serves it."""

    def __init__(self) -> None:
        self.files = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.break_after: int | None = None  # bytes of an answer before its connection ends
        self.status: int | None = None  # of every answer
        self.redirect: str | None = None  # host that holds the large files
        self.sha256: str | None = None  # a wrong one
        self.address = ""
        self.name = "owner/name"

    def listing(self) -> bytes:
        siblings: list[dict[str, Any]] = [
            {"rfilename": name, "size": len(data)} for name, data in self.files.items()
        ]
        for each in siblings:
            if each["rfilename"].endswith("safetensors"):
                content = self.files[each["rfilename"]]
                sha256 = self.sha256 or hashlib.sha256(content).hexdigest()
                each["lfs"] = {"sha256": sha256, "size": each["size"]}
        return json.dumps({"sha": "0123abcd", "siblings": siblings}).encode()


def handler(state: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            state.requests.append((path, dict(self.headers)))
            name = path.rpartition("/resolve/0123abcd/")[2]
            if state.status:
                self.answer(state.status, b"no")
            elif path == f"/api/models/{state.name}":
                self.answer(200, state.listing())
            elif state.redirect and name.endswith("safetensors") and "/cdn" not in path:
                self.send_response(302)
                self.send_header("Location", f"{state.redirect}/cdn{path}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif name in state.files:
                self.part(state.files[name])
            else:
                self.answer(404, b"missing")

        def part(self, data: bytes) -> None:
            start = int(self.headers.get("Range", "bytes=0-")[6:-1])
            body = data[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.break_after is not None and len(body) > state.break_after:
                self.wfile.write(body[: state.break_after])
                self.close_connection = True
                return
            self.wfile.write(body)

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """Serve a repository, and point the variables that backbones read to it and to a folder."""
    state = Hub()
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    threading.Thread(target=running.serve_forever, daemon=True).start()
    state.address = f"http://127.0.0.1:{running.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", state.address)
    monkeypatch.setenv("MIV_WEIGHTS", str(folder / "weights"))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield state
    running.shutdown()
    running.server_close()
