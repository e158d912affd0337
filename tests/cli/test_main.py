"""The entry point: help, imports, exit codes, Ctrl-C, pipes, errors."""

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mivhead
from mivhead.cli import info, main

LIBRARIES = ("torch", "numpy", "PIL", "sklearn", "scipy", "matplotlib", "timm", "safetensors")
HEAVY = {"matplotlib", "onnx", "pandas", "scipy", "sklearn", "timm", "torch", "torchvision"}
RUN = "import sys; from mivhead.cli.main import main; sys.exit(main())"


def subprocess_miv(*arguments, script=RUN, **settings):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    settings = {"capture_output": True, "text": True, "timeout": 120} | settings
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, env=environment, check=False, **settings)


def find_parsers(parser):
    """Yield the parser of every group and of every command, at any depth."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from find_parsers(each)


PARSERS = {parser.prog: parser for parser in find_parsers(main.build_parser())}
COMMANDS = [name for name, parser in PARSERS.items() if parser.get_default("run")]


def test_there_are_groups_and_commands():
    assert {"miv fit", "miv plot tsne", "miv bench run", "miv backbones serve"} <= set(COMMANDS)
    assert {"miv plot", "miv data"} <= set(PARSERS) - set(COMMANDS)


def test_as_a_module():
    command = [sys.executable, "-m", "mivhead"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == main.FAILED  # the code gets through
    assert done.stdout == main.build_parser().format_help()


def test_help_takes_under_300_ms_of_processor_time():
    times = []
    for _ in range(3):  # the best of three: other work on the machine only makes it slower
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess_miv("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert min(times) < 0.3, times


def test_help_imports_nothing_heavy():
    script = f"""
import sys
from mivhead.cli.main import main
try:
    main(["fit", "--help"])
except SystemExit:
    pass
