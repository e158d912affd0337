"""`miv bench run` from end to end: killed, resumed, with workers and without, all the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mivhead.backbones import load_backbone
from mivhead.backbones.timm_models import build
from mivhead.benchmark.results import RESULTS, read_results
from mivhead.cli.bench import _join
from mivhead.cli.main import build_parser, main
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.bench_data import numbers, write_sets
from tests.helpers.extras import needs

MIV = "import sys; from mivhead.cli.main import main; sys.exit(main())"
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


def join(*arguments):
    return _join(build_parser().parse_args(["bench", "run", *arguments, "-o", "run"]))


def test_weights_belong_to_one_backbone():
    (backbone,) = join("main", "--backbone", "dino_resnet50", "--weights", "my.pth").backbones
    assert (backbone.name, backbone.weights) == ("dino_resnet50", "my.pth")
    with pytest.raises(InputError, match=r"any of resnet50, deit_small, .*: write --weights"):
        join("main", "--weights", "my.pth")


def test_weights_of_several_backbones(tmp_path):
    named = join("main", "--weights", "resnet50=a.pth", "--weights", "dino_vits8=b.pth").backbones
    found = {b.name: b.weights for b in named if b.weights}
    assert found == {"resnet50": "a.pth", "dino_vits8": "b.pth"}
    with pytest.raises(InputError, match="Did you mean 'resnet50'"):
        join("main", "--weights", "resnet5=a.pth")
    for file in ("dino_resnet50_pretrain.pth", "dino_deitsmall8_pretrain.pth", "resnet50.pth"):
        (tmp_path / file).touch()  # as their authors publish them, or as their backbones
    (tmp_path / "dino_vits8.safetensors").touch()
    found = {
        b.name: Path(b.weights or "").name
        for b in join("main", "--weights", str(tmp_path)).backbones
    }
    assert found["dino_resnet50"] == "dino_resnet50_pretrain.pth"
    assert found["dino_vits8"] == "dino_vits8.safetensors"  # its own name comes first
    assert found["resnet50"] == "resnet50.pth"
    assert found["deit_small"] == ""
    with pytest.raises(InputError, match=r"no checkpoint .* such as sdl_resnet18.safetensors"):
        join("sdl", "--weights", str(tmp_path))


@needs("timm")
def test_missing_weights_name_the_file_and_where_it_is_published():
    with pytest.raises(NotAvailableError, match=r"dino_resnet50_pretrain.pth of github.*dino") as e:
        load_backbone("dino_resnet50")
    assert "--weights dino_resnet50=FILE" in str(e.value)


def test_options_keep_the_settings_of_names_that_the_configuration_has(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(
        'sets = ["birds"]\n'
        'backbones = [{name = "mine", spec = "efficientnet_lite0"}]\n'
        'methods = ["ridge", {name = "knn", params = {neighbours = 3}}]\n'
    )
    options = ["--methods", "knn,ncc", "--backbone", "mine", "--data", "sets"]
    config = join(str(path), *options)
    assert [(m.name, m.params) for m in config.methods] == [("knn", {"neighbours": 3}), ("ncc", {})]
    assert [b.source for b in config.backbones] == ["efficientnet_lite0"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--sets", "dotz"], "Did you mean 'dots'?"),
        (["--methods", "mvi"], "Did you mean 'miv'?"),
        (["--protocol", "many"], "The protocol 'many' is not known"),
        (["--tasks", "7"], "tasks is 6 there and 7 here"),
        (["--seed", "4"], "seed is 3 there and 4 here"),
        (["--backbone", "resnet51"], "did you mean 'resnet50'?"),
    ],
)
def test_bad_requests_are_one_sentence(what, expected, changes, words, capsys):
    command = [*what, "-o", str(expected), "--workers", "0"]
    assert main(command + changes) == 2
    answer = capsys.readouterr()
    assert answer.err.count("\n") == 1
    assert words in answer.err


def test_bad_configurations_and_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MIV_DATA", raising=False)
    path = tmp_path / "my.toml"
    path.write_text("taks = 3")
    assert main(["bench", "run", str(path), "-o", str(tmp_path / "run")]) == 2
    assert "Did you mean 'tasks'?" in capsys.readouterr().err
    assert main(["bench", "run", "--sets", "birds", "-o", str(tmp_path / "run")]) == 2
    assert "--data" in capsys.readouterr().err
    for config in (["main"], []):  # not silently on the images of scikit-learn
        assert main(["bench", "run", *config, "-o", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert "--data" in error
        assert "--sets digits," in error
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--bank", "x"], "use --cache DIR"),
        (["--bank-gb", "9"], "use --cache-gb GB"),
        (["--drop-bank"], "the cache removes"),
        (["--cache-gb", "-1"], "not a number of gigabytes"),
    ],
)
def test_options_of_earlier_versions_and_bad_sizes(option, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["bench", "run", "small", "-o", "run", *option])
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_lists_have_commas_and_may_be_repeated():
    config = join("--sets", "a,b", "--sets", "c", "--methods", "ncc, knn", "--data", "sets")
    assert config.sets == ("a", "b", "c")
    assert [m.name for m in config.methods] == ["ncc", "knn"]
    options = ["--protocol", "varying, max_ways 20,5-way 1-shot", "--protocol", "5-way 5-shot"]
    assert join(*options).protocols == ("varying, max_ways 20", "5-way 1-shot", "5-way 5-shot")


def test_the_list_of_tables(capsys):
    assert main(["bench", "list"]) == 0
    shown = capsys.readouterr().out
    assert "tab:miv_acc" in shown
    assert "..." not in shown
    assert " 0.0\n" not in shown
    assert main(["bench", "list", "--json"]) == 0
    tables = {each["name"]: each for each in json.loads(capsys.readouterr().out)["tables"]}
    assert tables["latency"]["backbones"] == ["dino_vits16", "dino_vits8"]
    assert tables["latency"]["columns"] == 3


def test_a_dry_run_runs_nothing(what, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*what, "--dry-run", "--workers", "2"]) == 0
    shown = capsys.readouterr().out
    assert "efficientnet_lite0" in shown
    assert "with 2 workers on this machine" in shown
    assert re.search(r"In total about [\d.]+ (s|min \d+ s) on one core: ", shown)
    assert main([*what, "--dry-run", "--json", "--workers", "4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tasks"] == 6
    assert plan["hours"] == pytest.approx(plan["core_hours"] / 4)
    assert list(tmp_path.iterdir()) == []
    assert main(what) == 2
    assert "-o RUN" in capsys.readouterr().err


def test_a_dry_run_states_the_price_of_features_both_ways(what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*what, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["features"] == "cache"
    assert plan["task_passes"] > plan["passes"] > 0
    assert plan["memory"] > 100_000_000
    small = [*what, "--dry-run", "--cache-gb", "1e-6"]
    assert main(small) == 0
    shown = capsys.readouterr().out
    assert "would drop those of sets that exceed the limit of the cache" in shown
    assert re.search(r"kept +[\d,]+ .*\ndropped +[\d,]+ ", shown)
    assert main([*small, "--json"]) == 0
    dropped = json.loads(capsys.readouterr().out)
    assert dropped["features"] == "task"
    expected = dropped["task_hours"] - dropped["extraction_hours"]
    columns = sum(column["hours"] for column in dropped["columns"])
    assert dropped["core_hours"] == pytest.approx(columns + dropped["extraction_hours"] + expected)


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


def test_a_backbone_that_the_table_does_not_know_gets_all_methods():
    def methods(*backbones):
        arguments = ["bench", "run", "main", "--backbone", ",".join(backbones), "-o", "x"]
        config = _join(build_parser().parse_args(arguments))
        return {b.name: [m.name for m in config.methods_on(b.name)] for b in config.backbones}

    assert methods("dino_vits8") == {"dino_vits8": ["miv"]}
    assert methods("resnet50") == {"resnet50": ["ncc", "tsa", "miv"]}
    assert methods("resnet50", "timm:mine") == {
        "resnet50": ["ncc", "tsa", "miv"],
        "timm:mine": ["ncc", "tsa", "ett", "miv"],
    }


def test_the_papers_sizes_can_be_chosen():
    def chosen(*arguments):
        parsed = build_parser().parse_args(["bench", "run", *arguments, "-o", "x"])
        return _join(parsed).paper_sizes

    assert chosen("main")
    assert not chosen("main", "--no-paper-sizes")
    assert not chosen("small")
    assert chosen("small", "--paper-sizes")


def test_random_weights_and_the_input_size():
    def backbones(*arguments):
        parsed = build_parser().parse_args(["bench", "run", *arguments, "-o", "x"])
        return _join(parsed).backbones

    assert {b.weights for b in backbones("main", "--weights", "random")} == {"random"}
    (one,) = backbones("--backbone", "timm:vit", "--image-size", "112")
    assert one.image_size == 112
    with pytest.raises(InputError, match="--image-size may belong to any of"):
        backbones("main", "--image-size", "112")


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("ncc,tsa", "'tsa' cannot run on the backbone 'efficientnet_lite0': "),
        ("ncc,miv-blocks9", "method must be one of"),
    ],
)
def test_methods_that_cannot_run_on_a_backbone_are_refused_before_the_run(
    methods, words, tmp_path, capsys
):
    data = write_sets(tmp_path / "data", names=("dots",))
    command = ["bench", "run", "--data", str(data), "--methods", methods, "--workers", "0"]
    assert main([*command, "-o", str(tmp_path / "run")]) == 2
    answer = capsys.readouterr()
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_refused_run_on_bundled_images_leaves_no_folder_behind(tmp_path, capsys):
    command = ["bench", "run", "--sets", "digits", "--methods", "tsa", "--workers", "0"]
    assert main([*command, "-o", str(tmp_path / "run")]) == 2
    assert "'tsa' cannot run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine" / "images").mkdir(parents=True)
    assert main([*command, "-o", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine" / "images").is_dir()


def test_too_many_blocks_are_refused_before_the_run(tmp_path, capsys):
    data = write_sets(tmp_path / "data", names=("dots",))
    config = tmp_path / "my.toml"
    config.write_text('methods = [{ name = "deep", method = "miv", params = { last_blocks = 9 } }]')
    command = ["bench", "run", str(config), "--data", str(data), "--workers", "0"]
    assert main([*command, "-o", str(tmp_path / "run")]) == 2
    assert "uses the last 9 blocks, and the backbone has only 4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_at_once_leaves_no_folder(tmp_path, capsys):
    data = write_sets(tmp_path / "data", names=("dots",))
    command = ["bench", "run", "--data", str(data), "--sets", "gone", "--workers", "0"]
    assert main([*command, "--methods", "ncc", "-o", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err
    assert not (tmp_path / "run").exists()
