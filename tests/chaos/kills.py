"""Kills at random moments, full disks and several processes at once: nothing is lost or half done.

Children are forked from this process, which has imported everything, so that a kill costs
milliseconds; they compute in one thread, because PyTorch's threads do not survive a fork.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import mivhead
from mivhead import FewShotClassifier, MIVClassifier
from mivhead.benchmark.results import read_results
from mivhead.benchmark.runner import Place, run
from mivhead.errors import MivError
from mivhead.extraction.cache import FeatureCache
from mivhead.features import FeatureTable
from tests.chaos.campaign import Trial
from tests.chaos.damage import damage, small_features
from tests.conftest import write_images
from tests.helpers.bench_data import config, numbers, write_sets
from tests.helpers.tiny_backbone import TinyBackbone

HANG = 600  # seconds after which a child counts as hanging, also on a busy machine


def fork(work: Callable[[], None]) -> int:
    """Run something in a child; its exit code is 0, 3 after a `MivError`, or 4 after any other."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 4
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(HANG)
        work()
        code = 0
    except MivError:
        code = 3
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Wait for a child, and return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_during(work: Callable[[], None], rng: np.random.Generator, longest: float) -> str:
    """Start something and kill it at a random moment, if it is not finished by then."""
    child = fork(work)
    time.sleep(rng.uniform(0, longest))
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    code = wait(child)
    assert code in (0, -signal.SIGKILL), f"the child exited with {code}"
    return "finished" if code == 0 else "killed"


def duration(work: Callable[[], None], times: int = 1) -> float:
    """Measure how long something takes in a child, at least; with warm caches after the first."""
    seconds = []
    for _ in range(times):
        began = time.monotonic()
        assert wait(fork(work)) == 0
        seconds.append(time.monotonic() - began)
    return min(seconds)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith(".part")]


@contextmanager
def saving(folder: Path) -> Iterator[Trial]:
    """Kills while two models are saved to the same file, in turn."""
    X, y = small_features()
    path = folder / "model.miv"
    models = [MIVClassifier(random_state=seed).fit(X, y) for seed in (0, 1)]
    known = []
    for model in models:
        mivhead.save(model, path)
        known.append(path.read_bytes())

    def work() -> None:
        for model in itertools.cycle(models):
            mivhead.save(model, path)

    def trial(rng: np.random.Generator) -> str:
        outcome = kill_during(work, rng, 0.03)
        assert path.read_bytes() in known
        if rng.random() < 0.1:
            mivhead.save(models[0], path)
            assert not leftovers(folder)
        return outcome

    yield trial


@contextmanager
def fitting(folder: Path) -> Iterator[Trial]:
    """Kills during a fit from a folder of images, with a cache, to a model file."""
    shots = write_images(folder / "shots", 3)
    path, cache = folder / "model.miv", folder / "cache"

    def work() -> None:
        model = FewShotClassifier(TinyBackbone(), recipe="paper", cache=cache, verbose=False)
        model.fit_folder(shots).save(path)

    longest = duration(work, 3)
    queries = sorted(shots.rglob("*.png"))
    expected = mivhead.load(path, backbone=TinyBackbone()).predict_proba(queries)

    def trial(rng: np.random.Generator) -> str:
        path.unlink(missing_ok=True)
        if rng.random() < 0.3:
            shutil.rmtree(cache, ignore_errors=True)
        outcome = kill_during(work, rng, 1.1 * longest)
        if path.exists():
            found = mivhead.load(path, backbone=TinyBackbone()).predict_proba(queries)
            assert np.array_equal(found, expected)
            return f"{outcome}, whole"
        assert outcome == "killed"
        return "killed, none"

    yield trial


@contextmanager
def adding(folder: Path) -> Iterator[Trial]:
    """Kills while a class is added to a model file, in place."""
    shots = write_images(folder / "shots", 3)
    (folder / "more").mkdir()
    (shots / "blue").rename(folder / "more" / "blue")
    path, before = folder / "model.miv", folder / "before.miv"
    model = FewShotClassifier(TinyBackbone(), recipe="paper", cache=False, verbose=False)
    model.fit_folder(shots).save(before)
    shutil.copy(before, path)

    def work() -> None:
        model = mivhead.load(path, backbone=TinyBackbone())
        model.verbose, model.cache = False, False
        model.add(folder / "more")
        model.save(path)

    longest = duration(work)
    queries = sorted(folder.rglob("*.png"))
    expected = mivhead.load(path, backbone=TinyBackbone()).predict_proba(queries)
    assert expected.shape[1] == 3

    def trial(rng: np.random.Generator) -> str:
        shutil.copy(before, path)
        outcome = kill_during(work, rng, 1.1 * longest)
        if path.read_bytes() == before.read_bytes():
            assert outcome == "killed"
            return "killed, as before"
        found = mivhead.load(path, backbone=TinyBackbone()).predict_proba(queries)
        assert np.array_equal(found, expected)
        return f"{outcome}, added"

    yield trial


