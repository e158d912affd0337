"""`miv bench run` from end to end: killed, resumed, with workers and without, all the same."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from mivhead.backbones.timm_models import build
from mivhead.cli.main import main
from mivhead.errors import InputError
from mivhead_bench.benchmark.results import RESULTS, read_results
from mivhead_bench.cli.run import join
from tests.helpers.bench_data import numbers, write_sets

MIV = "import sys; from mivhead_bench.cli import main; sys.exit(main(sys.argv[2:]))"
WHAT = ["--sets", "dots", "--protocol", "5-way 1-shot", "--views", "1", "--tasks", "6"]
WHAT += ["--seed", "3"]
CONFIG = 'methods = [{name = "miv", params = {steps = 4}}, "ncc"]'


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One set of six classes of four images; do not change it."""
    return write_sets(tmp_path_factory.mktemp("data"), names=("dots",), images=4)


@pytest.fixture(scope="module")
def what(data, tmp_path_factory):
    """What to run, as arguments."""
    path = tmp_path_factory.mktemp("config") / "quick.toml"
    path.write_text(CONFIG)
    return ["bench", "run", str(path), *WHAT, "--data", str(data)]


@pytest.fixture(scope="module")
def expected(what, tmp_path_factory):
    """A run in this process, never stopped, and its features."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*what, "-o", str(folder), "--workers", "0", "--quiet"]) == 0
    return folder


@pytest.mark.slow
def test_killed_and_resumed_with_workers_equals_a_run_in_one_process(what, expected, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-c", MIV, *what, "-o", str(run), "--workers", "2", "--debug"]
    command += ["--cache", str(tmp_path / "features")]  # filled by the workers
    environment = os.environ | {"MIV_CACHE": "off"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    end = time.monotonic() + 300
    while not (run / RESULTS).exists() or not (run / RESULTS).read_bytes().count(b"\n"):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.stderr.read()  # ends when the workers, who write there too, are gone as well
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    before = (run / RESULTS).read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (run / RESULTS).read_bytes().startswith(kept)
    assert len((run / RESULTS).read_bytes().splitlines()) == 12  # nothing was done twice
    assert numbers(read_results(run)) == numbers(read_results(expected))
    assert b"ncc" in done.stdout


def test_answers_for_people_and_programs(what, expected, capsys):
    command = [*what, "-o", str(expected), "--workers", "0"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in document["results"]] == ["miv", "ncc"]
    assert [row["tasks"] for row in document["results"]] == [6, 6]
    assert main(command) == 0
    assert "5-way 1-shot" in capsys.readouterr().out


def test_only_sets_that_give_no_tasks(tmp_path, capsys):
    data = write_sets(tmp_path / "data", names=("dots",), classes=4, images=1)
    command = ["bench", "run", "--data", str(data), "--workers", "0", "-o", str(tmp_path / "run")]
    assert main(command) == 2
    answer = capsys.readouterr()
    assert "dots has only 1 of the 2 images" in answer.err
    assert "No task could be sampled from dots" in answer.err
    assert answer.out == ""


def test_images_that_pip_carries(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MIV_DATA", raising=False)
    command = ["bench", "run", "--methods", "ncc", "--protocol", "5-way 1-shot, max_queries 1"]
    command += ["--sets", "photographs", "--tasks", "2", "--workers", "0", "--quiet"]
    assert main([*command, "-o", str(tmp_path / "run")]) == 0
    assert len(read_results(tmp_path / "run")) == 2


@pytest.mark.slow
def test_the_documented_path_with_stand_in_weights(tmp_path, capsys):
    """One command with a folder of checkpoints, the report, and its tables in every format."""
    weights, run = tmp_path / "checkpoints", tmp_path / "sdl"
    weights.mkdir()
    for name, file in (("sdl_resnet18", "model_best.pth.tar"), ("resnet18", "resnet18.pth")):
        torch.save({"state_dict": build(name, "random").state_dict()}, weights / file)
    data = write_sets(tmp_path / "data", ("aircraft", "mnist", "my_photos"))
    small = ["--tasks", "1", "--protocol", "2-way 1-shot", "--workers", "0"]
    where = ["--data", str(data), "--weights", str(weights), "-o", str(run)]
    assert main(["bench", "run", "sdl", "--backbone", "resnet18", *small, *where]) == 0
    assert main(["bench", "run", "sdl", *small, *where]) == 0  # grows by the other backbone
    found = {(r.set, r.backbone, r.method) for r in read_results(run) if r.error is None}
    assert found == {
        (name, backbone, method)
        for name in ("aircraft", "mnist")  # not a set of MD+: my_photos
        for backbone in ("sdl_resnet18", "resnet18")
        for method in ("tsa", "miv")
    }
    assert main(["bench", "report", str(run)]) == 0
    texts = {p.name: p.read_text() for p in (run / "report").iterdir() if p.is_file()}
    for file in ("report.md", "report.html", "tables.tex"):
        assert "SDL-ResNet-18" in texts[file]
        assert "1.96 standard errors" in texts[file]
    assert len(texts["summary.csv"].splitlines()) == 1 + len(found)
    assert "paper_accuracy" in texts["summary.csv"]


def test_weights_of_several_backbones(tmp_path):
    (one,) = join("main", {"backbones": ["dino_resnet50"]}, ["my.pth"]).backbones
    assert (one.name, one.weights) == ("dino_resnet50", "my.pth")
    named = join("main", {}, ["resnet50=a.pth", "dino_vits8=b.pth"]).backbones
    chosen = {b.name: b.weights for b in named if b.weights}
    assert chosen == {"resnet50": "a.pth", "dino_vits8": "b.pth"}
    assert {b.weights for b in join("main", {}, ["random"]).backbones} == {"random"}
    for wrong in ("my.pth", "resnet5=a.pth", str(tmp_path)):
        with pytest.raises(InputError):
            join("main", {}, [wrong])
    for file in ("dino_resnet50_pretrain.pth", "dino_deitsmall8_pretrain.pth", "resnet50.pth"):
        (tmp_path / file).touch()  # as their authors publish them, or as their backbones
    (tmp_path / "dino_vits8.safetensors").touch()
    files = {b.name: b.weights for b in join("main", {}, [str(tmp_path)]).backbones}
    assert files == {
        "resnet50": str(tmp_path / "resnet50.pth"),
        "deit_small": None,
        "dino_resnet50": str(tmp_path / "dino_resnet50_pretrain.pth"),
        "dino_vits16": None,
        "dino_vits8": str(tmp_path / "dino_vits8.safetensors"),  # its own name comes first
    }


def test_options_keep_the_settings_of_names_that_the_configuration_has(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(
        'sets = ["birds"]\n'
        'backbones = [{name = "mine", spec = "efficientnet_lite0"}]\n'
        'methods = ["ridge", {name = "knn", params = {neighbours = 3}}]\n'
    )
    config = join(str(path), {"methods": ["knn", "ncc"], "backbones": ["mine"]}, ())
    assert [(m.name, m.params) for m in config.methods] == [("knn", {"neighbours": 3}), ("ncc", {})]
    assert [b.source for b in config.backbones] == ["efficientnet_lite0"]
    assert join("main", {}, ()).paper_sizes
    assert not join("main", {"paper_sizes": False}, ()).paper_sizes


def test_a_backbone_that_the_table_does_not_know_gets_all_methods():
    def methods(*backbones):
        config = join("main", {"backbones": backbones}, ())
        return {b.name: [m.name for m in config.methods_on(b.name)] for b in config.backbones}

    assert methods("dino_vits8") == {"dino_vits8": ["miv"]}
    assert methods("resnet50", "timm:mine") == {
        "resnet50": ["ncc", "tsa", "miv"],
        "timm:mine": ["ncc", "tsa", "ett", "miv"],
    }


@pytest.mark.parametrize(
    "changes",
    [
        ["--sets", "dotz"],
        ["--methods", "mvi"],
        ["--methods", "ncc,ett"],
        ["--protocol", "many"],
        ["--tasks", "7"],
        ["--seed", "4"],
        ["--backbone", "resnet51"],
        ["--views", "all"],
        ["--cache-gb", "-1"],
    ],
)
def test_bad_requests_are_one_sentence(what, expected, changes, fails):
    fails(*what, "-o", expected, "--workers", "0", *changes)


def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch, fails):
    monkeypatch.delenv("MIV_DATA", raising=False)
    misspelled, deep = tmp_path / "my.toml", tmp_path / "deep.toml"
    misspelled.write_text("taks = 3")
    deep.write_text('sets = ["digits"]\nmethods = [{name = "miv", params = {last_blocks = 9}}]')
    for arguments in ([misspelled], [deep], ["--sets", "birds"], ["main"], []):
        error = fails("bench", "run", *arguments, "-o", tmp_path / "run", "--workers", "0")
        assert ("--data" in error) == (arguments not in ([misspelled], [deep]))
        assert not (tmp_path / "run").exists()


def test_parameters_of_methods(what, tmp_path, fails):
    config = join("small", {"methods": ["svm", "ridge"]}, (), {"use_views": True})
    assert [method.params for method in config.methods] == [{"use_views": True}] * 2
    for wrong in ("steps", "nothing=1"):
        fails(*what, "-o", tmp_path / "run", "--workers", "0", "--param", wrong)


def test_bundled_sets_are_found_beside_a_data_folder(tmp_path, monkeypatch, miv):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("MIV_DATA", str(tmp_path / "data"))
    run = ["--sets", "digits", "--methods", "ncc", "--tasks", "1", "--workers", "0"]
    assert "ncc" in miv("bench", "run", "small", *run, "-o", tmp_path / "run").out


def test_the_list_of_tables(miv):
    assert "tab:miv_acc" in miv("bench", "list").out
    tables = json.loads(miv("bench", "list", "--json").out)["tables"]
    assert {each["name"]: each["columns"] for each in tables}["latency"] == 3


def test_a_dry_run_runs_nothing(what, tmp_path, monkeypatch, miv):
    monkeypatch.chdir(tmp_path)
    assert "with 2 workers" in miv(*what, "--dry-run", "--workers", "2").out
    plan = json.loads(miv(*what, "--dry-run", "--json", "--workers", "4").out)
    assert plan["tasks"] == 6
    assert plan["hours"] == pytest.approx(plan["core_hours"] / 4)
    assert list(tmp_path.iterdir()) == []
    assert "-o RUN" in miv(*what).err
