"""All cases of the campaign, and those that need a fresh interpreter, threads or much memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import mivhead
from mivhead import MIVClassifier
from mivhead.head.recipe import Recipe
from tests.chaos import damage, kills, network, strangers
from tests.chaos.campaign import Case, Trial
from tests.chaos.damage import small_features


@contextmanager
def ctrl_c(folder: Path) -> Iterator[Trial]:
    """Interrupts of `miv predict` at random moments, most of which are imports."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    X, y = small_features()
    mivhead.save(MIVClassifier(random_state=0).fit(X, y), folder / "model.miv")
    X.save(folder / "new.safetensors")
    code = "from mivhead.__main__ import command; print('started', flush=True); command()"
    command = [sys.executable, "-c", code, "predict", "model.miv", "new.safetensors", "--quiet"]

    def start() -> subprocess.Popen[bytes]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=folder, **pipes)  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        return process  # type: ignore[no-any-return]

    began = time.monotonic()
    start().communicate()
    longest = time.monotonic() - began

    def trial(rng: np.random.Generator) -> str:
        with start() as process:
            time.sleep(0.02 + rng.uniform(0, longest))  # the handler is installed by then
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        if process.returncode == 0:
            assert errors == b"", errors
            return "finished"
        assert (process.returncode, errors) == (130, b"miv: stopped\n"), (
            process.returncode,
            errors,
        )
        return "stopped"

    yield trial


@contextmanager
def threads(_folder: Path) -> Iterator[Trial]:
    """Predictions of one model in several threads are those of one thread."""
    X, y = small_features()
    model = MIVClassifier(random_state=0).fit(X, y)
    expected = model.predict_proba(X)

    def trial(_rng: np.random.Generator) -> str:
        found: list[np.ndarray] = []

        def work() -> None:
            found.extend(model.predict_proba(X) for _ in range(5))

        running = [threading.Thread(target=work) for _ in range(4)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert len(found) == 20
        assert all(np.array_equal(each, expected) for each in found)
        return "same"

    yield trial


SPAWNED = """
import sys, numpy, mivhead
from mivhead import Features
found = mivhead.load(sys.argv[1]).predict_proba(Features.load(sys.argv[2]))
numpy.save(sys.argv[3], found)
"""


@contextmanager
def spawn(folder: Path) -> Iterator[Trial]:
    """A fresh process predicts the same from the file."""
    X, y = small_features()
    model = MIVClassifier(random_state=0).fit(X, y)
    mivhead.save(model, folder / "model.miv")
    X.save(folder / "new.safetensors")
    expected = model.predict_proba(X)

    def trial(_rng: np.random.Generator) -> str:
        command = [sys.executable, "-c", SPAWNED, "model.miv", "new.safetensors", "out.npy"]
        subprocess.run(command, cwd=folder, check=True, timeout=120)
        assert np.array_equal(np.load(folder / "out.npy"), expected)
        return "same"

    yield trial


@contextmanager
def memory(_folder: Path) -> Iterator[Trial]:
    """The memory after 2,000 fits and 20,000 predictions is that after a tenth of them.

    One trial is a tenth; the first one is the reference. A child does the work, so that other cases
    do not disturb the measurement. Few steps of training do all that many do, in less time.
    """
    X, y = small_features()
    ours, theirs = os.pipe()
    back, answers = os.pipe()

    def work() -> None:
        signal.alarm(0)
        while os.read(ours, 1):
            for seed in range(200):
                model = MIVClassifier(Recipe(steps=2), random_state=seed).fit(X, y)
                for _ in range(10):
                    model.predict_proba(X)
            status = Path("/proc/self/status").read_text()
            os.write(answers, status.partition("VmRSS:")[2].split()[0].encode() + b"\n")

    child = kills.fork(work)
    first = 0

    def trial(_rng: np.random.Generator) -> str:
        nonlocal first
        os.write(theirs, b"x")
        now = int(os.read(back, 100))
        first = first or now
        assert now < 1.02 * first, f"memory grew from {first:,} to {now:,} kB"
        return f"{now // 1024} MB"

    try:
        yield trial
    finally:
        os.kill(child, signal.SIGKILL)
        kills.wait(child)


# Cases that fork come first, before servers run in threads of this process.
CASES = (
    Case("kills while saving", kills.saving, 2, goal=1200),
    Case("kills while fitting", kills.fitting, 5, goal=250),
    Case("kills while adding", kills.adding, 5, goal=250),
    Case("kills while caching", kills.caching, 3, goal=400),
    Case("kills while extracting", kills.extracting, 3, goal=250),
    Case("kills while exporting", kills.exporting, 3, goal=200),
    Case("kills while benchmarking", kills.benchmarking, 5, goal=150),
    Case("kills of the command line", kills.command_line, 6, goal=60),
    Case("kills of the service", network.killed_service, 3, goal=150),
    Case("kills of the app", network.killed_app, 3, goal=150),
    Case("damaged exported models", kills.exported_models, 1, goal=500, on_disk=False),
    Case("full disk", kills.full_disk, 1, goal=2000),
    Case("three processes at once", kills.two_processes, 1, goal=100),
    Case("fork with one thread", kills.fork_in_one_thread, 0.5, goal=500),
    Case("memory of fits and predictions", memory, 8, goal=10),
    Case("Ctrl-C", ctrl_c, 5, goal=200),
    Case("spawned processes", spawn, 1, goal=50),
    Case("hostile clients", network.clients, 8, goal=50_000),
    Case("hostile changes", network.changes, 2, goal=2_000, on_disk=False),
    Case("overload of the service", network.overload, 40, goal=1800),
    Case("hostile servers", network.servers, 8, goal=50_000),
    Case("threads", threads, 0.5, goal=500),
    Case("forged model files", damage.forged_models, 2, goal=20_000, on_disk=False),
    Case("damaged images", damage.images, 6, goal=100_000, on_disk=False),
    Case("damaged zips", damage.archives, 1, goal=5_000, on_disk=False),
    Case("damaged tables", damage.tables, 1, goal=5_000, on_disk=False),
    Case("damaged features files", damage.features_files, 1, goal=20_000, on_disk=False),
    Case("damaged cache entries", damage.cache_entries, 1, goal=20_000, on_disk=False),
    Case("damaged journals", damage.journals, 1, goal=5_000, on_disk=False),
    Case("folders with links", damage.folders, 0.5, goal=2_000),
    Case("strangers' projects", strangers.projects, 2, goal=5_000, on_disk=False),
    Case("strangers' results", strangers.results, 2, goal=2_000, on_disk=False),
    Case("strangers' names in models", strangers.names, 1, goal=10_000, on_disk=False),
    Case("strangers' ONNX graphs", strangers.graphs, 2, goal=5_000, on_disk=False),
    Case("strangers' documents", strangers.documents, 1, goal=20_000, on_disk=False),
    Case("strangers' scans", strangers.scans, 1, goal=2_000, on_disk=False),
    Case("extreme numbers", damage.extreme_numbers, 1, goal=1_000),
    Case("damaged model files", damage.model_files, 14, goal=1_000_000, on_disk=False),
)
