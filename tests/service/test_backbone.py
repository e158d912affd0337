"""The protocol of a backbone server: what it answers, what it refuses and how, how it stops."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mivhead import Features
from mivhead.backbones import wire
from mivhead.backbones.http import connect
from mivhead.errors import NotAvailableError
from tests.helpers.extras import needs
from tests.helpers.services import serving, toy, toy_server
from tests.helpers.tiny_backbone import TinyBackbone

pytest.importorskip("starlette")
from mivhead.service.backbone import BackboneServer
from mivhead.service.protection import Limits

pytestmark = needs("httpx", "http")

JSON = {"Content-Type": "application/json"}


def picture(kind: str = "PNG", size: tuple[int, int] = (20, 10), colour: str = "red") -> str:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def ask(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, JSON if headers is None else headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.headers["Content-Type"] == "application/json"
    return response.status, json.loads(content) if is_json else content, response.headers


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server(max_images=3, max_bytes=10_000) as address:
        yield address


def test_health_and_description(url: str) -> None:
    assert ask(url, "GET", "/healthz")[:2] == (200, {"status": "ok"})
    code, about, headers = ask(url, "GET", "/v1/backbone")
    assert code == 200
    assert about["identity"] == toy().identity.as_json()
    assert about["protocol"] == 1
    assert (about["max_images"], about["max_bytes"]) == (3, 10_000)
    assert headers["Server"] == "mivhead"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
def test_image_files_of_any_size_and_kind(url: str, kind: str) -> None:
    body = {"images": [picture(kind), picture(kind, (15, 40), "green")]}
    code, content, headers = ask(url, "POST", "/v1/features", body)
    assert code == 200
    assert headers["Content-Type"] == wire.SAFETENSORS
    assert headers["Miv-Backbone"] == toy().identity.key
    from safetensors.torch import load

    found = load(content)
    files = [io.BytesIO(base64.b64decode(text)) for text in body["images"]]
    expected = toy().extract([Image.open(file).convert("RGB") for file in files])
    assert Features.from_tensors(found) == expected


def test_npz_on_request(url: str) -> None:
    headers = {**JSON, "Accept": wire.NPZ}
    code, content, answered = ask(url, "POST", "/v1/features", {"images": [picture()]}, headers)
    assert (code, answered["Content-Type"]) == (200, wire.NPZ)
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        assert {k: a.shape for k, a in arrays.items()} == {
            "block0.map": (1, 6, 4, 4),
            "block1.map": (1, 6, 2, 2),
            "block2.token": (1, 3),
        }


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "code", "message"),
    [
        ("GET", "/", None, None, 404, "There is nothing at /: see /openapi.json"),
        ("GET", "/../../etc/passwd", None, None, 404, "There is nothing at"),
        ("GET", "/v1/features", None, None, 405, "GET is not supported here"),
        ("POST", "/healthz", None, b"{}", 405, "POST is not supported here"),
        ("DELETE", "/v1/features", None, None, 405, "DELETE is not supported here"),
        ("POST", "/v1/features", {"Content-Type": "text/plain"}, b"{}", 415, "application/json"),
        ("POST", "/v1/features", {**JSON, "Content-Length": "-1"}, None, 400, "Invalid HTTP"),
        ("POST", "/v1/features", {**JSON, "Content-Length": "10001"}, None, 413, "at most 10,000"),
        ("POST", "/v1/features", None, b"{", 400, "not JSON"),
        ("POST", "/v1/features", None, [], 400, "Send"),
        ("POST", "/v1/features", None, {"images": "abc"}, 400, "Send"),
        ("POST", "/v1/features", None, {"images": [3]}, 400, "Send"),
        ("POST", "/v1/features", None, {"images": [picture()], "x": 1}, 400, "Send"),
        ("POST", "/v1/features", None, {"images": []}, 400, "1 to 3 images, got 0"),
        ("POST", "/v1/features", None, {"images": [picture()] * 4}, 400, "1 to 3 images, got 4"),
        ("POST", "/v1/features", None, {"images": [picture(), "?"]}, 400, "Image 1 is not base64"),
        ("POST", "/v1/features", None, {"images": ["ñ"]}, 400, "Image 0 is not base64"),
        ("POST", "/v1/features", None, {"images": [""]}, 400, "Image 0 is empty"),
        ("POST", "/v1/features", None, {"images": ["QUJD"]}, 400, "Image 0 is not a JPEG"),
        ("POST", "/v1/features", None, {"images": [picture("EPS", (1, 1))]}, 400, "is not a JPEG"),
        (
            "POST",
            "/v1/features",
            None,
            {"images": [picture("BMP")[:-40]]},
            400,
            "Image 0 is corrupted",
        ),
    ],
)
def test_refusals(
    url: str, method: str, path: str, headers: Any, body: Any, code: int, message: str
) -> None:
    found, content, _ = ask(url, method, path, body, headers)
    assert found == code
    assert set(content) == {"error"}
    assert message in content["error"]


def test_image_bombs_are_refused_before_decoding() -> None:
    header = base64.b64decode(picture("BMP", (1, 1)))
    huge = header[:18] + (60_000).to_bytes(4, "little") * 2 + header[26:]
    with toy_server() as address:
        body = {"images": [base64.b64encode(huge).decode()]}
        code, content, _ = ask(address, "POST", "/v1/features", body)
    assert code == 400
    assert "megapixels" in content["error"]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=300))
def test_any_body_gets_an_answer(url: str, body: bytes) -> None:
    code, content, _ = ask(url, "POST", "/v1/features", body)
    assert code == 400
    assert "error" in content


def test_what_is_no_http_gets_an_answer(url: str) -> None:
    with socket.create_connection(urlsplit(url).netloc.split(":"), timeout=5) as connection:
        connection.sendall(b"hello there you\r\n\r\n")
        assert b"error" in connection.makefile("rb").read()
    assert ask(url, "GET", "/healthz")[0] == 200


def test_connection_is_kept_and_a_client_may_leave(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    for _ in range(2):
        connection.request("GET", "/v1/backbone")
        assert connection.getresponse().read()
    connection.request("POST", "/v1/features", headers={**JSON, "Content-Length": "5000"})
    connection.close()  # in the middle of a request
    assert ask(url, "GET", "/healthz")[0] == 200


class Failing(TinyBackbone):
    def extract(self, images: Any) -> Features:
        raise RuntimeError("/secret/path of the server")


def test_failures_of_the_backbone_stay_inside(caplog: pytest.LogCaptureFixture) -> None:
    with serving(BackboneServer(Failing(), port=0)) as address:
        code, content, _ = ask(address, "POST", "/v1/features", {"images": [picture()]})
        assert code == 500
        assert "secret" not in content["error"]
        assert ask(address, "GET", "/healthz")[0] == 200
    assert "/secret/path of the server" in caplog.text


def test_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "abcdefgh")
    with toy_server(key="SERVER_KEY") as address:
        assert ask(address, "GET", "/healthz")[0] == 200
        for given_ in ({}, {"Authorization": "abcdefgh"}, {"Authorization": "Bearer abcdefg"}):
            code, _, headers = ask(address, "GET", "/v1/backbone", headers=given_)
            assert (code, headers["WWW-Authenticate"]) == (401, "Bearer")
        right = {"Authorization": "Bearer abcdefgh"}
        assert ask(address, "GET", "/v1/backbone", headers=right)[0] == 200
    with pytest.raises(NotAvailableError, match="NO_SUCH_KEY, which holds the key, is not set"):
        BackboneServer(toy(), port=0, key="NO_SUCH_KEY")


class Slow(TinyBackbone):
    """Notes how many calls run at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__("toy", token=True)
        self.seconds = seconds
        self.started = threading.Event()
        self.inside = self.most = 0

    def extract(self, images: Any) -> Features:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.started.set()
        time.sleep(self.seconds)
        self.inside -= 1
        return super().extract(images)


