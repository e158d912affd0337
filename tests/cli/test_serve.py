"""`miv serve` as a process of its own: what it says, what it answers, how it ends."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from tests.helpers.web import web


@contextmanager
def process(*options):
    command = [sys.executable, "-m", "mivhead", "serve", *options, "--port", "0", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as started:
        try:
            lines = []
            while not lines or lines[-1] != "}\n":
                lines.append(started.stdout.readline())
                assert lines[-1], started.stderr.read()
            yield started, json.loads("".join(lines))["url"]
        finally:
            started.kill()


def test_serves_until_it_is_stopped_and_finishes_what_it_began(model, new):
    photo = (new / "rings" / "5.png").read_bytes()
    with process(str(model)) as (started, url):
        response = web.post(f"{url}/v1/predict", files={"images": photo})
        assert response.json()["predictions"][0]["closest"] == "rings"
        answers = []
        files = [("images", photo)] * 60
        client = threading.Thread(
            target=lambda: answers.append(web.post(f"{url}/v1/predict", files=files))
        )
        client.start()
        while client.is_alive() and "miv_queue_images 0.0" in web.get(f"{url}/metrics").text:
            pass  # until it has begun
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=60) == 0
        client.join()
        assert answers[0].status_code == 200
        assert len(answers[0].json()["predictions"]) == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no.miv"], "no.miv"),
        (["MODEL", "MODEL"], "Two models"),
        (["MODEL", "--host", "0.0.0.0"], "--key"),
        (["MODEL", "--key", "NO_SUCH"], "NO_SUCH"),
        (["MODEL", "--key", "NO_SUCH", "--key-file", "keys"], "one of"),
        (["MODEL", "--backbone", "no_such_backbone"], "no_such_backbone"),
    ],
)
def test_refusals(arguments, words, model, fails):
    filled = [model if word == "MODEL" else word for word in arguments]
    assert words in fails("serve", *filled, "--port", "0")
