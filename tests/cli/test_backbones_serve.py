"""`miv backbones serve`: what it says, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from mivhead.cli.main import main
from mivhead.service.backbone import BackboneServer
from tests.helpers.services import toy, toy_server


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[BackboneServer]:
    """Servers that ran; each is stopped at once, as by Ctrl-C."""
    servers = []

    def serve(server: BackboneServer, *_: Any) -> None:
        servers.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackboneServer, "serve_forever", serve)
    monkeypatch.setattr("mivhead.backbones.load_backbone", lambda *_, **__: toy())
    return servers


def test_serves_this_machine_alone_by_default(
    served: list[BackboneServer], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["backbones", "serve", "toy", "--port", "0", "--quiet"]) == 0
    output, errors = capsys.readouterr()
    host, port = served[0].server_address[:2]
    assert host == "127.0.0.1"
    assert output == f"Serving toy at http://127.0.0.1:{port} (press Ctrl-C to stop).\n"
    assert errors == ""
    assert signal.getsignal(signal.SIGTERM) == before


def test_open_door_is_warned_of(
    served: list[BackboneServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["backbones", "serve", "toy", "--host", "0.0.0.0", "--port", "0", "--quiet"]
    assert main(command) == 0
    assert "anyone who can reach 0.0.0.0 can use this server" in capsys.readouterr().err
    monkeypatch.setenv("SERVER_KEY", "abc")
    assert main([*command, "--key", "SERVER_KEY"]) == 0
    output, errors = capsys.readouterr()
    assert not errors
    assert "abc" not in output


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
    served: list[BackboneServer],
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


def test_port_in_use(served: list[BackboneServer], capsys: pytest.CaptureFixture[str]) -> None:
    taken = BackboneServer(toy(), port=0)
    port = str(taken.server_address[1])
    assert main(["backbones", "serve", "toy", "--port", port]) == 2
    assert "choose another with --port" in capsys.readouterr().err
    taken.server_close()


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
        assert {label for _, label, _ in rows} <= {folder.name for folder in shots.iterdir()}
        assert main(["evaluate", model, str(shots), *options]) == 0
    assert main(["predict", model, str(shots)]) == 2
    assert "no backbone named 'toy'" in capsys.readouterr().err
