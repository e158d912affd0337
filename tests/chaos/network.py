"""Hostile servers for our client, and hostile clients for our service."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
from PIL import Image

from mivhead.backbones.http import read_vectors
from mivhead.backbones.transport import MAX_BYTES, JsonClient
from mivhead.backbones.wire import NPZ, SAFETENSORS, decode_features, encode_features, parse_json
from mivhead.errors import MivError
from tests.chaos.campaign import Trial
from tests.chaos.damage import damage, small_features
from tests.chaos.kills import fork, wait
from tests.helpers.services import serving, toy
from tests.service.conftest import photo, train

TIMEOUT = 0.4  # seconds of one exchange with a hostile server


class HostileServer:
    """Answers every connection with the next response, as it is; some are sent slowly."""

    def __init__(self) -> None:
        self.response, self.pause = b"", 0.0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                response, pause = self.response, self.pause
                if pause:  # do not keep the next client waiting
                    arguments = (connection, response, pause)
                    threading.Thread(target=self._answer, args=arguments, daemon=True).start()
                else:
                    self._answer(connection, response, pause)

    def _answer(self, connection: socket.socket, response: bytes, pause: float) -> None:
        with connection, suppress(OSError):
            connection.settimeout(2)
            connection.recv(2**16)
            if not pause:
                connection.sendall(response)
                return
            for start in range(len(response)):
                connection.sendall(response[start : start + 1])
                time.sleep(pause)


STATUS = (b"200 OK", b"200", b"204 No", b"302 Found", b"404 No", b"429 Slow", b"500 Oh", b"999 X")
HEADERS = (
    b"Content-Length: -1",
    b"Content-Length: " + b"9" * 5000,
    b"Content-Length: 5\r\nContent-Length: 7",
    b"Transfer-Encoding: chunked",
    b"Location: http://[",
    b"Location: //\xff\xfe",
    b"Retry-After: " + b"9" * 500,
    b"Retry-After: Thu, 99 Foo 9999 99:99:99 GMT",
    b"Content-Type: application/x-npz",
    b"Content-Type: " + b"a/" * 300,
    b"Content-Encoding: gzip",
    b"X: " + b"y" * 70_000,
    b"\x00\x01: \xff",
    b"Miv-Backbone: other",
)


def hostile_response(body: bytes, kind: bytes, rng: np.random.Generator) -> bytes:
    """Put together a response that is wrong in some way, or damage a right one."""
    head = [b"HTTP/1.1 " + STATUS[rng.integers(len(STATUS))]]
    if rng.random() < 0.7:
        head.append(b"Content-Type: " + kind)
    if rng.random() < 0.5:
        head.append(b"Content-Length: %d" % (len(body) + rng.integers(-3, 4)))
    head += [HEADERS[place] for place in rng.integers(0, len(HEADERS), rng.integers(0, 3))]
    raw = b"\r\n".join(head) + b"\r\n\r\n" + body
    if rng.random() < 0.1:
        raw = b"HTTP/1.1 100 Continue\r\n\r\n" * rng.integers(1, 50) + raw
    return damage(raw, rng) if rng.random() < 0.4 else raw


@contextmanager
def servers(_folder: Path) -> Iterator[Trial]:
    """Hostile responses to the HTTP client: an answer or a `MivError`, in time."""
    X, _ = small_features()
    server = HostileServer()
    bodies = [
        (encode_features(X), SAFETENSORS.encode()),
        (encode_features(X, NPZ), NPZ.encode()),
        (json.dumps({"data": [{"embedding": [0.5] * 8}]}).encode(), b"application/json"),
        (b"[" * 100_000, b"application/json"),
        (b"", b"text/html"),
    ]
    client = JsonClient(server.url, attempts=1, timeout=TIMEOUT, backoff=0)

    def trial(rng: np.random.Generator) -> str:
        body, kind = bodies[rng.integers(len(bodies))]
        body = damage(body, rng) if body and rng.random() < 0.5 else body
        server.response = hostile_response(body, kind, rng)
        server.pause = 0.01 if rng.random() < 0.002 else 0.0
        began = time.monotonic()
        try:
            found = client.ask("/v1/features", {"images": []})
            if found.content_type == "application/json":
                read_vectors(parse_json(found.body))
            else:
                decode_features(found.body, found.content_type, "float16", MAX_BYTES)
        except MivError:
            outcome = "refused"
        else:
            outcome = "answered"
        assert time.monotonic() - began < TIMEOUT + 5, "the timeout did not hold"
        return outcome

    try:
        yield trial
    finally:
        server.close()


async def ask(
    address: tuple[str, int], request: bytes, seconds: float, *, hang_up: float | None = None
) -> bytes:
    """Send bytes, and return what comes back until the server closes the connection.

    `hang_up` is the time in seconds after which the client closes its side.
    """
    reader, writer = await asyncio.open_connection(*address)
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            with suppress(ConnectionError):
                writer.write(request)
                if hang_up is not None:
                    asyncio.get_running_loop().call_later(hang_up, _close_side, writer)
                while chunk := await reader.read(2**16):
                    data += chunk
    finally:
        writer.transport.abort()
    return bytes(data)


def _close_side(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        writer.write_eof()


def right_request(image: bytes, kind: str = "image/png") -> bytes:
    head = (
        f"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        f"Connection: close\r\nContent-Length: {len(image)}\r\n\r\n"
    )
    return head.encode() + image


def start_service(folder: Path, **limits: float) -> tuple[int, tuple[str, int]]:
    """Serve a small model in a child; return its process number and its address."""
    from mivhead.service.application import create_app
    from mivhead.service.models import ModelLoader
    from mivhead.service.protection import Limits
    from mivhead.service.server import Server

    path = folder / "colours.miv"
    if not path.exists():
        train().save(path)
    read, write = os.pipe()

    def work() -> None:
        signal.alarm(0)
        allowed = Limits(**limits)  # type: ignore[arg-type]
        app = create_app([path], load=ModelLoader(backbone=toy()), limits=allowed)
        with serving(Server(app, port=0, deadline=allowed.deadline)) as url:
            os.write(write, url.encode())
            signal.pause()

    child = fork(work)
    os.close(write)
    parts = urlsplit(os.read(read, 200).decode())
    os.close(read)
    return child, (str(parts.hostname), int(parts.port or 0))


@contextmanager
def service(folder: Path, **limits: float) -> Iterator[tuple[int, tuple[str, int]]]:
    """Serve a small model in a child."""
    child, address = start_service(folder, **limits)
    try:
        yield child, address
    finally:
        os.kill(child, signal.SIGKILL)
        wait(child)


@contextmanager
def clients(folder: Path) -> Iterator[Trial]:
    """Hostile requests to the service: never a 500, and it continues to answer correctly.

    One trial is a hundred requests, twenty at a time. A few clients do not close their side: the
    service must do so, within its deadlines, while other trials continue.
    """
    from mivhead.service.server import GRACE, HEAD_SECONDS

    features = json.dumps({"features": [[0.5] * 8]}).encode()
    other = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n"
    right = right_request(photo("green"))
    bases = [
        right,
        other + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(features)
        + features,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + right,
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        other + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        other + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        other + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        other + b"Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
        + b"[" * 60_000,
    ]  # fmt: skip
    longest = HEAD_SECONDS + GRACE + 20  # on a busy machine
    patient: list[asyncio.Task[str]] = []

    with service(folder, deadline=3.0) as (_, address), asyncio.Runner() as runner:
        gate = asyncio.Semaphore(20)

        async def send(request: bytes, hang_up: float | None = None) -> str:
            answer = await ask(address, request, longest, hang_up=hang_up)
            assert not answer.startswith(b"HTTP/1.1 500"), (request[:300], answer[:300])
            return answer[9:12].decode(errors="replace") if answer else "closed"

        async def send_and_close(request: bytes, hang_up: float) -> str:
            async with gate:
                return await send(request, hang_up)

        async def send_right() -> str:
            async with gate:
                answer = await ask(address, right, longest)
            assert b'"label":"green"' in answer, answer[:500]
            return "right answer"

        async def send_all(requests: list[tuple[bytes, float]], waiting: bytes) -> Counter[str]:
            patient.append(asyncio.create_task(send(waiting)))
            found = await asyncio.gather(
                send_right(), *(send_and_close(*each) for each in requests)
            )
            done = [task for task in patient if task.done()]
            patient[:] = [task for task in patient if not task.done()]
            return Counter([*found, *(task.result() for task in done)])

        def hostile(rng: np.random.Generator) -> bytes:
            request = bases[rng.integers(len(bases))]
            if rng.random() < 0.7:
                request = damage(request, rng, bases[rng.integers(len(bases))])
            return request

        def trial(rng: np.random.Generator) -> Counter[str]:
            requests = [(hostile(rng), float(rng.choice([0, 0.03]))) for _ in range(98)]
            return runner.run(send_all(requests, hostile(rng)))

        yield trial

        async def finish() -> None:
            await asyncio.gather(*patient)

        runner.run(finish())


@contextmanager
def killed_service(folder: Path) -> Iterator[Trial]:
    """Kills of the service while it answers: clients notice at once, and the next one starts."""
    train().save(folder / "colours.miv")
    before = (folder / "colours.miv").read_bytes()
    request = right_request(photo("red"))

    def trial(rng: np.random.Generator) -> str:
        child, address = start_service(folder)

        async def use() -> list[bytes]:
            asyncio.get_running_loop().call_later(
                rng.uniform(0, 0.3), os.kill, child, signal.SIGKILL
            )
            answers: list[bytes] = []
            with suppress(ConnectionError):
                while True:
                    answers.append(await ask(address, request, 10))
            return answers

        answers = asyncio.run(use())
        wait(child)
        whole = [answer for answer in answers if answer.endswith(b"}")]
        assert all(b'"label":"red"' in answer for answer in whole)
        assert (folder / "colours.miv").read_bytes() == before
        return "killed"

    yield trial


@contextmanager
def overload(folder: Path) -> Iterator[Trial]:
    """A soak of the service with twice the load that it can hold.

    One trial is one second. Twice as many requests are sent as were answered in the seconds before.
    Each must get an answer: 200, or 503 and when to come back. Memory must stay flat after the
    first minute.
    """
    deadline = 10.0
    large = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
    Image.fromarray(pixels).save(large, "JPEG")
    request = right_request(large.getvalue(), "image/jpeg")
    began, first, capacity = time.monotonic(), 0.0, 10.0

    with service(folder, max_queue=4, deadline=deadline) as (child, address):

        def memory() -> float:
            status = Path(f"/proc/{child}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0]) / 1024

        async def send(delay: float) -> str:
            await asyncio.sleep(delay)
            start = time.monotonic()
            answer = await ask(address, request, 60)
            if answer.startswith(b"HTTP/1.1 200"):
                assert b'"label":' in answer, answer[:500]
                return "answered"
            if answer.startswith(b"HTTP/1.1 408"):  # the process or the machine was stopped
                assert time.monotonic() - start >= deadline, answer[:200]
                return "late"
            assert answer.startswith(b"HTTP/1.1 503"), answer[:200]
            assert b"retry-after:" in answer.lower(), answer[:200]
            return "shed"

        async def load(count: int) -> Counter[str]:
            return Counter(await asyncio.gather(*(send(i / count) for i in range(count))))

        def trial(_rng: np.random.Generator) -> str:
            nonlocal first, capacity
            found = asyncio.run(load(max(4, round(2 * capacity))))
            capacity += 0.1 * (found["answered"] - capacity)
            assert found["answered"] or found["late"], "nothing was answered"
            now = memory()
            if time.monotonic() - began < 60 or not first:
                first = max(first, now)
            assert now < 1.1 * first + 20, f"memory grew from {first:.0f} to {now:.0f} MB"
            return "all answered" if set(found) == {"answered"} else "some shed"

        yield trial


@contextmanager
def killed_app(folder: Path) -> Iterator[Trial]:
    """Kills of the app in the middle of changes: what it has confirmed is there afterwards."""
    import httpx

    from mivhead.app.learner import Learner
    from mivhead.app.project import Project
    from mivhead.app.routes import Token, make_server

    root = folder / "project"
    Project(root).close()
    expected: dict[bytes, str] = {}  # the class of every photo, by its content

    def start() -> tuple[int, str, str]:
        read, write = os.pipe()

        def work() -> None:
            signal.alarm(0)
            project = Project(root)
            token = Token(project)
            with serving(make_server(project, Learner(project, None), token, 0)) as url:  # type: ignore[arg-type]  # the learner does not start
                os.write(write, f"{url} {token.value}".encode())
                signal.pause()

        child = fork(work)
        os.close(write)
        url, token = os.read(read, 500).decode().split()
        os.close(read)
        return child, url, token

    def there() -> dict[bytes, str]:
        return {
            path.read_bytes(): path.parent.name
            for path in root.glob("*/*.png")
            if path.parent.name[0] != "."
        }

    def trial(rng: np.random.Generator) -> str:
        child, url, token = start()
        doubtful: set[bytes] = set()
        threading.Timer(rng.uniform(0, 0.4), os.kill, (child, signal.SIGKILL)).start()
        with suppress(httpx.TransportError), httpx.Client(base_url=url, trust_env=False) as client:
            client.get("/", params={"token": token})
            for name in ("robin", "wren"):
                client.post("/api/change", json={"action": "add class", "name": name})
            while True:
                data = photo(tuple(rng.integers(0, 255, 3).tolist()), int(rng.integers(10**6)))
                label = ("robin", "wren")[rng.integers(2)]
                doubtful = {data}
                asked = {"name": f"{len(expected)}.png", "class": label}
                answer = client.post("/api/photos", params=asked, content=data)
                if answer.status_code == 200:
                    expected[data] = label
                    if rng.random() < 0.3:
                        change = {"action": "delete", "ids": [answer.json()["id"]]}
                        if client.post("/api/change", json=change).status_code == 200:
                            del expected[data]
        wait(child)
        Project(root).close()  # completes what was begun
        found = there()
        for data in doubtful:  # either is right
            expected.pop(data, None)
            if data in found:
                expected[data] = found[data]
        assert found == expected, (len(found), len(expected))
        return "killed"

    yield trial


LABELS = (
    *(
        "red",
        "../../x",
        "a/b",
        "..",
        "",
        " ",
        "x" * 300,
        "\x1b[2J",
        "<b>",
        "none of these",
        "unsure",
    ),
    *("\u202e", "red\n", "%2e%2e", "green", "=1+1"),
)


@contextmanager
def changes(folder: Path) -> Iterator[Trial]:
    """Hostile changes of a model over HTTP: an answer below 500, and a model that can be loaded."""
    import httpx

    from mivhead.model.file import load
    from mivhead.service.application import create_app
    from mivhead.service.models import ModelLoader
    from mivhead.service.protection import ApiKeys
    from mivhead.service.server import Server

    path = folder / "models" / "colours.miv"
    path.parent.mkdir()
    train().save(path)
    original = path.read_bytes()
    app = create_app(
        [path], load=ModelLoader(backbone=toy()), keys=ApiKeys(["correct-key"]), allow_changes=True
    )
    header = {"Authorization": "Bearer correct-key"}
    with (
        serving(Server(app, port=0)) as url,
        httpx.Client(
            base_url=f"{url}/v1/models/colours", headers=header, trust_env=False
        ) as client,
    ):

        def label(rng: np.random.Generator) -> str:
            return LABELS[rng.integers(len(LABELS))]

        def trial(rng: np.random.Generator) -> str:
            document: object = {
                ("name", "label", "merge", "new", "x")[rng.integers(5)]: (
                    *(label(rng), True, None, 7, [], {}),
                )[rng.integers(6)]
                for _ in range(rng.integers(0, 3))
            }
            kind = rng.integers(5)
            address = f"/{('shots', 'classes')[rng.integers(2)]}/{quote(label(rng))}"
            if kind == 0:
                data = photo("red", int(rng.integers(10**6)))
                data = damage(data, rng) if rng.random() < 0.3 else data
                answer = client.post(
                    "/shots",
                    files={"images": (label(rng), data)},
                    data={"label": label(rng)},
                )
            elif kind == 1:
                answer = client.patch(address, json=document)
            elif kind == 2:
                answer = client.delete(address)
            elif kind == 3:
                answer = client.patch(address, content=damage(json.dumps(document).encode(), rng))
            else:
                answer = client.request(("PUT", "POST", "GET")[rng.integers(3)], address)
            assert answer.status_code < 500, (answer.status_code, answer.text)
            if answer.status_code in (200, 201) and kind < 3:
                assert len(load(path).classes_) >= 2
                if len(load(path).shots_.names) > 30:  # type: ignore[union-attr]
                    path.write_bytes(original)
            assert list(folder.iterdir()) == [path.parent], "a file elsewhere"
            return str(answer.status_code)

        yield trial
