"""`miv serve` as a process of its own: what it says, what it answers, how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mivhead import FewShotClassifier
from mivhead.cli.main import main
from tests.conftest import write_images

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from tests.helpers.web import web


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    shots = write_images(folder / "shots", 3)
    path = folder / "colours.miv"
    classifier = FewShotClassifier(threshold=0, recipe="paper", verbose=False)
    classifier.fit_folder(shots).save(path)
    return path


@contextmanager
def process(*options: str) -> Iterator[tuple[Any, str]]:
    command = [sys.executable, "-m", "mivhead", "serve", *options, "--port", "0", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as started:  # type: ignore[call-overload]
        try:
            lines = []
            while not lines or lines[-1] != "}\n":
                lines.append(started.stdout.readline())
                assert lines[-1], started.stderr.read()
            yield started, json.loads("".join(lines))["url"]
        finally:
            started.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_it_is_stopped_and_finishes_what_it_began(model: Path, how: int) -> None:
    photo = (model.parent / "shots/red/0.png").read_bytes()
    with process(str(model)) as (started, url):
        response = web.post(f"{url}/v1/predict", files={"images": photo})
        assert response.json()["predictions"][0]["label"] == "red"
        answers: list[Any] = []
        files = [("images", photo)] * 60
        client = threading.Thread(
            target=lambda: answers.append(web.post(f"{url}/v1/predict", files=files))
        )
        client.start()
        end = time.monotonic() + 20
        while "miv_queue_images 60.0" not in web.get(f"{url}/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.01)
        started.send_signal(how)
        assert started.wait(timeout=30) == 0
        client.join()
        assert answers[0].status_code == 200
        assert len(answers[0].json()["predictions"]) == 60
        log = [json.loads(line) for line in started.stderr.read().splitlines()]
    requests = [each for each in log if each["event"] == "request"]
    assert {"path", "status", "seconds", "client", "time", "id"} <= set(requests[0])
    assert [each["images"] for each in requests if each["path"] == "/v1/predict"] == [1, 60]


def test_the_backbone_too(model: Path) -> None:
    pytest.importorskip("httpx")
    from mivhead.backbones import load_backbone

    with process(str(model), "--share-backbone", "--quiet") as (started, url):
        assert load_backbone(url).identity.name == "efficientnet_lite0"
        started.send_signal(signal.SIGINT)
        assert started.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.miv"], "The model no.miv cannot be read: No such file or directory."),
        (["{model}", "{model}"], "Two models would have the name 'colours'"),
        (["{model}", "--host", "0.0.0.0"], "require a key with --key"),
        (["{model}", "--key", "NO_SUCH"], "NO_SUCH, which holds the key, is not set"),
        (["{text}"], "not a"),
        (["{model}", "--backbone", "no_such_backbone"], "no backbone named"),
    ],
)
def test_mistakes_are_one_sentence(
    model: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.miv"
    text.write_text("not a model")
    filled = [each.format(model=model, text=text) for each in arguments]
    assert main(["serve", *filled, "--port", "0"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith("miv: error: ")
    assert errors.count("\n") == 1


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "curl -F images=@photo.jpg" in text
