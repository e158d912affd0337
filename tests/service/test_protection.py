"""Hostile and unlucky clients: slow or malformed requests, floods, wrong keys, other pages."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.services import serving, toy
from tests.helpers.tiny_backbone import TinyBackbone
from tests.service.conftest import photo

pytest.importorskip("starlette")
pytest.importorskip("httpx")
import httpx

from mivhead.errors import InputError, NotAvailableError
from mivhead.service import server as server_module
from mivhead.service.application import create_app, protect
from mivhead.service.batching import Batcher, Budget
from mivhead.service.models import ModelLoader
from mivhead.service.observation import Metrics
from mivhead.service.protection import LOOPBACK_HOSTS, ApiKeys, Limits
from mivhead.service.server import Server
from tests.helpers.web import web


@contextmanager
def served(
    model_file: Path, backbone: Any = None, *, limits: Limits | None = None, **settings: Any
) -> Iterator[str]:
    limits = limits or Limits()
    load = ModelLoader(backbone=backbone or toy())
    app = create_app([model_file], load=load, limits=limits, **settings)
    with serving(Server(app, port=0, deadline=limits.deadline)) as url:
        yield url


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def raw(url: str, request: bytes) -> list[tuple[int, Any]]:
    """Send bytes and return all answers until the server closes the connection or is silent."""
    with connect(url) as connection:
        connection.settimeout(1.5)
        connection.sendall(request)
        data = b""
        try:
            while chunk := connection.recv(2**16):
                data += chunk
        except (TimeoutError, ConnectionError):
            pass
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        length = int(headers.get("content-length", 0))
        answers.append((int(lines[0].split()[1]), data[:length].decode()))
        data = data[length:]
    return answers


def bitmap(side: int) -> bytes:
    """An image file that is as large as its pixels."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "BMP")
    return file.getvalue()


def alive(url: str) -> None:
    start = time.monotonic()
    response = web.post(f"{url}/v1/predict", files={"images": photo("green")})
    assert response.json()["predictions"][0]["label"] == "green"
    assert time.monotonic() - start < 5


POST = (
    b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
)


def test_slow_bodies_block_nobody_and_are_cut_off(model_file: Path) -> None:
    with served(model_file, limits=Limits(deadline=2.0)) as url:
        slow = [connect(url) for _ in range(40)]
        for connection in slow:
            connection.sendall(POST % 10_000_000 + b"x")
        alive(url)
        start = time.monotonic()
        for _ in range(3):
            time.sleep(0.3)
            for connection in slow:
                connection.sendall(b"x")
        alive(url)
        for connection in slow:
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - start < 8
        for connection in slow:  # the rest of the body is not waited for much longer
            while connection.recv(2**16):
                pass
            connection.close()
        assert time.monotonic() - start < 12
        alive(url)


def test_slow_heads_are_cut_off(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.7)
    with served(model_file) as url:
        silent, slow, empty_lines = (connect(url) for _ in range(3))
        start = time.monotonic()
        end = {}
        for connection in (silent, slow, empty_lines):
            connection.settimeout(0.05)
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        while len(end) < 3 and time.monotonic() - start < 6:
            for connection, piece in ((silent, b""), (slow, b"X: y\r\n"), (empty_lines, b"\r\n")):
                if connection in end:
                    continue
                try:
                    connection.sendall(piece)
                    if connection.recv(100) == b"":
                        end[connection] = time.monotonic() - start
                except TimeoutError:
                    pass
                except ConnectionError:
                    end[connection] = time.monotonic() - start
        for connection in (silent, slow, empty_lines):
            connection.close()
        assert len(end) == 3
        assert max(end.values()) < 5
        alive(url)


def test_a_slow_head_after_an_answer_is_cut_off(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.7)
    with served(model_file) as url, connect(url) as connection:
        connection.settimeout(0.1)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        start, end = time.monotonic(), None
        while end is None and time.monotonic() - start < 8:
            try:
                connection.sendall(b"GET" if time.monotonic() - start < 0.5 else b"T")
                end = time.monotonic() - start if connection.recv(2**16) == b"" else None
            except TimeoutError:
                pass
            except ConnectionError:
                end = time.monotonic() - start
        assert end is not None
        assert end < 5


