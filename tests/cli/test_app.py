"""`miv app` as a process of its own: what it says, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mivhead.cli.main import main

pytest.importorskip("starlette")
pytest.importorskip("httpx")
import httpx


def test_it_prints_its_link_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mivhead", "app", str(tmp_path / "birds"), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--json"], text=True, **pipes) as started:  # type: ignore[call-overload]
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(started.stdout.readline())
            assert lines[-1], started.stderr.read()
        link = json.loads("".join(lines))["url"]
        answer = httpx.get(link, follow_redirects=True, trust_env=False)
        assert answer.status_code == 200
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 0
        assert started.stderr.read() == ""


def test_a_port_in_use_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["app", str(tmp_path / "birds"), "--no-browser", "--port", port]) == 2
    assert "choose another with --port" in capsys.readouterr().err


def test_a_file_is_not_a_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "birds").touch()
    assert main(["app", str(tmp_path / "birds"), "--no-browser"]) == 2
    assert "is a file: name a folder" in capsys.readouterr().err


def test_a_phone_is_invited_with_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mivhead", "app", str(tmp_path / "birds"), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--host", "0.0.0.0"], text=True, **pipes) as started:  # type: ignore[call-overload]
        assert "is open at this address" in started.stdout.readline()
        link = started.stdout.readline().strip()
        assert link.startswith("http://localhost:")
        lines: list[str] = []
        while not lines or "--new-link ends earlier links" not in lines[-1]:
            lines.append(started.stderr.readline())
            assert lines[-1], lines
        text = "".join(lines)
        assert "everyone in this network who has the link" in text
        assert "\u2580" in text or "\u2588" in text  # the QR code
        assert httpx.get(link, follow_redirects=True, trust_env=False).status_code == 200
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 0
