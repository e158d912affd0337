"""Results on disk: kept whatever happens, by one process at a time."""

import errno
import json
import os
import shutil
import signal
import subprocess

import pytest

from mivhead._util.schema import to_json
from mivhead.errors import InputError, NotAvailableError
from mivhead_bench.benchmark import results
from mivhead_bench.benchmark.clock import Seconds
from mivhead_bench.benchmark.results import (
    RESULTS,
    RunFolder,
    read_origin,
    read_results,
    read_run_config,
    read_weights,
)
from tests.helpers.bench_data import config, result


def test_written_at_once_and_read_back(tmp_path):
    first, second = result(), result(task=1, accuracy=None, error="memory: too little")
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([first, second])
        assert read_results(tmp_path) == [first, second]  # before it is closed
        assert run_folder.is_done(first.key)
        assert not run_folder.is_done(second.key)  # an error is tried again
    assert read_run_config(tmp_path) == config()


def test_a_later_success_replaces_an_error_and_never_the_reverse(tmp_path):
    failed, right = result(accuracy=None, error="memory: x"), result()
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([failed])
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([right])
        run_folder.add([failed])
    assert read_results(tmp_path) == [right]


@pytest.mark.parametrize("cut", [1, 17, 100])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([result(task=i) for i in range(3)])
    path = tmp_path / RESULTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [r.task for r in read_results(tmp_path)] == [0, 1]
    with RunFolder(tmp_path, config()) as run_folder:
        assert len(run_folder.results) == 2
        run_folder.add([result(task=2)])
    assert path.read_bytes() == whole


def test_corruption_in_the_middle_is_an_error(tmp_path):
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([result(task=i) for i in range(3)])
    path = tmp_path / RESULTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{oops\n" + lines[2])
    with pytest.raises(InputError, match="line 2"):
        read_results(tmp_path)


@pytest.mark.parametrize("change", [{"accuracy": 1e308}, {"shots": 2**80}, {"peak_bytes": -1}])
def test_numbers_that_no_run_gives_are_refused(tmp_path, change):
    (tmp_path / RESULTS).write_text(json.dumps(to_json(result()) | change) + "\n")
    with pytest.raises(InputError, match="line 1"):
        read_results(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_second_run_is_refused_and_a_dead_one_forgotten(tmp_path):
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            with RunFolder(tmp_path, config()):
                os.write(writer, b"locked")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 6) == b"locked"
        refused = pytest.raises(NotAvailableError, match=rf"process {holder}\)")
        with refused, RunFolder(tmp_path, config()):
            pass
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reader)
    with RunFolder(tmp_path, config()) as run_folder:
        assert run_folder.results == {}


def test_other_configurations_tasks_and_folders_are_refused(tmp_path):
    with RunFolder(tmp_path / "run", config()) as run_folder:
        run_folder.add([result()])
        run_folder.check_tasks("dots", "varying", "f" * 64)
        run_folder.check_tasks("dots", "5-way 1-shot", "0" * 64)  # no results of it yet
        with pytest.raises(InputError, match="other tasks of dots"):
            run_folder.check_tasks("dots", "varying", "0" * 64)
        name = result().backbone
        run_folder.check_weights(name, "a" * 64)  # an earlier version did not record them
        run_folder.check_weights("new", "b" * 64)
        run_folder.check_weights("new", "c" * 64)  # no results of it yet
        with pytest.raises(InputError, match=f"other weights of {name}"):
            run_folder.check_weights(name, "b" * 64)
    assert read_weights(tmp_path / "run") == {name: "a" * 64, "new": "c" * 64}
    (tmp_path / "run" / "weights.json").write_text('{"tiny": "no hash"}')
    assert read_weights(tmp_path / "run") == {}
    with (
        pytest.raises(InputError, match="seed is 0 there and 1 here"),
        RunFolder(tmp_path / "run", config(seed=1)),
    ):
        pass
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").touch()
    with (
        pytest.raises(InputError, match="something other"),
        RunFolder(tmp_path / "photos", config()),
    ):
        pass


def test_after_a_full_disk_the_run_resumes(tmp_path, monkeypatch):
    write = os.write

    def full(handle, data):
        write(handle, data[:50])  # some of it still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([result()])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(NotAvailableError, match="No space left on device"):
                run_folder.add([result(task=1)])
        assert len(run_folder.results) == 1
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.add([result(task=1)])
    assert [r.task for r in read_results(tmp_path)] == [0, 1]


def test_seconds_of_backbones_are_kept_and_a_corrupted_file_is_ignored(tmp_path):
    with RunFolder(tmp_path, config()) as run_folder:
        run_folder.set_seconds("tiny", Seconds(0.5, 0.7))
    with RunFolder(tmp_path, config()) as run_folder:
        assert run_folder.seconds == {"tiny": Seconds(0.5, 0.7)}
    for content in ("[1", '{"tiny": 0.5}'):  # cut off, or from a version with one clock
        (tmp_path / "seconds.json").write_text(content)
        with RunFolder(tmp_path, config()) as run_folder:
            assert run_folder.seconds == {}


def test_a_run_records_how_it_was_made(tmp_path, monkeypatch):
    assert read_origin(tmp_path) == {}
    monkeypatch.setattr("sys.argv", ["/bin/miv", "bench", "run", "http://me:word@host/?key=1"])
    for _ in range(2):
        with RunFolder(tmp_path / "run", config()):
            pass
    origin = read_origin(tmp_path / "run")
    assert origin["command"].startswith("miv bench run ")
    assert "word" not in origin["command"]
    assert "key=1" not in origin["command"]
    assert origin["version"].startswith("mivhead ")
    assert origin["resumed"].startswith("1 times, last ")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_package_and_of_no_other_repository(tmp_path, monkeypatch):
    def git(*what):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *what], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode()

    for folder in ("package", "venv"):
        (tmp_path / folder).mkdir()
    (tmp_path / "package" / "code.py").write_text("")
    git("init")
    git("add", "package")
    git("commit", "-m", "first")
    for folder, expected in (("package", git("rev-parse", "HEAD")[:7]), ("venv", "")):
        monkeypatch.setattr(results, "__file__", str(tmp_path / folder / "code.py"))
        assert results.describe_process()["commit"] == expected
