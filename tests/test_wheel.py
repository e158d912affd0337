"""What `make wheel` builds: installed in an empty virtualenv, without a compiler, it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMOKE = """
import mivhead
from importlib.resources import files
assert not mivhead.__file__.startswith({root!r}), mivhead.__file__
assert (files("mivhead.export") / "web_page" / "index.html").is_file()
assert (files("mivhead.engine") / "libkernels.so").is_file() == {kernels}
"""


def build(folder: Path, **environment: str) -> Path:
    """Build a wheel of this tree."""
    for package in ("build", "hatchling", "ziglang"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the tag of wheels with kernels on Linux")
@pytest.mark.parametrize("pure", [False, True], ids=["kernels", "pure"])
def test_a_wheel_in_an_empty_virtualenv(pure: bool, tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", **({"MIVHEAD_PURE": "1"} if pure else {}))
    assert ("py3-none-any" if pure else "manylinux_2_17") in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("libkernels.so") for name in names) != pure
    assert "mivhead/export/web_page/page.js" in names
    if shutil.which("npm"):  # else a warning says that onnxruntime-web is missing
        assert "mivhead/export/runtime/ort-wasm-simd-threaded.wasm" in names
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    lock = ("-c", ROOT / "constraints.txt")
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", *lock, wheel]
    subprocess.run(install, check=True)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("-c", SMOKE.format(root=str(ROOT), kernels=not pure))
    assert done.returncode == 0, done.stderr
    assert run("-m", "mivhead", "--help").returncode == 0
    assert run("-m", "mivhead", "methods").returncode == 0
    assert 'pip install "mivhead[fit]"' in run("-m", "mivhead", "fit", ".", "-o", "x.miv").stderr