print(*(name for name in {LIBRARIES!r} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess_miv(script=script)
    assert done.stderr.strip() == ""
    assert "usage: miv fit" in done.stdout


@pytest.mark.parametrize("command", ["miv fit", "miv bench", "miv bench run"])
def test_help_is_printed(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([*command.split()[1:], "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == PARSERS[command].format_help()


def test_every_command_and_group_has_help():
    for command, parser in PARSERS.items():
        text = parser.format_help()
        assert text.startswith(f"usage: {command} ")
        assert all(len(line) <= 100 for line in text.splitlines()), command


def test_every_command_has_examples_and_the_shared_options():
    for command in COMMANDS:
        text = PARSERS[command].format_help()
        assert f"  {command}" in text.partition("\nexamples:\n")[2]
        for option in ("--threads", "--quiet", "--debug", "--json"):
            assert f"\n  {option}" in text, command


def test_every_option_with_a_default_shows_it():
    for command in COMMANDS:
        text = " ".join(PARSERS[command].format_help().split())
        for action in PARSERS[command].parameters:
            value = action.default
            if action.option_strings and value not in (None, [], False, argparse.SUPPRESS):
                described = text.partition(f" {action.option_strings[-1]} ")[2]
                assert f"(default: {value})" in described, command


def test_the_overview_lists_all_commands(capsys):
    assert main.main([]) == 2
    overview = capsys.readouterr().out
    for name in PARSERS:
        assert name.count(" ") > 1 or f"\n    {name.removeprefix('miv ')}" in overview


def test_version(capsys):
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"mivhead {mivhead.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "invalid choice: 'fly'; choose from fit, "),
        (["evalute"], "did you mean 'evaluate'?"),
        (["plot", "tnse"], "did you mean 'tsne'?"),
        (["fit", "shots"], "required: -o/--output"),
        (["fit", "shots", "-o", "x.miv", "--seed", "-1"], "'-1' is not an integer of at least 0"),
        (["predict", "x.miv", "a.png", "--top", "0"], "'0' is not an integer of at least 1"),
        (["predict", "x.miv", "a.png", "--csv", "--json"], "not allowed with argument"),
        (["predict", "x.miv", "a.png", "--to", "3"], "unrecognized arguments: --to 3"),
        (["predict", "x.miv", "a.png", "--topp=3"], "--topp=3; did you mean '--top'?"),
        (["fit", "x", "-o", "y", "--fold", "3"], "did you mean '--folds'? See `miv fit --help`."),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("miv: error: ")
    assert words in error
    assert "--help`" in error
    assert error.count("\n") == 1


def test_debug_shows_the_traceback(miv):
    plain, debug = miv("info", "no-such.miv"), miv("info", "no-such.miv", "--debug")
    assert plain.err == "miv: error: no-such.miv does not exist.\n"
    assert debug.err.startswith("Traceback")
    assert debug.err.endswith(plain.err)
    assert (plain.code, debug.code) == (2, 2)


def test_a_bug_is_reported_in_one_sentence_too(miv, monkeypatch):
    def buggy(path):
        raise KeyError("oops\nand a second line")

    monkeypatch.setattr(info, "_model_facts", buggy)
    answer = miv("info", "x.miv")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "KeyError" in answer.err
    assert "--debug" in answer.err


def test_an_unusable_device(fails, shots, tmp_path):
    for device in ("abacus", "meta2", "cuda:77"):
        error = fails("fit", shots, "-o", tmp_path / "m.miv", "--device", device)
        assert repr(device) in error


INTERRUPTED = """
import os, signal, sys
import mivhead.model.readers
from mivhead.cli.main import main
def interrupted(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGINT)
mivhead.model.readers.extract_table = interrupted
sys.exit(main())
"""


def test_ctrl_c_stops_cleanly(shots, tmp_path):
    done = subprocess_miv("fit", shots, "-o", tmp_path / "m.miv", script=INTERRUPTED)
    assert done.returncode == 130
    assert done.stderr == "miv: stopped\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def interrupt(seconds: float, *arguments: str) -> tuple[int, str]:
    """Start `miv`, interrupt it after a while, and return its exit code and what it said."""
    code = "import sys; from mivhead.__main__ import command; print(flush=True); command()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()  # Python itself has started
        time.sleep(0.02 + seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors


@pytest.mark.skipif(sys.platform == "win32", reason="signals are for Unix")
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6])
def test_ctrl_c_while_importing(seconds, model, features):
    code, errors = interrupt(seconds, "predict", "--quiet", str(model), str(features))
    assert (code, errors) in [(130, "miv: stopped\n"), (0, "")]  # or it was finished


def test_an_interrupt_that_got_lost_still_counts(capfd, monkeypatch):
    """Python discards an exception in a callback from C, such as a finaliser."""
    from mivhead import __main__ as entry

    before = signal.getsignal(signal.SIGINT)

    def lose(*_):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return 0

    monkeypatch.setattr(main, "main", lose)
    try:
        with pytest.raises(SystemExit) as exit_:
            entry.command()
    finally:
        signal.signal(signal.SIGINT, before)
    assert exit_.value.code == 130
    assert capfd.readouterr().err == "miv: stopped\n"


def test_ctrl_c_while_saving_leaves_the_old_model(miv, features, model, tmp_path, monkeypatch):
    def interrupted(tensors, path, metadata):
        Path(path).write_bytes(b"half a model")
        os.kill(os.getpid(), signal.SIGINT)

    output = tmp_path / "m.miv"
    output.write_bytes(model.read_bytes())
    monkeypatch.setattr("safetensors.numpy.save_file", interrupted)
    answer = miv("fit", features, "-o", output, "--method", "ncc")
    assert answer == (130, "", "miv: stopped\n")
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_bytes() == model.read_bytes()


def test_a_broken_pipe_is_silent():
    read, write = os.pipe()
    os.close(read)
    done = subprocess_miv("--help", stdout=write, stderr=subprocess.PIPE, capture_output=False)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written():
    with Path("/dev/full").open("w") as full:
        done = subprocess_miv("--help", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 2
    assert done.stderr == "miv: error: Output: No space left on device.\n"


@pytest.mark.parametrize("form", [[], ["--csv"], ["--json"]])
def test_names_that_the_terminal_cannot_show(form, model, new, tmp_path, monkeypatch):
    target = tmp_path / "猫 \N{GRINNING FACE}.png"
    target.write_bytes((new / "rings" / "5.png").read_bytes())
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    assert main.main(["predict", str(model), str(target), *form]) == 0
    printed = stdout.buffer.getvalue().decode("ascii")
    if form == ["--json"]:
        assert json.loads(printed)["predictions"][0]["file"] == target.as_posix()
    else:
        assert "\\u732b" in printed


TRACED = """
import json, sys
from mivhead.cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def imported(*arguments):
    """Run a command, which must succeed, and return the modules it imported."""
    done = subprocess_miv(*arguments, script=TRACED)
    code, names = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(names)


def test_fit_and_predict_import_nothing_heavy(shots, tmp_path, monkeypatch):
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.miv"
    # Views are made and pass the backbone; few steps, because training imports nothing itself.
    few = ("--threshold", "3", "--param", "steps=1", "--no-check", "--quiet")
    found = imported("fit", shots, "-o", model, *few)
    entries = [path for path in (tmp_path / "cache").glob("??/*") if path.is_file()]
    assert len(entries) == 9 + 9  # images and views passed the backbone
    assert not found & HEAVY
    assert not imported("predict", model, *sorted(shots.rglob("*.png"))[:2]) & HEAVY


def test_lists_import_no_library():
    for command in (["methods"], ["backbones", "list"]):
        assert not imported(*command) & {*HEAVY, "PIL", "numpy", "onnxruntime"}


def test_a_long_list_in_an_option_is_not_a_file(fails, tmp_path):
    prior = ",".join(f"class-{number}=1" for number in range(50))  # longer than any file name
    assert "no.miv does not exist" in fails("predict", tmp_path / "no.miv", "x", f"--prior={prior}")