def test_a_client_that_does_not_read_is_cut_off(model_file: Path) -> None:
    with served(model_file, limits=Limits(deadline=1.0)) as url:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((urlsplit(url).hostname, urlsplit(url).port))
        request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.settimeout(0.5)
        start = time.monotonic()
        cut = False
        while not cut and time.monotonic() - start < 15:
            try:
                connection.sendall(request * 200)
            except TimeoutError:
                continue
            except ConnectionError:
                cut = True
        connection.close()
        assert cut
        alive(url)


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    request = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
    answers = raw(url, request % b"/healthz" + request % b"/nowhere" + request % b"/readyz")
    assert [code for code, _ in answers] == [200, 404, 200]


def test_the_body_of_a_get_is_not_the_next_request(url: str) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(hidden)
    last = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
    answers = raw(url, head + hidden + last)
    assert [json.loads(body)["status"] for _, body in answers] == ["ok", "ready"]
    chunked = (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    )
    answers = raw(url, chunked + last)
    assert [json.loads(body)["status"] for _, body in answers] == ["ok", "ready"]


@pytest.mark.parametrize(
    "request_",
    [
        b"hello there you\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a TLS client
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no Host
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0x10\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: b\r\n folded: c\x00\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200_000 + b"\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
)
def test_malformed_requests_are_refused(url: str, request_: bytes) -> None:
    answers = raw(url, request_)
    assert [code for code, _ in answers] == [400]
    assert "error" in json.loads(answers[0][1])
    assert web.get(f"{url}/healthz").status_code == 200


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (b"http://[", 404),
        (b"http://x/healthz", 404),
        (b"*", 404),
        (b"//healthz", 404),
        (b"/%00", 404),
        (b"/%ff%fe", 404),
        (b"/v1/models/..%2f..%2fetc%2fpasswd", 404),
        (b"/v1/models/%0d%0aSet-Cookie:%20a=b", 404),
    ],
)
def test_odd_targets_lead_nowhere(url: str, target: bytes, code: int) -> None:
    answers = raw(url, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert [found for found, _ in answers] == [code]
    assert json.loads(answers[0][1])["error"].startswith("There is no")


def test_content_length_and_chunked_together_cannot_smuggle(url: str) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    request = (
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(hidden))
    )
    answers = raw(url, request + hidden)
    assert [code for code, _ in answers] == [400]  # and the connection is closed


