"""Files that are written atomically, by processes that may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
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


@FORK
def test_a_kill_at_any_moment_leaves_a_whole_file(start, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = start(write_forever)
        for _ in range(rng.integers(1, 200)):
            (tmp_path / "model.miv").exists()  # some time passes
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        content = (tmp_path / "model.miv").read_bytes()
        assert len(content) == 200_000
        assert content[:4] * 50_000 == content


def test_what_a_killed_writer_left_long_ago_is_removed(tmp_path: Path) -> None:
    old, recent, foreign = (tmp_path / n for n in (".01234567.part.miv", ".89abcdef.part", ".part"))
    for path in (old, recent, foreign):
        path.write_text("half")
    os.utime(old, (0, 0))
    os.utime(foreign, (0, 0))
    write_text(tmp_path / "model.miv", "whole")
    assert not old.exists()
    assert recent.exists()
    assert foreign.exists()


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
