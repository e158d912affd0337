"""Hostile and unlucky clients: slow or huge requests, floods, wrong keys, other pages."""

from __future__ import annotations

import asyncio
import io
import socket
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mivhead.errors import InputError, NotAvailableError
from mivhead.service import middleware
from mivhead.service.middleware import LOOPBACK_HOSTS, ApiKeys
from tests.helpers.web import web
from tests.service.conftest import PATH, Waiting, clients, photo

PNG = {"Content-Type": "image/png"}
MB = 2**20


async def alive(client: Any) -> None:
    response = await client.post(PATH, files={"images": photo("green")})
    assert response.json()["predictions"][0]["closest"] == "green"


async def held(start: bytes, go: asyncio.Event) -> AsyncIterator[bytes]:
    """A body that starts, and waits for a signal."""
    yield start
    await go.wait()


def test_bodies_that_are_too_large(model_file: Path) -> None:
    async def main() -> None:
        async with clients(model_file, limits={"max_bytes": 100_000}) as client:
            never = held(b"x", asyncio.Event())
            announced = {**PNG, "Content-Length": str(2**31)}
            response = await client.post(PATH, content=never, headers=announced)
            assert response.status_code == 413

            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(11):
                    yield b"x" * 10_000

            response = await client.post(PATH, content=chunks(), headers=PNG)
            assert response.status_code == 413
            await alive(client)

    asyncio.run(main())


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """The deadlines of the requests so far, which pass when a test says so."""
    made: list[asyncio.Timeout] = []

    def start(_: float) -> asyncio.Timeout:
        made.append(asyncio.timeout(None))
        return made[-1]

    monkeypatch.setattr(middleware, "asyncio", SimpleNamespace(timeout=start))
    return made


def test_a_slow_body_is_408_and_blocks_nobody(
    model_file: Path, deadlines: list[asyncio.Timeout]
) -> None:
    async def main() -> None:
        async with clients(model_file) as client:
            slow = held(b"x", asyncio.Event())
            waiting = asyncio.create_task(client.post(PATH, content=slow, headers=PNG))
            while not deadlines:
                await asyncio.sleep(0)
            assert (await client.get("/healthz")).status_code == 200
            deadlines[0].reschedule(0)
            assert (await waiting).status_code == 408

    asyncio.run(main())


def test_a_late_answer_is_503(model_file: Path, deadlines: list[asyncio.Timeout]) -> None:
    backbone = Waiting()

    async def main() -> None:
        async with clients(model_file, backbone=backbone) as client:
            waiting = asyncio.create_task(client.post(PATH, files={"images": photo()}))
            assert await asyncio.to_thread(backbone.entered.wait, 30)
            deadlines[0].reschedule(0)
            response = await waiting
            assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
            backbone.go.set()

    asyncio.run(main())


def test_the_memory_of_bodies_is_shared(model_file: Path) -> None:
    async def main() -> None:
        async with clients(model_file, limits={"max_memory": 300_000}) as client:
            go, started = asyncio.Event(), asyncio.Event()

            async def first_body() -> AsyncIterator[bytes]:
                yield b"x" * 240_000
                started.set()
                await go.wait()

            first = asyncio.create_task(client.post(PATH, content=first_body(), headers=PNG))
            await started.wait()
            large = {"content": b"x" * 100_000, "headers": PNG}
            response = await client.post(PATH, **large)
            assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
            await alive(client)  # a small one still fits
            go.set()
            assert (await first).status_code == 400  # not an image
            assert (await client.post(PATH, **large)).status_code == 400

    asyncio.run(main())


def test_twelve_requests_of_60_mb_stay_below_400_mb(model_file: Path) -> None:
    async def main() -> None:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(60):
                yield bytes(MB)
                await asyncio.sleep(0)

        async with clients(model_file) as client:
            tracemalloc.start()
            try:
                answers = await asyncio.gather(
                    *(client.post(PATH, content=body(), headers=PNG) for _ in range(12))
                )
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert {answer.status_code for answer in answers} == {400, 503}
            assert peak < 400 * MB
            await alive(client)

    asyncio.run(main())