def entry(key: str) -> dict[str, np.ndarray]:
    """The only right content of a cache entry."""
    rng = np.random.default_rng(int(key[:8], 16))
    return {"block0.map": rng.normal(size=(16, 7, 7)).astype(np.float16)}


KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(200)]


def check_cache(cache: FeatureCache) -> int:
    found = 0
    for key in KEYS:
        parts = cache.get(key)
        if parts is not None:
            found += 1
            assert np.array_equal(parts["block0.map"], entry(key)["block0.map"])
    return found


@contextmanager
def caching(folder: Path) -> Iterator[Trial]:
    """Kills of two processes that write, read and remove the same entries."""
    cache = FeatureCache(folder / "cache", limit=1_500_000)  # old entries are removed all the time

    def work() -> None:
        own = FeatureCache(folder / "cache", limit=1_500_000)
        rng = np.random.default_rng(os.getpid())
        while True:
            key = KEYS[rng.integers(len(KEYS))]
            own.put(key, entry(key)) if rng.random() < 0.7 else own.get(key)

    def trial(rng: np.random.Generator) -> str:
        other = fork(work)
        try:
            outcome = kill_during(work, rng, 0.05)
            check_cache(cache)
        finally:
            os.kill(other, signal.SIGKILL)
            wait(other)
        check_cache(cache)
        return outcome

    yield trial


@contextmanager
def extracting(folder: Path) -> Iterator[Trial]:
    """Kills while features are extracted to a file that exists."""
    shots = write_images(folder / "shots", 3)
    path = folder / "features.safetensors"

    def work() -> None:
        model = FewShotClassifier(TinyBackbone(), cache=folder / "cache", verbose=False)
        from mivhead.images.sources import open_labelled

        model.extract(open_labelled(shots)).save(path)

    longest = duration(work, 3)
    expected = path.read_bytes()

    def trial(rng: np.random.Generator) -> str:
        if rng.random() < 0.5:
            path.unlink(missing_ok=True)
            shutil.rmtree(folder / "cache", ignore_errors=True)
        outcome = kill_during(work, rng, 1.1 * longest)
        if path.exists():
            assert path.read_bytes() == expected
            FeatureTable.load(path)
        return outcome

    yield trial


@contextmanager
def exporting(folder: Path) -> Iterator[Trial]:
    """Kills while a model is exported to ONNX, over an earlier export."""
    from mivhead.export.model import export_model

    X, y = small_features()
    model = MIVClassifier(random_state=0).fit(X, y)
    path = folder / "model.onnx"

    def work() -> None:
        export_model(model, path)

    longest = duration(work, 3)
    expected = mivhead.load(path).predict_proba(X)

    def trial(rng: np.random.Generator) -> str:
        if rng.random() < 0.5:
            path.unlink(missing_ok=True)
        outcome = kill_during(work, rng, 1.1 * longest)
        if path.exists():
            assert np.array_equal(mivhead.load(path).predict_proba(X), expected)
        return outcome

    yield trial


@contextmanager
def exported_models(folder: Path) -> Iterator[Trial]:
    """Damaged ONNX files of exported models, in children: onnxruntime must not crash either."""
    from mivhead.export.model import export_model

    X, y = small_features()
    path = folder / "model.onnx"
    export_model(MIVClassifier(random_state=0).fit(X, y), path)
    content = path.read_bytes()

    def trial(rng: np.random.Generator) -> str:
        damaged = [damage(content, rng) for _ in range(20)]

        def work() -> None:
            for each in damaged:
                path.write_bytes(each)
                with suppress(MivError):
                    assert np.isfinite(mivhead.load(path).predict_proba(X)).all()

        code = wait(fork(work))
        assert code == 0, f"the child exited with {code}"
        return "20 refused or finite"

    yield trial


@contextmanager
def benchmarking(folder: Path) -> Iterator[Trial]:
    """Kills of a benchmark, which resumes each time; finished runs have the same numbers."""
    data = write_sets(folder / "data")

    def work_in(name: str) -> None:
        run(config(), Place(folder / name, data), None, backbones={"tiny": TinyBackbone()})

    longest = duration(lambda: work_in("reference"))
    expected = numbers(read_results(folder / "reference"))

    def trial(rng: np.random.Generator) -> str:
        outcome = kill_during(lambda: work_in("run"), rng, 0.6 * longest)
        results = folder / "run" / "results.jsonl"
        found = numbers(read_results(folder / "run")) if results.exists() else {}
        assert all(expected[key] == value for key, value in found.items())
        if outcome == "finished":
            assert found == expected
            shutil.rmtree(folder / "run")
        return outcome

    yield trial


