"""Faults on the way to a real server: overcome, or a clear error."""

from __future__ import annotations

import io
import socket
import struct
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from mivhead import Features
from mivhead.backbones import transport, wire
from mivhead.backbones.http import RemoteBackbone, connect
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import photos
from tests.helpers.extras import needs
from tests.helpers.services import (
    FaultyServer,
    Reply,
    as_json,
    breaks_off,
    changed,
    drips,
    hangs_up,
    relay,
    resets,
    running,
    says,
    sleeps,
    status,
    toy,
    toy_server,
    trickles,
    writes,
)

pytestmark = needs("httpx", "http")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server() as address:
        yield address


@pytest.fixture
def faulty(url: str) -> Iterator[Callable[..., tuple[FaultyServer, RemoteBackbone]]]:
    """A backbone on a server that misbehaves before it answers as the toy server does."""
    servers = []

    def make(*faults: object, **options: object) -> tuple[FaultyServer, RemoteBackbone]:
        server = FaultyServer(relay(url), faults)
        servers.append(running(server))
        address = servers[-1].__enter__()
        return server, connect(address, **({"backoff": 0.001} | options))  # type: ignore[arg-type]

    yield make
    for server in servers:
        server.__exit__(None, None, None)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have slept."""
    seen: list[float] = []
    monkeypatch.setattr("mivhead._util.http.time.sleep", seen.append)
    return seen


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ([status(429)], 2),
        ([status(500), status(500)], 3),
        ([status(503), status(502), status(504)], 4),
        ([hangs_up], 2),
        ([resets], 2),
        ([breaks_off, resets, status(500), hangs_up], 5),
        ([says(Reply(b"nonsense", 500))], 2),
    ],
)
def test_passing_faults_are_overcome(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], faults: list[object], requests: int
) -> None:
    server, remote = faulty(*faults)
    assert remote.extract(photos(3)) == toy().extract(photos(3))
    assert len(server.posts) == requests
    assert len({each.body for each in server.posts}) == 1


@pytest.mark.parametrize("fault", [sleeps(0.6), drips])
def test_slow_answers_are_given_up_and_asked_again(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], fault: object
) -> None:
    server, remote = faulty(fault, timeout=0.3)
    assert remote.extract(photos(2)) == toy().extract(photos(2))
    assert len(server.posts) == 2


@pytest.mark.parametrize(
    "fault",
    [
        trickles(b"HTTP/1.1 200 O", b"K"),
        trickles(b"HTTP/1.1 200 OK\r\nContent-Type: applic", b"a"),
        trickles(b"HTTP/1.1 200 OK\r\n", b"X-More: more\r\n"),
        trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        trickles(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        trickles(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1"),
        trickles(b"HTTP/1.1 500 Oh\r\nContent-Length: 9999\r\n\r\n", b"x"),
    ],
    ids=["status line", "header", "headers", "100 Continue", "chunks", "chunk size", "error"],
)
def test_the_timeout_bounds_every_phase(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], fault: object
) -> None:
    server, remote = faulty(fault, timeout=0.3)
    began = time.monotonic()
    assert remote.extract(photos(2)) == toy().extract(photos(2))
    assert time.monotonic() - began < 3
    assert len(server.posts) >= 2  # on a busy machine, the right answer may be late once, too


def test_the_timeout_bounds_the_handshake_of_tls() -> None:
    """The server accepts, and trickles something that is not TLS's answer yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 kB follows
                for _ in range(300):
                    time.sleep(0.02)
                    connection.sendall(b"\x02")

        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        with pytest.raises(NotAvailableError, match=r"no response within 0.3 s"):
            connect(f"https://127.0.0.1:{server.getsockname()[1]}", attempts=1, timeout=0.3)
        assert time.monotonic() - began < 3
        thread.join()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", "redirects to another address"),
        (b"HTTP/1.1 301 Moved\r\nLocation: file:///etc/passwd\r\n\r\n", "not followed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "not a valid number"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nx", "not a valid number"),
        (b"HTTP/1.1 204 None\r\nContent-Length: ten\r\n\r\n", "not a valid number"),
    ],
)
def test_malformed_headers_are_refused(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], raw: bytes, message: str
) -> None:
    _, remote = faulty(writes(raw), attempts=1)
    with pytest.raises(InputError, match=message):
        remote.extract(photos(1))


