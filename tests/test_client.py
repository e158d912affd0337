"""The client of `miv serve`: what it sends, what it returns, and what it makes of errors."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError
from tests.helpers.services import FaultyServer, Reply, as_json, hangs_up, running, status
from tests.service.conftest import colours, model_file, photo, url  # noqa: F401  # fixtures

pytest.importorskip("httpx")
pytest.importorskip("starlette")
from mivhead import client as client_module
from mivhead._util import http
from mivhead.client import Client


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.time, "sleep", lambda _: None)


def test_predicts_what_the_model_predicts(
    url: str,  # noqa: F811
    colours: FewShotClassifier,  # noqa: F811
    tmp_path: Path,
) -> None:
    files = [photo(name, i) for i in range(14) for name in ("red", "green", "blue")]
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    expected = colours.classify(pictures)
    paths = []
    for i, file in enumerate(files):
        paths.append(tmp_path / f"{i}.png")
        paths[-1].write_bytes(file)
    kinds: list[list[Any]] = [
        paths,
        [str(path) for path in paths],
        files,
        [io.BytesIO(file) for file in files],
        pictures,
        [np.asarray(picture) for picture in pictures],
    ]
    with Client(url, concurrency=3) as client:
        for images in kinds:
            found = client.predict(images)
            assert [each.label for each in found] == [each.label for each in expected]
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-6)
                assert ours.decision == theirs.decision
                assert ours.unknown == pytest.approx(theirs.unknown, abs=1e-3)
        assert [each.id for each in client.predict(paths)] == [str(path) for path in paths]
        (one,) = client.predict(files[0], top=1)
        assert (one.label, len(one.probabilities)) == ("red", 1)
        assert client.predict([]) == []
        assert client.models()[0]["classes"] == ["blue", "green", "red"]
        assert client.model("colours")["name"] == "colours"


def test_few_images_are_in_memory_at_a_time(
    url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "IMAGES", 1)
    taken: list[int] = []
    when_answered: list[int] = []
    real = Client._prediction

    def note(self: Client, document: Any) -> Any:
        when_answered.append(len(taken))
        return real(self, document)

    monkeypatch.setattr(Client, "_prediction", note)
    with Client(url, concurrency=2) as client:
        found = client.predict(taken.append(i) or photo("red", i) for i in range(20))
    assert len(found) == len(when_answered) == 20
    assert all(ahead - done <= 4 for done, ahead in enumerate(when_answered))


def test_bad_images(url: str, tmp_path: Path) -> None:  # noqa: F811
    with Client(url) as client:
        with pytest.raises(ImageError, match="image 1 is not a JPEG"):
            client.predict([photo(), b"text"])
        found = client.predict([photo("blue"), b"text", photo("red")], skip_bad=True)
        assert [each.label for each in found] == ["blue", "red"]
        assert [each.id for each in client.skipped] == ["image 1"]
        assert client.predict([b"text"], skip_bad=True) == []
        with pytest.raises(ImageError, match=r"absent\.png does not exist"):
            client.predict([tmp_path / "absent.png"])
        with pytest.raises(ImageError, match="has the type int"):
            client.predict([3])  # type: ignore[list-item]


def test_errors_say_what_to_do(url: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    with Client(url) as client:
        with pytest.raises(InputError, match="There is no model 'birds'"):
            client.predict([photo()], model="birds")
        with pytest.raises(InputError, match="refused the request"):
            client.model("../x")
    with pytest.raises(InputError, match="attempts and concurrency"):
        Client(url, attempts=0)
    for bad in ("ftp://x", "nonsense", "http://[", "http://x:99999"):
        with pytest.raises((InputError, NotAvailableError)):
            Client(bad, attempts=1).models()
    with pytest.raises(NotAvailableError, match="failed 2 times in a row"):
        Client("http://127.0.0.1:9", attempts=2).models()


def test_a_busy_server_is_asked_again() -> None:
    faults = [status(503, Retry_After="1"), hangs_up, status(429)]
    answer = {"predictions": [{"file": "a", "error": "a is bad."}]}
    server = FaultyServer(lambda r: as_json({} if r.method == "GET" else answer), faults)
    with running(server) as address, Client(address) as client:
        assert client.predict([photo()], skip_bad=True) == []
        assert len(server.posts) == 4


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (as_json({"error": "x"}, 401), NotAvailableError, "requires a key"),
        (as_json({"error": "broken\n"}, 500), NotAvailableError, "failed .HTTP 500.: broken"),
        (as_json({"error": "too large"}, 413), InputError, "refused the request: too large"),
        (as_json([1]), InputError, "is not a mivhead service"),
        (Reply(b"<html>"), InputError, "is not a mivhead service"),
        (Reply(b"", 301, {"Location": "http://x/"}), InputError, "is not a mivhead service"),
    ],
)
def test_odd_answers(reply: Reply, error: type[Exception], message: str) -> None:
    with (
        running(FaultyServer(lambda _: reply)) as address,
        Client(address) as client,
        pytest.raises(error, match=message),
    ):
        client.models()


WRONG = {"file": "a", "label": "b", "probability": 1, "top": 3, "decision": "b", "unknown": None}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"[" * 100_000),
        Reply(b"\xff\xfe{}"),
        as_json({}),
        as_json({"predictions": 3}),
        as_json({"predictions": [3]}),
        as_json({"predictions": [{}]}),
        as_json({"predictions": [WRONG]}),
        as_json({"predictions": [{"error": ["x"]}]}),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
    ],
)
def test_no_answer_leads_to_an_error_that_is_not_ours(reply: Reply) -> None:
    server = FaultyServer(lambda r: as_json({}) if r.method == "GET" else reply)
    with running(server) as address, Client(address, attempts=1) as client:
        with pytest.raises(MivError):
            client.predict([photo()])
        with pytest.raises(MivError):
            client.models()


def test_endless_answers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_BYTES", 1000)
    server = FaultyServer(lambda _: as_json({"models": ["x" * 2000]}))
    with running(server) as address, pytest.raises(InputError, match="more than 1,000 bytes"):
        Client(address).models()


def test_an_answer_that_trickles_is_cut_off() -> None:
    def trickles(handler: Any, request: Any, answer: Any) -> None:
        handler.reply(Reply(b"x" * 1000), send=1)
        with suppress(OSError):  # the client gave up
            while True:
                threading.Event().wait(0.05)
                handler.wfile.write(b"x")

    server = FaultyServer(lambda _: as_json({}), [trickles])
    with (
        running(server) as address,
        pytest.raises(NotAvailableError, match=r"no response within 0\.5 s"),
    ):
        Client(address, timeout=0.5, attempts=1).predict([photo()])


def test_key_is_sent_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer(lambda _: as_json({"models": []}))
    with running(server) as address:
        Client(address, key="secret-key").models()
        monkeypatch.setenv("MIV_KEY", "other-key")
        Client(address).models()
    sent = [request.headers["Authorization"] for request in server.requests]
    assert sent == ["Bearer secret-key", "Bearer other-key"]
    assert "secret" not in repr(Client(address, key="secret-key"))


def test_a_client_that_nobody_closes_leaves_no_connection_open() -> None:
    with running(FaultyServer(lambda _: as_json({"models": []}))) as address:
        client = Client(address)
        client.models()
        connections = client._client.http
        del client
        gc.collect()
        assert connections.is_closed


def test_needs_no_torch() -> None:
    code = "import sys, mivhead.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
