"""Keys go where they must and nowhere else: not into errors, logs, files or to other hosts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead import Features, FewShotClassifier
from mivhead.backbones import load_backbone
from mivhead.backbones.http import connect
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import photos
from tests.helpers.extras import needs
from tests.helpers.services import (
    FaultyServer,
    Reply,
    Request,
    as_json,
    relay,
    running,
    says,
    toy,
    toy_server,
)

pytestmark = needs("httpx", "http")

KEY = "s3cr3t-k3y"


def test_key_goes_into_its_header_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", KEY + "\n")
    caplog.set_level("DEBUG")
    with toy_server(key="MY_KEY") as address:
        with pytest.raises(NotAvailableError, match=r"denied access \(HTTP 401\).*#key=VARIABLE"):
            load_backbone(address)
        server = FaultyServer(relay(address), [says(as_json({"error": f"{KEY} is bad"}, 400))])
        with running(server) as outer:
            remote = load_backbone(f"{outer}#key=MY_KEY")
            with pytest.raises(InputError, match=r"\*\*\* is bad") as refused:
                remote.extract(photos(1))
            assert remote.extract(photos(1)) == toy().extract(photos(1))
    assert {each.headers["Authorization"] for each in server.requests} == {f"Bearer {KEY}"}
    assert not any(KEY.encode() in each.body + each.path.encode() for each in server.requests)
    private = f"{remote!r} {vars(remote)} {remote.identity.as_json()} {caplog.text}"
    assert KEY not in private + str(refused.value)
    monkeypatch.setenv("MY_KEY", "wrong")
    with toy_server() as address, running(FaultyServer(lambda _: Reply(b"", 403))) as outer:
        with pytest.raises(
            NotAvailableError, match="check the key in the environment variable MY_KEY"
        ):
            load_backbone(f"{outer}#key=MY_KEY")
        assert load_backbone(f"{address}#key=MY_KEY").identity.name == "toy"


def test_keys_that_cannot_be_sent_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(NotAvailableError, match=r"variable MY_KEY, .* is not set"):
        connect("http://127.0.0.1:9", key="MY_KEY")
    monkeypatch.setenv("MY_KEY", "se\ncret")
    with pytest.raises(InputError, match="characters that are not allowed") as refused:
        connect("http://127.0.0.1:9", key="MY_KEY")
    assert "cret" not in str(refused.value)
    with pytest.raises(InputError, match="never the key itself") as refused:
        connect("http://127.0.0.1:9", key=KEY)
    assert KEY not in str(refused.value)


def test_redirects_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    other = FaultyServer(lambda _: as_json({}))
    with running(other) as target:
        moved = Reply(b"", 307, {"Location": f"{target}/x?y={KEY}"})
        with (
            running(FaultyServer(lambda _: moved)) as address,
            pytest.raises(InputError, match=r"redirects to 127\.0\.0\.1:\d+, which") as refused,
        ):
            connect(address, key="MY_KEY")
    assert not other.requests
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("http://", "must look like https://host/path"),
        ("http://host:port/", "must look like https://host/path"),
        ("http://ho st/", "must look like https://host/path"),
        (f"http://me:{KEY}@host/", "of host contains a user name, password or key"),
        (f"http://me:{KEY}@host:x/", "must look like https://host/path"),
        (f"https://host/x?api_key={KEY}", "of host contains a user name, password or key"),
        (f"https://host/x#api_key={KEY}", "options after the # .* are model, request"),
        (f"https://host/x#key={KEY}", "never the key itself"),
        ("https://host/x#timeout=soon", "timeout after the # .* must be a number"),
        ("https://host/x#timeout=0", "timeout positive"),
        ("https://host/x#attempts=0", "attempts must be at least 1"),
        ("https://host/x#header=a:b", "name of an HTTP header"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        load_backbone(spec)
    assert KEY not in str(refused.value)


def test_a_model_file_cannot_have_images_sent_anywhere(shots: Path, tmp_path: Path) -> None:
    def reply(request: Request) -> Reply:
        texts = json.loads(request.body)["input"]
        return as_json({"embeddings": [[1.0, len(text) / 1e5, 2.0] for text in texts]})

    server = FaultyServer(reply)
    with running(server) as url:
        spec = f"{url}#model=toy"
        classifier = FewShotClassifier(spec, threshold=0, cache=False).fit_folder(shots)
        classifier.save(tmp_path / "model.miv")
        asked = len(server.requests)
        model = pickle.loads(pickle.dumps(mivhead.load(tmp_path / "model.miv")))
        with pytest.raises(
            NotAvailableError, match=r"must not send your 1 images to a service.*name the backbone"
        ):
            model.predict([photos(1)[0]])
        assert len(server.requests) == asked
        assert model.classifier_.predict_proba(Features(np.ones((1, 3)))).shape == (1, 3)
        wanted = mivhead.load(tmp_path / "model.miv", backbone=spec)
        assert len(wanted.predict([photos(1)[0]])) == 1
        assert len(server.requests) == asked + 1