@contextmanager
def command_line(folder: Path) -> Iterator[Trial]:
    """Kills of `miv fit` and `miv rename` in fresh processes, over a model file that exists."""
    X, y = small_features()
    path, table = folder / "model.miv", folder / "features.safetensors"
    FeatureTable(X, tuple("123456"), tuple(y)).save(table)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    miv = [sys.executable, "-m", "mivhead"]
    commands = [
        [*miv, "fit", table.name, "-o", path.name, "--no-check", "--quiet"],
        [*miv, "rename", path.name, "a", "z", "--quiet"],
    ]

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    results, longest = [], []
    for command in commands:
        began = time.monotonic()
        with start(command) as process:
            _, errors = process.communicate(timeout=HANG)
        assert process.returncode == 0, errors
        longest.append(time.monotonic() - began)
        results.append(mivhead.load(path).predict_proba(X))
        if command is commands[0]:
            before = path.read_bytes()

    def trial(rng: np.random.Generator) -> str:
        path.write_bytes(before)
        number = rng.integers(len(commands))
        with start(commands[number]) as process:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=rng.uniform(0, longest[number]))
            process.kill()
            process.communicate(timeout=HANG)
        assert process.returncode in (0, -signal.SIGKILL), process.returncode
        found = mivhead.load(path)
        renamed = "z" in found.classes_.tolist()
        assert np.array_equal(found.predict_proba(X), results[int(renamed)])
        assert renamed or number == 0 or process.returncode != 0
        return "finished" if process.returncode == 0 else "killed"

    yield trial


@contextmanager
def full_disk(folder: Path) -> Iterator[Trial]:
    """Writes that fail after some bytes: the old file survives, and the error is ours."""
    X, y = small_features()
    model = MIVClassifier(random_state=0).fit(X, y)
    path, features = folder / "model.miv", folder / "features.safetensors"
    mivhead.save(model, path)
    table = FeatureTable(X, tuple("123456"), tuple(y))
    table.save(features)
    before = path.read_bytes(), features.read_bytes()

    def trial(rng: np.random.Generator) -> str:
        room = int(rng.integers(0, 2 * len(before[0])))
        writes = rng.integers(3)

        def work() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            if writes == 0:
                mivhead.save(model, path)
            elif writes == 1:
                table.save(features)
            else:
                FeatureCache(folder / "cache", strict=True).put(KEYS[0], entry(KEYS[0]))

        code = wait(fork(work))
        assert code in (0, 3), f"the child exited with {code}"
        assert (path.read_bytes(), features.read_bytes()) == before
        assert not leftovers(folder)
        cache = FeatureCache(folder / "cache")
        assert (cache.get(KEYS[0]) is not None) == (code == 0) or writes != 2
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return "written" if code == 0 else "refused"

    yield trial


@contextmanager
def two_processes(folder: Path) -> Iterator[Trial]:
    """Several processes write the same model, the same features and the same cache at once."""
    X, y = small_features()
    models = [MIVClassifier(random_state=seed).fit(X, y) for seed in (0, 1, 2)]
    path = folder / "model.miv"
    known = []
    for model in models:
        mivhead.save(model, path)
        known.append(path.read_bytes())

    def work(number: int) -> None:
        cache = FeatureCache(folder / "cache")
        for key in KEYS[:40]:
            mivhead.save(models[number], path)
            cache.put(key, entry(key))
            assert path.read_bytes() in known
            cache.get(key)

    def trial(_rng: np.random.Generator) -> str:
        children = [fork(lambda n=number: work(n)) for number in range(3)]
        codes = [wait(child) for child in children]
        assert codes == [0, 0, 0], codes
        assert path.read_bytes() in known
        assert check_cache(FeatureCache(folder / "cache")) == 40
        assert not leftovers(folder)
        return "agreed"

    yield trial


@contextmanager
def fork_in_one_thread(_folder: Path) -> Iterator[Trial]:
    """A child that is forked after a prediction predicts the same, if PyTorch has one thread."""
    X, y = small_features()
    model = MIVClassifier(random_state=0).fit(X, y)
    expected = model.predict_proba(X)

    def trial(_rng: np.random.Generator) -> str:
        def work() -> None:
            assert np.array_equal(model.predict_proba(X), expected)

        assert wait(fork(work)) == 0
        return "same"

    yield trial