def test_a_full_queue_sheds_load(model_file: Path) -> None:
    backbone = Waiting()

    async def main() -> None:
        async with clients(model_file, backbone=backbone, limits={"max_queue": 2}) as client:
            files = [("images", photo("green", i)) for i in range(3)]
            first = asyncio.create_task(client.post(PATH, files=files))  # an idle server takes it
            await asyncio.to_thread(backbone.entered.wait)
            response = await client.post(PATH, files={"images": photo()})
            assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
            assert (await client.get("/healthz")).status_code == 200
            backbone.go.set()
            assert (await first).status_code == 200
            await alive(client)

    asyncio.run(main())


def test_pixels_are_limited(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mivhead.service import engine

    decoding: list[str] = []
    decode = engine._decode_file

    def alone(image: Any, size: int) -> Any:
        decoding.append(image.name)
        assert len(decoding) == 1
        picture = decode(image, size)
        decoding.remove(image.name)
        return picture

    def blank(side: int) -> bytes:
        file = io.BytesIO()
        Image.new("L", (side, side)).save(file, "PNG")
        return file.getvalue()

    monkeypatch.setattr(engine, "LARGE", 1_000_000)
    monkeypatch.setattr(engine, "_decode_file", alone)

    async def main() -> None:
        async with clients(model_file, limits={"max_pixels": 2_000_000}) as client:
            files = [("images", (f"{i}.png", blank(1400))) for i in range(4)]
            response = await client.post(PATH, files=[*files, ("images", ("big", blank(2000)))])
            rows = response.json()["predictions"]
            assert ["closest" in row for row in rows] == [True] * 4 + [False]
            assert "pixels" in rows[4]["error"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "request_",
    [
        b"hello there you\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a TLS client
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0x10\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
)
def test_what_is_not_http_is_refused(url: str, request_: bytes) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(2**16)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert web.get(f"{url}/healthz").status_code == 200


# Who may ask.


def test_keys(model_file: Path) -> None:
    async def main() -> None:
        keys = ApiKeys(["first-key-123", "second-key-456"])
        async with clients(model_file, keys=keys) as client:
            for path in ("/healthz", "/readyz"):
                assert (await client.get(path)).status_code == 200
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                response = await client.get(path)
                assert response.status_code == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
            for header, status in {
                "first-key-123": 401,
                "Bearer": 401,
                "Bearer first-key-12": 401,
                "Bearer first-key-1234": 401,
                "Bearer ñ": 401,
                "Digest first-key-123": 401,
                "Bearer first-key-123": 200,
                "bearer  second-key-456": 200,
            }.items():
                sent = {"Authorization": header.encode()}
                assert (await client.get("/v1/models", headers=sent)).status_code == status

    asyncio.run(main())


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nabcdefgh\n  12345678 \n")
    keys = ApiKeys.from_file(file)
    assert keys.open({"authorization": "Bearer 12345678"})
    assert not keys.open({"authorization": "Bearer # of the team"})
    monkeypatch.setenv("SOME_KEY", " abcdefgh\n")
    assert ApiKeys.from_variable("SOME_KEY").open({"authorization": "Bearer abcdefgh"})
    with pytest.raises(NotAvailableError):
        ApiKeys.from_variable("NO_KEY")
    with pytest.raises(NotAvailableError):
        ApiKeys.from_file(tmp_path / "absent")
    for bad in ([], ["short"], ["with a space"], ["ümläute-überall"]):
        with pytest.raises(InputError):
            ApiKeys(bad)


def test_other_host_names_and_other_pages_are_refused(model_file: Path) -> None:
    async def main() -> None:
        async with clients(model_file, hosts=LOOPBACK_HOSTS) as client:

            async def status(**headers: str) -> int:
                response = await client.post(PATH, files={"images": photo()}, headers=headers)
                return response.status_code

            for host in ("127.0.0.1", "localhost:8765", "LOCALHOST", "[::1]:8765"):
                assert await status(Host=host) == 200
            for host in ("evil.example", "127.0.0.1.evil.example", "localhost:80:80", "", "[::1"):
                assert await status(Host=host) == 421
            for origin in (
                *("http://evil.example", "null", "http://127.0.0.1:8766", "http://["),
                *("https://127.0.0.1:8765", "ftp://127.0.0.1:8765"),
            ):
                assert await status(Host="127.0.0.1:8765", Origin=origin) == 403
            assert await status(Host="127.0.0.1:8765", Origin="http://127.0.0.1:8765") == 200

    asyncio.run(main())