def test_chunked_bodies_have_the_same_limit(url: str) -> None:
    head = (
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    chunks = (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 8 + b"0\r\n\r\n"
    assert [code for code, _ in raw(url, head + chunks)] == [413]
    data = photo("blue")
    answers = raw(url, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
    assert [code for code, _ in answers] == [200]


def test_a_body_that_is_cut_off_harms_nobody(url: str) -> None:
    for _ in range(5):
        with connect(url) as connection:
            connection.sendall(POST % 5000 + b"x" * 100)
    alive(url)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_leave_the_server_alive(data: bytes) -> None:
    with connect(_shared["url"]) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        answer = b""
        while chunk := connection.recv(2**16):
            answer += chunk
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))


_shared: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _share(url: str) -> None:
    _shared["url"] = url


def test_memory_of_bodies_is_shared(model_file: Path) -> None:
    with served(model_file, limits=Limits(max_memory=300_000, deadline=3.0)) as url:
        holding = connect(url)
        holding.sendall(POST % 250_000 + b"x" * 240_000)
        time.sleep(0.3)
        response = web.post(f"{url}/v1/predict", files={"images": b"x" * 100_000})
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "in memory" in response.json()["error"]
        alive(url)  # a small one still fits
        holding.close()
        time.sleep(0.3)
        response = web.post(f"{url}/v1/predict", files={"images": b"x" * 100_000})
        assert response.status_code == 400


class Slow(TinyBackbone):
    def __init__(self, seconds: float) -> None:
        super().__init__("toy", token=True)
        self.seconds, self.images = seconds, 0

    def extract(self, images: Any) -> Any:
        time.sleep(self.seconds * len(images))
        self.images += len(images)
        return super().extract(images)


def test_ten_times_the_load_is_shed(model_file: Path) -> None:
    """20 images per second are possible, 64 clients ask for as many as they can."""
    codes: list[int] = []
    health: list[float] = []

    def ask(url: str) -> None:
        with httpx.Client(timeout=30, verify=False) as client:
            while time.monotonic() < stop:
                response = client.post(f"{url}/v1/predict", files={"images": photo("red")})
                codes.append(response.status_code)
                if response.status_code == 503:
                    assert int(response.headers["Retry-After"]) >= 1
                    time.sleep(0.05)

    with served(model_file, Slow(0.05), limits=Limits(max_queue=16)) as url:
        stop = time.monotonic() + 3
        clients = [threading.Thread(target=ask, args=(url,)) for _ in range(64)]
        for client in clients:
            client.start()
        while not health or time.monotonic() < stop:
            start = time.monotonic()
            assert web.get(f"{url}/healthz").status_code == 200
            health.append(time.monotonic() - start)
            time.sleep(0.05)
        for client in clients:
            client.join()
        alive(url)
    assert set(codes) == {200, 503}
    assert codes.count(200) >= 20
    assert codes.count(503) > codes.count(200)
    assert sorted(health)[len(health) // 2] < 1


def test_a_request_whose_client_left_is_not_computed(model_file: Path) -> None:
    slow = Slow(0.4)
    with served(model_file, slow) as url:
        first = threading.Thread(target=alive, args=(url,))
        first.start()
        time.sleep(0.2)
        data = photo("red")
        for _ in range(5):  # they wait, and leave
            connection = connect(url)
            connection.sendall(POST % len(data) + data)
            time.sleep(0.02)
            connection.close()
        first.join()
        alive(url)
    assert slow.images == 3  # the trial at the start, and two requests


def test_a_late_answer_is_503(model_file: Path) -> None:
    with served(model_file, Slow(1.0), limits=Limits(deadline=0.5)) as url:
        response = web.post(f"{url}/v1/predict", files={"images": photo()})
        assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
        assert "not ready within 0.5 s" in response.json()["error"]


@contextmanager
def without_cycles() -> Iterator[None]:
    """Check that what is allocated is freed again, but for 1 MB, without Python's collector."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield
        until = time.monotonic() + 10  # the server may take a moment longer than the client
        while tracemalloc.get_traced_memory()[0] - before > 10**6 and time.monotonic() < until:
            time.sleep(0.01)
        assert tracemalloc.get_traced_memory()[0] - before < 10**6
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize(
    ("path", "kind", "side", "code"),
    [
        ("/v1/predict", "image/bmp", 200, 200),
        ("/v1/predict", "image/bmp", 0, 400),  # not an image
        ("/v1/predict", "application/json", 0, 400),
        ("/v1/predict", "text/plain", 0, 415),
        ("/v1/predict?model=other", "image/bmp", 200, 404),
        ("/other", "image/bmp", 200, 404),
    ],
)
def test_bodies_are_freed_at_once(url: str, path: str, kind: str, side: int, code: int) -> None:
    data = bitmap(side) if side else b"x" * 120_000
    with httpx.Client(base_url=url, verify=False) as client:

        def ask() -> int:
            return client.post(path, content=data, headers={"Content-Type": kind}).status_code

        ask()  # what is imported and kept at the first request
        with without_cycles():
            assert {ask() for _ in range(20)} == {code}


def test_bodies_of_late_and_shed_requests_are_freed_at_once(model_file: Path) -> None:
    data = bitmap(1000)
    with (
        served(model_file, Slow(1.0), limits=Limits(deadline=0.5, max_queue=1)) as url,
        without_cycles(),
    ):
        codes: list[int] = []

        def ask() -> None:
            kind = {"Content-Type": "image/bmp"}
            response = web.post(f"{url}/v1/predict", content=data, headers=kind)
            codes.append(response.status_code)

        first = threading.Thread(target=ask)
        first.start()
        time.sleep(0.2)
        ask()  # while the first is being computed
        first.join()
        assert codes == [503, 503]


def test_requests_are_answered_after_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    # As of a process that was stopped or a computer that slept: all deadlines are over at once.
    monkeypatch.setattr(server_module, "GRACE", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/stall":
            time.sleep(1.5)  # blocks the event loop
        elif scope["type"] == "http":
            await asyncio.sleep(60)

    limits = Limits(deadline=0.5)
    protected = protect(app, [], Metrics(), limits)
    with serving(Server(protected, port=0, deadline=limits.deadline)) as url:
        waiting, stalling = connect(url), connect(url)
        waiting.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.1)
        stalling.sendall(b"GET /stall HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = waiting.recv(2**16)
        waiting.close()
        stalling.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5" in answer.lower()


def test_a_batch_wakes_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    batches: list[int] = []

    def double(items: list[int]) -> list[int]:
        free.wait(10)
        batches.append(len(items))
        return [2 * item for item in items]

    async def main() -> None:
        loop, wakes = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def count(*args: Any, **options: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        batcher = Batcher(100)
        try:
            jobs = [asyncio.create_task(batcher.run((double,), [i, i + 1])) for i in range(9)]
            await asyncio.sleep(0.2)
            jobs.pop(3).cancel()
            free.set()
            assert await asyncio.gather(*jobs) == [[2 * i, 2 * i + 2] for i in range(9) if i != 3]
        finally:
            batcher.close()
        assert wakes == len(batches) < 8

    asyncio.run(main())


# Pixels.


def blank(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_pixels_are_limited_per_image_and_shared(model_file: Path) -> None:
    with served(model_file, limits=Limits(max_pixels=2_000_000)) as url:
        response = web.post(f"{url}/v1/predict", files={"images": ("big.png", blank(2000))})
        assert response.status_code == 400
        assert response.json()["error"].startswith("big.png has 4,000,000 pixels; at most 2,000,0")
        files = [("images", (f"{i}.png", blank(1400))) for i in range(6)]  # 12 megapixels in all
        response = web.post(f"{url}/v1/predict", files=files)
        assert response.status_code == 200
        assert all("label" in each for each in response.json()["predictions"])


def test_the_budget_is_never_exceeded_and_nobody_starves() -> None:
    async def main() -> None:
        budget = Budget(10)
        inside = 0
        order: list[int] = []

        async def task(number: int, amount: int) -> None:
            nonlocal inside
            async with budget.take(amount):
                order.append(number)
                inside += min(amount, 10)
                assert inside <= 10
                await asyncio.sleep(0.001 * (number % 3))
                inside -= min(amount, 10)

        amounts = [3, 10, 1, 7, 99, 2, 5, 5, 10, 1]
        tasks = [asyncio.create_task(task(i, amount)) for i, amount in enumerate(amounts)]
        await asyncio.sleep(0)
        tasks[4].cancel()  # while it waits
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert budget.free == 10

    asyncio.run(main())


# Who may ask.


def test_keys(model_file: Path) -> None:
    keys = ApiKeys(["first-key-123", "second-key-456"])
    with served(model_file, keys=keys) as url:
        assert web.get(f"{url}/healthz").status_code == 200
        assert web.get(f"{url}/readyz").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            response = web.get(url + path)
            assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        for given_ in (
            "first-key-123",
            "Bearer",
            "Bearer first-key-12",
            "Bearer first-key-1234",
            "Bearer ñ",
            "Basic ???",
            "Digest first-key-123",
        ):
            header = {"Authorization": given_.encode()}
            assert web.get(f"{url}/v1/models", headers=header).status_code == 401
        for given_ in ("Bearer first-key-123", "bearer  second-key-456"):
            header = {"Authorization": given_}
            assert web.get(f"{url}/v1/models", headers=header).status_code == 200
        assert web.get(f"{url}/v1/models", auth=("anyone", "second-key-456")).status_code == 200


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nabcdefgh\n  12345678 \n")
    keys = ApiKeys.from_file(file)
    assert keys.open({"authorization": "Bearer 12345678"})
    assert not keys.open({"authorization": "Bearer # of the team"})
    monkeypatch.setenv("SOME_KEY", " abcdefgh\n")
    assert ApiKeys.from_variable("SOME_KEY").open({"authorization": "Bearer abcdefgh"})
    with pytest.raises(NotAvailableError, match="NO_KEY, which holds the key, is not set"):
        ApiKeys.from_variable("NO_KEY")
    with pytest.raises(NotAvailableError, match="Cannot read the keys"):
        ApiKeys.from_file(tmp_path / "absent")
    file.write_text("# nothing\n")
    with pytest.raises(InputError, match="no keys"):
        ApiKeys.from_file(file)
    for bad in ("short", "with a space", "ümläute-überall"):
        with pytest.raises(InputError, match="at least 8 printable ASCII characters"):
            ApiKeys([bad])


def test_other_host_names_and_other_pages_are_refused(model_file: Path) -> None:
    with served(model_file, hosts=LOOPBACK_HOSTS) as url:
        port = urlsplit(url).port
        for host in ("127.0.0.1", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
            assert web.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost:80:80", "", "[::1"):
            response = web.get(f"{url}/v1/models", headers={"Host": host})
            assert response.status_code in (400, 421)
        for origin in (
            *("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", "http://["),
            *(f"https://127.0.0.1:{port}", f"ftp://127.0.0.1:{port}"),
        ):
            header = {"Origin": origin}
            response = web.post(f"{url}/v1/predict", files={"images": photo()}, headers=header)
            assert response.status_code == 403
        header = {"Origin": url}
        response = web.post(f"{url}/v1/predict", files={"images": photo()}, headers=header)
        assert response.status_code == 200


def test_idle_connections_make_way(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 5)
    with served(model_file) as url:
        held = [connect(url) for _ in range(20)]
        for connection in held[10:]:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.")  # the rest does not come
        time.sleep(0.2)
        for _ in range(10):
            alive(url)
        for connection in held:
            connection.close()


def test_too_many_connections(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 5)
    with served(model_file) as url:
        held = [connect(url) for _ in range(5)]
        for connection in held:  # a body that is still to come
            connection.sendall(
                b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"
            )
        time.sleep(0.2)
        with connect(url) as sixth:
            assert sixth.recv(1000).startswith(b"HTTP/1.1 503 ")
        for connection in held:
            connection.close()
        time.sleep(0.2)
        alive(url)


@pytest.mark.parametrize(
    "change",
    [
        {"top": 10**20},
        {"top": 2.0},
        {"model": "\ud800"},
        {"images": [{"name": "\ud800", "data": ""}]},
        {"\udfff": 1},
    ],
)
def test_what_json_can_say_is_answered_with_400(model_file: Path, change: dict[str, Any]) -> None:
    image = base64.b64encode(photo()).decode()
    asked = {"images": [{"name": "a", "data": image}], **change}
    if "images" in change:
        asked["images"][0]["data"] = image
    with served(model_file) as url:
        header = {"Content-Type": "application/json"}
        response = web.post(f"{url}/v1/predict", content=json.dumps(asked), headers=header)
        assert response.status_code == 400, response.text
        alive(url)


def test_logs_hold_no_images_keys_or_queries(
    model_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with served(model_file, keys=ApiKeys(["very-secret-key"])) as url:
        header = {"Authorization": "Bearer very-secret-key"}
        data = photo("red")
        web.post(f"{url}/v1/predict?top=1", files={"images": ("face.png", data)}, headers=header)
        web.post(f"{url}/v1/predict?q=private", content=b"private", headers=header)
    records = [each for each in caplog.records if not each.name.startswith("http")]  # the client's
    (record, *_) = [r for r in records if getattr(r, "facts", {}).get("path")]
    assert record.facts["status"] == 200
    assert record.facts["images"] == 1
    assert record.facts["model"] == "colours"
    everything = " ".join(str(vars(each)) for each in records)
    for secret in ("very-secret", "face.png", "private", str(data[:20])):
        assert secret not in everything
