"""`miv app` as a process of its own: what it says, and how it ends."""

import json
import signal
import socket
import subprocess
import sys

import httpx


def test_it_prints_its_links_and_ends_on_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "mivhead", "app", str(tmp_path / "birds"), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    everywhere = [*command, "--json", "--host", "0.0.0.0"]
    with subprocess.Popen(everywhere, text=True, **pipes) as started:
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(started.stdout.readline())
            assert lines[-1], started.stderr.read()
        document = json.loads("".join(lines))
        assert document["url"].startswith("http://localhost:")
        assert document["phone"].partition("?")[2] == document["url"].partition("?")[2]
        answer = httpx.get(document["url"], follow_redirects=True, trust_env=False)
        assert answer.status_code == 200
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 0
        assert "everyone in this network who has the link" in started.stderr.read()


def test_refusals(fails, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port" in fails("app", tmp_path / "birds", "--no-browser", "--port", port)
    (tmp_path / "file").touch()
    assert "is a file" in fails("app", tmp_path / "file", "--no-browser")
