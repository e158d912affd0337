"""Configurations and results of strangers: whatever they name, nothing of it is imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mivhead._util.schema import to_json
from mivhead.cli.main import main
from mivhead_bench.benchmark.config import load_config, read_config
from mivhead_bench.benchmark.results import CONFIG, RESULTS, read_run_config
from tests.helpers.bench_data import result, write_sets

EVIL = """
from pathlib import Path
Path("it ran").touch()

class Head:
    def fit(self, X, y):
        self.classes = len(set(y))
        return self

    def predict_proba(self, X):
        return [[1 / self.classes] * self.classes for _ in range(len(X))]

def network():
    raise AssertionError
"""

NAMED = {
    "method": 'methods = ["evil_head:Head", "ncc"]',
    "renamed method": 'methods = [{name = "ncc", method = "evil_head:Head"}]',
    "module backbone": 'backbones = [{name = "efficientnet_lite0", spec = "evil_head:network"}]',
    "file backbone": 'backbones = ["evil_head.py:network"]',
    "service": 'backbones = ["http://127.0.0.1:9/v1"]',
    "share": 'backbones = ["//127.0.0.1/share/net.onnx"]',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module that leaves a trace when it is imported."""
    (tmp_path / "evil_head.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("evil_head", None)


def ran(folder: Path) -> bool:
    return (folder / "it ran").exists() or "evil_head" in sys.modules


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("how", [["--dry-run"], ["-o", "run", "--workers", "0"]])
def test_a_file_alone_runs_nothing(
    folder: Path, named: str, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_sets(folder / "data", names=("dots",))
    Path("theirs.toml").write_text(f'{named}\nsets = ["dots"]\ntasks = 1\n')
    assert main(["bench", "run", "theirs.toml", "--data", str(data), *how]) == 2
    message = capsys.readouterr().err
    assert "a file alone must not run code" in message
    assert "--allow-code" in message
    assert not ran(folder)
    assert not Path("run").exists()


def test_results_that_name_code_are_reported_and_compared_without_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "methods": [{"name": "evil_head:Head", "params": {"x": 1}}, "ncc"],
        "backbones": [{"name": "b", "spec": "evil_head.py:network"}],
        "sets": ["birds"],
    }
    for name in ("one", "two"):
        run = folder / name
        run.mkdir()
        (run / CONFIG).write_text(json.dumps(config))
        assert main(["bench", "report", name]) == 2  # there are no results yet
        lines = [
            json.dumps(to_json(result(method=m, task=t)))
            for m in ("a:B", "ncc", "\x1b[2J")
            for t in range(3)
        ]
        (run / RESULTS).write_text("\n".join(lines) + "\n")
        assert main(["bench", "report", name]) == 0
    assert main(["bench", "compare", "one:a:B", "one:ncc"]) == 0
    assert main(["bench", "compare", "one", "two"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert read_run_config("one").methods[0].kind == "evil_head:Head"
    assert not ran(folder)


def test_resuming_a_strangers_run_does_not_run_its_methods(folder: Path) -> None:
    data = write_sets(folder / "data", names=("dots",))
    Path("run").mkdir()
    theirs = {"methods": ["evil_head:Head"], "sets": ["dots"], "tasks": 1}
    (folder / "run" / CONFIG).write_text(json.dumps(theirs))
    command = ["bench", "run", "--data", str(data), "--methods", "ncc", "--tasks", "1"]
    command += ["--protocol", "2-way 1-shot, max_queries 2", "--workers", "0", "-o", "run"]
    assert main([*command, "--quiet"]) == 0
    assert not ran(folder)


@pytest.mark.parametrize("how", [["--methods", "evil_head:Head"], ["--allow-code"]])
def test_the_command_line_allows_it(folder: Path, how: list[str]) -> None:
    data = write_sets(folder / "data", names=("dots",))
    text = 'methods = ["evil_head:Head"]\nsets = ["dots"]\ntasks = 1\n'
    Path("mine.toml").write_text(f'{text}protocols = ["2-way 1-shot, max_queries 2"]\n')
    command = ["bench", "run", "mine.toml", "--data", str(data), "--workers", "0", "--quiet"]
    assert main([*command, *how, "-o", "run"]) == 0
    assert ran(folder)


def test_reading_checks_what_it_can_without_importing(folder: Path) -> None:
    assert read_config({"methods": ["evil_head:Head"]}).methods[0].is_own
    Path("theirs.toml").write_text('methods = ["evil_head:Head", "evil_head:Other"]')
    assert len(load_config("theirs.toml").methods) == 2
    assert not ran(folder)


@pytest.mark.parametrize(
    "name", ["lock.pid", "lock", "commands.jsonl", "results.jsonl", "report", "tasks/varying"]
)
def test_a_strangers_run_folder_writes_nothing_elsewhere(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_sets(folder / "data", names=("dots",))
    (folder / "home").mkdir()
    (folder / "home/diary.txt").write_text("dear diary")
    run = folder / "run"
    (run / "tasks").mkdir(parents=True)
    (run / CONFIG).write_text(json.dumps({"methods": ["ncc"], "sets": ["dots"], "tasks": 1}))
    goal = "home" if name in ("report", "tasks/varying") else "home/diary.txt"
    (run / name).symlink_to(folder / goal)
    command = ["bench", "run", "--data", str(data), "--methods", "ncc", "--tasks", "1"]
    assert main([*command, "--workers", "0", "-o", "run"]) == 2
    assert "is a link" in capsys.readouterr().err
    if name != "results.jsonl":
        (run / RESULTS).write_text(json.dumps(to_json(result())) + "\n")
    assert main(["bench", "report", "run"]) == 2
    assert [p.read_text() for p in (folder / "home").iterdir()] == ["dear diary"]