def test_one_batch_at_a_time_for_many_clients() -> None:
    slow = Slow(0.01)
    images = [np.full((4, 4, 3), 10 * i, np.uint8) for i in range(20)]
    with serving(BackboneServer(slow, port=0)) as address:
        found = connect(address, batch_size=1, concurrency=12).extract(images)
    assert found == toy().extract(images)
    assert slow.most == 1


def test_busy_server_says_when_to_come_back() -> None:
    slow = Slow(0.5)
    with serving(BackboneServer(slow, port=0, limits=Limits(max_queue=1))) as address:
        first = threading.Thread(
            target=ask, args=(address, "POST", "/v1/features", {"images": [picture()]})
        )
        first.start()
        assert slow.started.wait(5)
        body = {"images": [picture()]}
        code, content, headers = ask(address, "POST", "/v1/features", body)
        assert (code, headers["Retry-After"]) == (503, "1")
        assert "busy" in content["error"]
        first.join()
        assert ask(address, "POST", "/v1/features", body)[0] == 200


def test_stop_finishes_what_is_at_work() -> None:
    slow = Slow(0.4)
    server = BackboneServer(slow, port=0)
    threading.Thread(target=server.serve_forever).start()
    answers: list[Any] = []
    body = {"images": [picture()]}
    client = threading.Thread(
        target=lambda: answers.append(ask(server.url, "POST", "/v1/features", body))
    )
    client.start()
    assert slow.started.wait(5)
    server.stop()
    assert not slow.inside
    client.join()
    assert answers[0][0] == 200
    with pytest.raises(ConnectionError):
        ask(server.url, "GET", "/healthz")


def test_port_in_use_and_no_port(url: str) -> None:
    port = urlsplit(url).port
    assert port is not None
    with pytest.raises(NotAvailableError, match=f"Cannot listen on 127.0.0.1, port {port}: "):
        BackboneServer(toy(), port=port)
    with pytest.raises(NotAvailableError, match="port 70000"):
        BackboneServer(toy(), port=70_000)
    with pytest.raises(NotAvailableError, match=r"no\.such\.host\.invalid"):
        BackboneServer(toy(), "no.such.host.invalid", 0)


def test_ipv6_loopback() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = BackboneServer(toy(), "::1", 0)
    except NotAvailableError as absent:
        pytest.skip(str(absent))
    threading.Thread(target=server.serve_forever).start()
    try:
        assert connect(server.url).identity.name == "toy"
    finally:
        server.stop()
