"""The client of `miv serve`: what it sends, what it returns, and what it makes of errors."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError
from mivhead.service import Client
from mivhead.service import client as client_module
from tests.helpers.services import FaultyServer, Reply, as_json, hangs_up, running, status
from tests.service.conftest import photo


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module.time, "sleep", lambda _: None)


def test_predicts_what_the_model_predicts(
    url: str, colours: FewShotClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "IMAGES", 4)
    files = [photo(name, i) for i in range(3) for name in ("red", "green", "blue")]
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    expected = colours.classify(pictures)
    paths = [tmp_path / f"{i}.png" for i in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    kinds: list[list[Any]] = [
        [str(path) for path in paths],
        files,
        [io.BytesIO(file) for file in files],
        pictures,
        [np.asarray(picture) for picture in pictures],
    ]
    with Client(url) as client:
        for images in kinds:
            for ours, theirs in zip(client.predict(images), expected, strict=True):
                assert (ours.label, ours.decision) == (theirs.label, theirs.decision)
                assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-6)
                assert ours.unknown == pytest.approx(theirs.unknown, abs=1e-3)
        assert [each.id for each in client.predict(paths)] == [str(path) for path in paths]
        (one,) = client.predict(files[0], top=1)
        assert (one.label, len(one.probabilities)) == ("red", 1)
        never_red = {"red": 0, "green": 1, "blue": 1}
        assert client.predict(files[0], class_prior=never_red)[0].label != "red"
        assert client.predict([]) == []
        assert client.models()[0]["classes"] == ["blue", "green", "red"]


def test_bad_images(url: str, tmp_path: Path) -> None:
    with Client(url) as client:
        with pytest.raises(ImageError, match="image 1"):
            client.predict([photo(), b"text"])
        found = client.predict([photo("blue"), b"text", photo("red")], skip_bad=True)
        assert [each.label for each in found] == ["blue", "red"]
        assert [each.id for each in client.skipped] == ["image 1"]
        assert client.predict([b"text"], skip_bad=True) == []
        for bad in (tmp_path / "absent.png", 3):
            with pytest.raises(ImageError):
                client.predict([bad])  # type: ignore[list-item]


def test_errors_say_what_to_do(url: str) -> None:
    with Client(url) as client, pytest.raises(InputError, match="birds"):
        client.predict([photo()], model="birds")
    for bad in ("ftp://x", "nonsense", "http://[", "http://x:99999"):
        with pytest.raises((InputError, NotAvailableError)), Client(bad, attempts=1) as client:
            client.models()
    with pytest.raises(NotAvailableError, match="2 times"), Client(free_url(), attempts=2) as lost:
        lost.models()


def free_url() -> str:
    with running(FaultyServer(lambda _: as_json({}))) as url:
        return url


def test_a_busy_server_is_asked_again() -> None:
    faults = [status(503, Retry_After="1"), hangs_up, status(429)]
    answer = {"predictions": [{"file": "a", "error": "a is bad."}]}
    server = FaultyServer(lambda _: as_json(answer), faults)
    with running(server) as url, Client(url) as client:
        assert client.predict([photo()], skip_bad=True) == []
        assert len(server.posts) == 4


WRONG = {"file": "a", "closest": "b", "probability": 1, "top": 3, "decision": "b", "unknown": None}


@pytest.mark.parametrize(
    "reply",
    [
        as_json({"error": "x"}, 401),
        as_json({"error": "broken\n"}, 500),
        as_json({"error": "too large"}, 413),
        as_json([1]),
        Reply(b"<html>"),
        Reply(b"", 301, {"Location": "http://x/"}),
        Reply(b"[" * 100_000),
        Reply(b"\xff\xfe{}"),
        as_json({"predictions": 3}),
        as_json({"predictions": [{}]}),
        as_json({"predictions": [WRONG]}),
        as_json({"predictions": [{"error": ["x"]}]}),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
    ],
)
def test_no_answer_leads_to_an_error_that_is_not_ours(reply: Reply) -> None:
    with running(FaultyServer(lambda _: reply)) as url, Client(url, attempts=1) as client:
        with pytest.raises(MivError):
            client.predict([photo()])
        with pytest.raises(MivError):
            client.models()


def test_the_key_is_sent_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer(lambda _: as_json({"models": []}))
    with running(server) as url:
        with Client(url, key="secret-key") as client:
            client.models()
            assert "secret" not in repr(client)
        monkeypatch.setenv("MIV_KEY", "other-key")
        with Client(url) as client:
            client.models()
    sent = [request.headers["Authorization"] for request in server.requests]
    assert sent == ["Bearer secret-key", "Bearer other-key"]


def test_needs_no_torch() -> None:
    code = "import sys; from mivhead.service import Client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