def npz(content: bytes, *, method: int = 0) -> bytes:
    """A zip whose only member may claim a compression that it does not have."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("block0.map.npy", content)
    raw = bytearray(file.getvalue())
    raw[8], raw[raw.rfind(b"PK\x01\x02") + 10] = method, method
    return bytes(raw)


def npy(shape: str, kind: str = "<f4") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    "body",
    [
        npz(b"junk", method=8),  # zlib.error
        npz(b"junk", method=12),  # OSError of bzip2
        npz(b"junk", method=99),  # NotImplementedError
        npz(npy("(999999999999999,)")),  # MemoryError
        npz(npy("(-1,)")),
        npz(npy("(2, 2", "<f4")),  # SyntaxError
        npz(npy("(0, 2)", "<U4")),
        npz(npy("(1,)", "|O")),
        b"PK\x05\x06" + b"\0" * 18,
    ],
)
def test_malformed_npz_is_refused(body: bytes) -> None:
    with pytest.raises(InputError):
        wire.decode_features(body, wire.NPZ, "float16", 2**30)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(503), "HTTP 503: fault 503"),
        (hangs_up, "connection lost"),
        (breaks_off, "truncated after"),
        (sleeps(0.3), "no response within 0.2 s"),
    ],
)
def test_lasting_faults_end_clearly(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], fault: object, reason: str
) -> None:
    server, remote = faulty(*[fault] * 9, attempts=3, timeout=0.2)
    with pytest.raises(NotAvailableError, match=f"failed 3 times in a row.*{reason}"):
        remote.extract(photos(2))
    assert len(server.posts) == 3


def test_nobody_there() -> None:
    with pytest.raises(NotAvailableError, match=r"failed 2 times.*connection lost"):
        connect("http://127.0.0.1:9", attempts=2, backoff=0)


def test_back_off_doubles_with_jitter_from_the_seed(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], waits: list[float]
) -> None:
    for _ in range(2):
        _, remote = faulty(*[status(500)] * 4, backoff=1.0, seed=7)
        remote.extract(photos(1))
    assert waits[:4] == waits[4:]
    assert all(0.5 * 2**i <= wait <= 1.5 * 2**i for i, wait in enumerate(waits[:4]))
    assert len({wait / 2**i for i, wait in enumerate(waits[:4])}) == 4


def test_retry_after_is_honoured(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], waits: list[float]
) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    _, remote = faulty(
        status(429, Retry_After="7"), status(503, Retry_After=date), status(429, Retry_After="soon")
    )
    remote.extract(photos(1))
    assert waits[0] == 7
    assert 25 < waits[1] <= 30
    assert waits[2] < 0.1


def test_excessive_retry_after_is_an_error(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], waits: list[float]
) -> None:
    _, remote = faulty(status(429, Retry_After="3600"))
    with pytest.raises(NotAvailableError, match="asks to wait 3600 s"):
        remote.extract(photos(1))
    assert not waits


def test_refusals_are_not_repeated(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]],
) -> None:
    server, remote = faulty(status(422))
    with pytest.raises(InputError, match=r"rejected the request \(HTTP 422\): fault 422"):
        remote.extract(photos(1))
    assert len(server.posts) == 1


def replaced(**tensors: np.ndarray) -> object:
    """A well-formed answer that is not the right one."""
    body = wire.encode_features(
        Features.from_tensors({name.replace("_", "."): value for name, value in tensors.items()})
    )
    return changed(lambda _: body)


MAP, EDGES = np.ones((1, 6, 4, 4), np.float16), np.ones((1, 6, 2, 2), np.float16)
TOKEN = np.ones((1, 3), np.float16)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            replaced(block0_map=MAP, block1_map=EDGES, block2_token=np.ones((1, 4), np.float16)),
            "layout .* before",
        ),
        (
            replaced(block0_map=MAP[:, :, :2], block1_map=EDGES, block2_token=TOKEN),
            "layout .* before",
        ),
        (
            replaced(block0_map=np.tile(MAP, (2, 1, 1, 1)), block1_token=np.tile(TOKEN, (2, 1))),
            "2 results for 1 images",
        ),
        (replaced(block0_map=MAP), "1 blocks, but lists 3"),
        (changed(lambda body: body.replace(b"block2.token", b"block2.taken")), "Unknown tensor"),
        (
            changed(lambda body: body[:-6] + b"\x00\x7e" * 3),
            r"block2.token .* NaN or infinity \(first in image 0\)",
        ),
        (changed(lambda body: body[: len(body) // 2]), "not readable application/x-safetensors"),
        (says(Reply(b"<html>", 200, {"Content-Type": "text/html"})), "of type 'text/html'"),
        (says(as_json({"error": "none"}, Miv_Backbone="other")), "no longer serves toy"),
    ],
)
def test_wrong_answers_in_the_middle_are_refused(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], fault: object, message: str
) -> None:
    right = changed(lambda body: body)
    server, remote = faulty(right, right, fault, batch_size=1, concurrency=1)
    with pytest.raises(InputError, match=message):
        remote.extract(photos(5))
    assert len(server.posts) <= 5


def test_wrong_width_is_noticed_between_batches_too(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]],
) -> None:
    wide = replaced(block0_map=MAP, block1_map=EDGES, block2_token=np.ones((1, 9), np.float16))
    _, remote = faulty(changed(lambda body: body), wide)
    remote.extract(photos(1))
    with pytest.raises(InputError, match=r"layout .* before"):
        remote.extract(photos(1))


def test_endless_answers_are_cut(
    faulty: Callable[..., tuple[FaultyServer, RemoteBackbone]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, remote = faulty(says(Reply(b"x" * 5000)))
    monkeypatch.setattr(transport, "MAX_BYTES", 4000)
    with pytest.raises(InputError, match="more than 4,000 bytes"):
        remote.extract(photos(1))
