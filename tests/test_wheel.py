"""What `make wheel` builds: installed in an empty virtualenv, without a compiler, it works."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "src" / "mivhead" / "head"
SMOKE = """
import mivhead
from importlib.resources import files
assert not mivhead.__file__.startswith({root!r}), mivhead.__file__
assert (files("mivhead._util") / "palette.css").is_file()
assert (files("mivhead.head") / "libkernels.so").is_file() == {kernels}
"""


def build(folder: Path, **environment: str) -> Path:
    """Build a wheel of this tree."""
    for package in ("build", "hatchling", "ziglang"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.parametrize(
    ("system", "start"),
    [
        ("linux-aarch64", b"\x7fELF"),
        ("darwin-aarch64", b"\xcf\xfa\xed\xfe"),
        ("windows-x86_64", b"MZ"),
    ],
)
def test_kernels_are_compiled_for_other_systems(system: str, start: bytes, tmp_path: Path) -> None:
    for package in ("hatchling", "ziglang"):
        pytest.importorskip(package)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    library = tmp_path / "libkernels.so"
    assert hook["compile_kernels"](hook["TARGETS"][system], ENGINE, library)
    compiled = library.read_bytes()
    assert compiled.startswith(start)
    sources = "".join(path.read_text() for path in ENGINE.glob("*.c"))
    for name in re.findall(r"^EXPORT void (\w+)", sources, re.MULTILINE):
        assert name.encode() + b"\0" in compiled


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the tag of wheels with kernels on Linux")
@pytest.mark.parametrize("pure", [False, True], ids=["kernels", "pure"])
def test_a_wheel_in_an_empty_virtualenv(pure: bool, tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", **({"MIVHEAD_TARGET": "any"} if pure else {}))
    assert ("py3-none-any" if pure else "manylinux_2_17") in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("libkernels.so") for name in names) != pure
    assert "mivhead/export/web_page/page.js" in names
    (listed,) = (name for name in names if name.endswith(".dist-info/sboms/mivhead.cdx.json"))
    parts = json.loads(zipfile.ZipFile(wheel).read(listed))["components"]
    assert {"htm", "preact", "numpy", "onnxruntime"} <= {part["name"] for part in parts}
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
    assert run("-m", "mivhead", "backbones", "list").returncode == 0
    assert run("-m", "mivhead", "fit", ".", "-o", "x.miv").returncode == 2
