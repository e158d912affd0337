"""`miv backbones serve`: what it says, and how it ends."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mivhead.cli.main import main
from tests.helpers.extras import needs
from tests.helpers.services import toy, toy_server

pytest.importorskip("starlette")
from mivhead.service.server import Server

pytestmark = needs("httpx", "http")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Servers that ran; each ends at once, as by Ctrl-C."""
    servers = []

    def serve(server: Server) -> None:
        servers.append(server)
        server.close()

    monkeypatch.setattr(Server, "serve_forever", serve)
    monkeypatch.setattr("mivhead.backbones.load_backbone", lambda *_, **__: toy())
    return servers


def test_serves_this_machine_alone_by_default(
    served: list[Server], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backbones", "serve", "toy", "--port", "0", "--quiet"]) == 0
    output, errors = capsys.readouterr()
    assert served[0].host == "127.0.0.1"
    assert output == f"Serving toy at {served[0].url} (press Ctrl-C to stop).\n"
    assert errors == ""


def test_an_open_door_must_be_asked_for(
    served: list[Server],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    command = ["backbones", "serve", "toy", "--host", "0.0.0.0", "--port", "0", "--quiet"]
    assert main(command) == 2
    assert "require a key with --key VARIABLE or --key-file FILE" in capsys.readouterr().err
    assert not served
    assert main([*command, "--no-key"]) == 0
    monkeypatch.setenv("SERVER_KEY", "abcdefgh")
    assert main([*command, "--key", "SERVER_KEY"]) == 0
    (tmp_path / "keys").write_text("abcdefgh\n")
    assert main([*command, "--key-file", str(tmp_path / "keys")]) == 0
    output, errors = capsys.readouterr()
    assert not errors
    assert "abcdefgh" not in output
    assert len(served) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "x"], "'x' is not an integer"),
        (["--port", "70000"], "Cannot listen on 127.0.0.1, port 70000"),
        (["--key", "NO_SUCH_KEY"], "NO_SUCH_KEY, which holds the key, is not set"),
        (["--device", "nowhere"], "'nowhere' cannot be used"),
    ],
)
def test_mistakes_are_one_sentence(
    served: list[Server],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    try:
        code = main(["backbones", "serve", "toy", "--quiet", *options])
    except SystemExit as stop:  # of the parser
        code = int(stop.code or 0)
    errors = capsys.readouterr().err
    assert code == 2
    assert message in errors
    assert errors.startswith("miv: error: ")
    assert errors.count("\n") == 1


def test_port_in_use(served: list[Server], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["backbones", "serve", "toy", "--port", port]) == 2
        assert "choose another with --port" in capsys.readouterr().err


def test_unknown_backbone_and_no_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backbones", "serve", "efficientnet-lite0"]) == 2
    assert "did you mean 'efficientnet_lite0'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["backbones"])
    assert stop.value.code == 2


def test_fit_and_predict_over_http(
    shots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with toy_server() as url:
        model = str(tmp_path / "model.miv")
        options = ["--backbone", url, "--quiet"]
        assert main(["fit", str(shots), "-o", model, "--no-check", *options]) == 0
        assert main(["predict", model, str(shots), "--csv", *options]) == 0
        rows = [line.split(",") for line in capsys.readouterr().out.splitlines()[1:]]
        assert len(rows) == len(list(shots.glob("*/*.png")))
        assert {label for _, label, *_ in rows} <= {folder.name for folder in shots.iterdir()}
        assert main(["evaluate", model, str(shots), "--include-shots", *options]) == 0
    assert main(["predict", model, str(shots)]) == 2
    assert "no backbone named 'toy'" in capsys.readouterr().err
