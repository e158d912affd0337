"""The entry point: help, imports, exit codes, Ctrl-C, pipes, errors."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import mivhead
from mivhead.cli import main, options
from tests.helpers.commands import list_commands

LIBRARIES = ("torch", "numpy", "PIL", "sklearn", "scipy", "matplotlib", "timm", "safetensors")
HEAVY = {"matplotlib", "onnx", "pandas", "scipy", "sklearn", "timm", "torch", "torchvision"}
RUN = "import sys; from mivhead.cli.main import main; sys.exit(main())"


def subprocess_miv(*arguments, script=RUN, **settings):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    settings = {"capture_output": True, "text": True, "timeout": 120} | settings
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, env=environment, check=False, **settings)


COMMANDS = list_commands()


def test_there_are_few_options():
    own = {
        name: [p for p in c.params if isinstance(p, click.Option)] for name, c in COMMANDS.items()
    }
    assert len(own["miv fit"]) <= 16
    assert sum(map(len, own.values())) + len(main.GENERAL.params) <= 145
    assert {"miv fit", "miv rename", "miv backbones list"} <= set(own)


def test_every_command_has_help_with_examples(miv):
    for name in COMMANDS:
        answer = miv(*name.split()[1:], "--help")
        assert answer.code == 0
        assert answer.out.startswith(f"Usage: {name} ")
        assert f"  {name}" in answer.out.partition("\nExamples:\n")[2]
        assert max(map(len, answer.out.splitlines())) <= 100, name


def test_the_overview_lists_all_commands(miv):
    answer = miv()
    assert answer.code == 2
    everyday, _, rest = answer.out.partition("\nThe rest:\n")
    assert "\n  fit " in everyday
    for name in (*COMMANDS, "miv bench"):
        assert f"\n  {name.split()[1]} " in everyday + rest


def test_help_imports_no_library():
    assert not imported("fit", "--help") & set(LIBRARIES)
    assert not imported("backbones", "list") & {*HEAVY, "PIL", "numpy", "onnxruntime"}


def test_as_a_module():
    command = [sys.executable, "-m", "mivhead", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"mivhead {mivhead.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "'fly'"),
        (["evalute"], "'evaluate'?"),
        (["fit"], "SHOTS"),
        (["fit", "shots", "--seed", "-1"], "--seed"),
        (["predict", "x.miv", "a.png", "--topp=3"], "'--top'"),
        (["predict", "x.miv", "a.png", "--reject", "500"], "percentage"),
        (["predict", "x.miv", "a.png", "--prior", "a=much"], "--prior"),
        (["predict", "x.miv", "a.png", "--threads", "0"], "--threads"),
        (["predict", "x.miv", "a.png", "--device", "abacus"], "abacus"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, words, fails):
    error = fails(*arguments)
    assert words in error
    assert "--help`" in error


def test_options_of_all_commands_may_stand_anywhere(miv, features):
    expected = json.loads(miv("info", features, "--json").out)
    assert json.loads(miv("--json", "info", features).out) == expected
    assert miv("info", "--", features, "--json").code == 2  # what follows -- is no option


def test_other_packages_add_commands(miv, monkeypatch):
    class Entry:
        @staticmethod
        def load():
            return lambda arguments: len(arguments)

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Entry])
    assert miv("fly", "--json", "--help").code == 2


def test_debug_shows_the_traceback(miv):
    plain, debug = miv("info", "no-such.miv"), miv("info", "no-such.miv", "--debug")
    assert plain.err == "miv: error: no-such.miv does not exist.\n"
    assert debug.err.startswith("Traceback")
    assert debug.err.endswith(plain.err)
    assert (plain.code, debug.code) == (2, 2)


def test_a_bug_is_reported_in_one_sentence_too(miv, monkeypatch):
    def buggy(path):
        raise KeyError("oops\nand a second line")

    monkeypatch.setattr(options, "kind_of", buggy)
    answer = miv("info", "x.miv")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "KeyError" in answer.err
    assert "--debug" in answer.err


INTERRUPTED = """
import os, signal, sys
from mivhead.cli.main import main
from mivhead.fewshot import FewShotClassifier
def interrupted(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGINT)
FewShotClassifier.fit = interrupted
sys.exit(main())
"""


def test_ctrl_c_stops_cleanly(shots, tmp_path):
    done = subprocess_miv("fit", shots, "-o", tmp_path / "m.miv", script=INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "miv: stopped\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals are for Unix")
def test_ctrl_c_while_importing(tmp_path):
    """Here the interrupt comes with the first import of the command."""
    (tmp_path / "interrupting.py").write_text("import os, signal; os.kill(os.getpid(), 2)")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import mivhead.__main__ as entry, mivhead.cli.main as cli\n"
        "cli.main = lambda: __import__('interrupting') and 0\n"
        "entry.command()"
    )
    done = subprocess_miv(script=script)
    assert (done.returncode, done.stderr) == (130, "miv: stopped\n")


def test_an_interrupt_that_got_lost_still_counts(capfd, monkeypatch):
    """Python discards an exception in a callback from C, such as a finaliser."""
    from mivhead import __main__ as entry

    before = signal.getsignal(signal.SIGINT)

    def lose(*_):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
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
    answer = miv("fit", features, "-o", output, "--recipe", "experts")
    assert answer == (130, "", "miv: stopped\n")
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_bytes() == model.read_bytes()


def test_a_broken_pipe_is_silent():
    read, write = os.pipe()
    os.close(read)
    done = subprocess_miv("--help", stdout=write, stderr=subprocess.PIPE, capture_output=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written():
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess_miv("--help", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 2
    assert done.stderr == "miv: error: Output: No space left on device.\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
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
    names = imported("fit", shots, "-o", model, "--no-check", "--quiet")
    assert names & HEAVY <= {"onnx"}  # which writes the graph of the default backbone, once
    entries = [path for path in (tmp_path / "cache").glob("??/*") if path.is_file()]
    assert len(entries) > 9  # images and views passed the backbone
    assert not imported("predict", model, *sorted(shots.rglob("*.png"))[:2]) & HEAVY
