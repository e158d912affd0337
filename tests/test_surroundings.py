"""What the computer around a command does to it: another user's files, full memory, a clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from mivhead.cli.main import main
from mivhead.extraction.cache import FeatureCache
from tests.helpers.patterns import write_images
from tests.test_no_network import ROOT

NOBODY = 65534
GOLDEN = Path(__file__).parent / "golden"
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


def miv_as_nobody(*arguments: object) -> tuple[int, str]:
    """Run `miv` as a user who owns nothing; return its code and what it says on stderr.

    In a fork, because another user may not be allowed to start this Python: it has imported all
    that the command needs.
    """
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            code = 70
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(errors.fileno(), 2)
                sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                code = main([*map(str, arguments)])
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        text = errors.read()
    assert "Traceback" not in text
    assert "this is a bug" not in text, text
    return code, text


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that everyone can write to, like /tmp, with shots and a model of root's."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o1777)
    write_images(place / "shots")
    shutil.copy(GOLDEN / "model-0.2.0.miv", place / "root.miv")
    return place


@as_root
def test_files_of_another_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = place / "private"
    private.mkdir(mode=0o700)
    before = (place / "root.miv").read_bytes()
    monkeypatch.chdir(place)
    fit = ("fit", "shots", "--method", "ncc", "--no-check", "-o")
    assert main([*fit, str(private / "warm.miv")]) == 0  # imports what the fork needs
    assert main(["info", str(private / "warm.miv")]) == 0
    assert main(["info", str(private / "none.miv")]) == 2
    assert main(["rename", str(private / "warm.miv"), "rings", "circles"]) == 0
    shutil.rmtree(private)
    private.mkdir(mode=0o700)
    shutil.copy(place / "root.miv", private / "m.miv")
    for name in ("ascii", "latin_1", "idna"):
        import_module(f"encodings.{name}")
    monkeypatch.setenv("MIV_CACHE", str(private))
    code, error = miv_as_nobody(*fit, "mine.miv")
    assert code == 0, error  # without the cache
    assert [each.name for each in private.iterdir()] == ["m.miv"]
    monkeypatch.setenv("MIV_CACHE", "off")
    for arguments in (
        ("info", private / "m.miv"),
        (*fit, private / "new.miv"),
        (*fit, place / "root.miv"),  # a sticky folder: only root may replace it
        ("rename", place / "root.miv", "red", "rot"),
    ):
        code, error = miv_as_nobody(*arguments)
        assert code == 2, (arguments, error)
        assert error.count("\n") == 1, error
    assert (place / "root.miv").read_bytes() == before
    left = {each.name for each in place.iterdir()} - {"root.miv.bak"}  # a copy for the change
    assert left == {"mine.miv", "private", "root.miv", "shots"}


def test_jobs_without_shared_memory(tmp_path: Path) -> None:
    """Locks of worker processes are files in /dev/shm, which may be full."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("fsspec")
    cut = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    full = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    if subprocess.run([*cut, full], capture_output=True, check=False).returncode:
        pytest.skip("this system does not allow another /dev/shm")
    write_images(tmp_path / "new")
    model = GOLDEN / "model-0.2.0.onnx"
    job = f'exec "$0" -m mivhead predict {model} new --out out.csv --workers 2 --json'
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*cut, f"{full}; {job}", sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "this is a bug" not in done.stderr
    if done.returncode == 0:
        assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 9
    else:
        assert done.stderr.count("\n") == 1


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """Entries that seem to come from the future are found, and do not outlive the limit."""
    entry = {"block0.map": np.zeros((50, 50), np.float32)}
    cache = FeatureCache(tmp_path, 200_000)
    keys = [f"{i:064x}" for i in range(100)]
    for key in keys[:10]:
        cache.put(key, entry)
    next_year = time.time() + 86_400 * 365
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (next_year, next_year))
    assert all(cache.get(key) is not None for key in keys[:10])
    for key in keys[10:]:
        FeatureCache(tmp_path, 200_000).put(key, entry)
    assert cache.info().bytes <= 200_000
    assert cache.get(keys[-1]) is not None
