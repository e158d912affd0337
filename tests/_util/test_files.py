"""Files that are written atomically, by processes that may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mivhead._util.files import replacing, write_text
from mivhead.errors import NotAvailableError

FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are for systems with signals")


def write_forever(path: str, ready: multiprocessing.synchronize.Event) -> None:
    number = 0
    while True:
        with replacing(path) as part:
            part.write_bytes(number.to_bytes(4, "big") * 50_000)
            ready.set()
        number += 1


def hold(path: str, ready: multiprocessing.synchronize.Event) -> None:
    with replacing(path) as part:
        part.write_text("half")
        ready.set()
        time.sleep(60)


@pytest.fixture
def start(tmp_path: Path):
    """Start a writer of `tmp_path / "model.miv"` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    processes = []

    def run(target):
        ready = context.Event()
        process = context.Process(target=target, args=(str(tmp_path / "model.miv"), ready))
        processes.append(process)
        process.start()
        assert ready.wait(30)
        return process

    yield run
    for process in processes:
        process.kill()
        process.join()


def left(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith(".part")]


@FORK
def test_what_a_killed_writer_leaves_is_removed_by_the_next(start, tmp_path: Path) -> None:
    for _ in range(2):
        process = start(hold)
        process.kill()
        process.join()
    assert left(tmp_path)
    write_text(tmp_path / "other.miv", "of another file")
    assert left(tmp_path)
    write_text(tmp_path / "model.miv", "whole")
    assert not left(tmp_path)
    assert (tmp_path / "model.miv").read_text() == "whole"


@FORK
def test_a_living_writer_is_left_alone(start, tmp_path: Path) -> None:
    start(hold)
    write_text(tmp_path / "model.miv", "whole")
    (part,) = left(tmp_path)
    assert (part / "model.miv").read_text() == "half"


@FORK
def test_a_kill_at_any_moment_leaves_a_whole_file(start, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = start(write_forever)
        time.sleep(rng.random() / 10)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        content = (tmp_path / "model.miv").read_bytes()
        assert len(content) == 200_000
        assert content[:4] * 50_000 == content
    write_text(tmp_path / "model.miv", "whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "model.miv"]


def test_leftovers_of_version_0_1_0_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".model.miv.0123456789ab.part").write_text("half")
    (tmp_path / ".model.miv.mine.part").write_text("not ours")
    write_text(tmp_path / "model.miv", "whole")
    assert [path.name for path in left(tmp_path)] == [".model.miv.mine.part"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """Each must find its own temporary folder, whatever the others take for abandoned."""
    failures = []

    def write(number: int) -> None:
        try:
            for _ in range(25):
                write_text(tmp_path / "model.miv", f"{number}" * 1000)
        except NotAvailableError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(set((tmp_path / "model.miv").read_text())) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "model.miv"]
