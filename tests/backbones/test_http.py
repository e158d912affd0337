"""A backbone behind the real server gives what it gives at home."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mivhead import BlockPreset, FewShotClassifier, Preset
from mivhead.backbones import load_backbone, wire
from mivhead.backbones.http import connect
from mivhead.errors import InputError
from tests.helpers.conformance import check, photos
from tests.helpers.extras import needs
from tests.helpers.services import (
    FaultyServer,
    Reply,
    as_json,
    relay,
    running,
    toy,
    toy_server,
)

pytestmark = needs("httpx", "http")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server() as address:
        yield address


def test_conformance_with_a_server_in_another_process() -> None:
    code = "import sys; from mivhead.cli.main import main; sys.exit(main())"
    options = ["backbones", "serve", "efficientnet_lite0", "--port", "0", "--device", "cpu"]
    command = [sys.executable, "-c", code, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(word for word in process.stdout.readline().split() if "://" in word)
            remote = load_backbone(address)
            check(remote)
            local = load_backbone("efficientnet_lite0", device="cpu")
            assert remote.identity == local.identity
            assert remote.preset == local.preset
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_toy_conforms_and_equals_itself_at_home(url: str) -> None:
    remote, local = load_backbone(url), toy()
    check(remote)
    assert remote.identity == local.identity
    assert remote.preset == local.preset
    images = photos(5)
    assert remote.extract(images) == local.extract(images)
    assert load_backbone(url, dtype="float32").extract(images).dtype == np.float32


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(n=st.integers(1, 9), batch=st.integers(1, 10), concurrency=st.integers(1, 5))
def test_any_batching_keeps_order_and_values(
    url: str, n: int, batch: int, concurrency: int
) -> None:
    images = [np.full((7, 5, 3), 20 * i, np.uint8) for i in range(n)]
    remote = connect(url, batch_size=batch, concurrency=concurrency)
    assert remote.extract(images) == toy().extract(images)


def test_requests_run_side_by_side_but_not_more_than_allowed(url: str) -> None:
    at_work, most, lock = 0, 0, threading.Lock()

    def slowly(request: object) -> Reply:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.1)
        with lock:
            at_work -= 1
        return relay(url)(request)  # type: ignore[arg-type]

    with running(FaultyServer(slowly)) as address:
        connect(address, batch_size=1, concurrency=3).extract(photos(8))
    assert most == 3


def test_npz_is_read_without_pickles_and_bombs(tmp_path: Path) -> None:
    features = toy().extract(photos(2))
    body = wire.encode_features(features, wire.NPZ)
    assert wire.decode_features(body, wire.NPZ, "float16", 10**6) == features
    with pytest.raises(InputError, match="unpacks to more than 100 bytes"):
        wire.decode_features(body, wire.NPZ, "float16", 100)
    np.savez(tmp_path / "evil.npz", **{"block0.token": np.array([print], dtype=object)})
    with pytest.raises(InputError, match="not readable application/x-npz"):
        wire.decode_features((tmp_path / "evil.npz").read_bytes(), wire.NPZ, "float16", 10**6)
    with pytest.raises(InputError, match="not readable application/x-npz"):
        wire.decode_features(b"PK", wire.NPZ, "float16", 10**6)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(body: bytes) -> None:
    for kind in (wire.SAFETENSORS, wire.NPZ):
        with pytest.raises(InputError):
            wire.decode_features(body, kind, torch.float16, 10**6)


def test_bad_options(url: str) -> None:
    with pytest.raises(InputError, match="batch_size and concurrency must be at least 1"):
        connect(url, batch_size=0)
    with pytest.raises(InputError, match="A remote backbone has its own weights"):
        load_backbone(url, weights="random")


def test_presets_change_the_head_but_not_the_taps(url: str) -> None:
    local = toy().preset
    other = Preset(local.taps, (BlockPreset(heads=1),) * 3, local.preprocessing, threshold=4)
    assert load_backbone(url, preset=other).preset == other
    with pytest.raises(InputError, match="taps colours, edges, mean at 16 px"):
        load_backbone(url, preset=Preset(("colours",), (BlockPreset(),), local.preprocessing))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"protocol": 1}, "is not a mivhead server .*lacks the key 'identity'.*append #model=NAME"),
        ([], "is not a mivhead server"),
        ("not found", "is not a mivhead server"),
    ],
)
def test_other_servers_are_recognised(document: object, message: str) -> None:
    server = FaultyServer(lambda _: as_json(document))
    with running(server) as address, pytest.raises(InputError, match=message):
        load_backbone(address)


def test_newer_protocol_is_refused(url: str) -> None:
    def newer(request: object) -> Reply:
        document = json.loads(relay(url)(request).body)  # type: ignore[arg-type]
        return as_json(document | {"protocol": 2})

    message = "uses version 2 of the protocol"
    with running(FaultyServer(newer)) as address, pytest.raises(InputError, match=message):
        load_backbone(address)


def test_a_model_fitted_over_http_is_the_same_model(url: str, shots: Path, queries: Path) -> None:
    settings_ = {"random_state": 3, "threshold": 2, "cache": False}
    local = FewShotClassifier(toy(), **settings_).fit_folder(shots)
    remote = FewShotClassifier(url, **settings_).fit_folder(shots)
    paths = sorted(queries.glob("*/*.png"))
    np.testing.assert_array_equal(local.predict_proba(paths), remote.predict_proba(paths))
    assert remote.identity_ == local.identity_


def test_a_server_says_nothing_that_clients_of_0_2_0_do_not_know() -> None:
    backbone = load_backbone("efficientnet_lite0", device="cpu")
    about = wire.ServerInfo(wire.PROTOCOL, backbone.identity, backbone.preset, 8, 2**20).as_json()
    assert set(about) == {"protocol", "identity", "preset", "max_images", "max_bytes"}
    names = ("pool_sizes", "native", "form", "tau", "heads", "plain", "candidates")
    for block in about["preset"]["blocks"]:
        assert set(block) == {*names, "pooled", "deepest"}
