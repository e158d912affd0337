"""Compiles the kernels (src/mivhead/engine) and fetches onnxruntime-web, when the package is built.

pip installs the compiler (ziglang) for the build, so that no other is needed. Without a compiler,
the package is built without the kernels and runs the formulas of `mivhead.head`, which are slower.

The pages of `miv export --web` contain onnxruntime-web, which npm downloads into the wheel. Without
npm, the package is built without it, and `miv export --web` says how to get it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC", "-s")
# sqrt need not set errno; only functions that are marked as exported are visible.
CODE = ("-fno-math-errno", "-fvisibility=hidden")
# AVX2 and FMA: processors since 2013. `mivhead.engine.library` checks before it loads.
PROCESSORS = {"x86_64": ("-mcpu=x86_64_v3",)}
# The library uses nothing from the system, so that it runs on any Linux.
PURE = "MIVHEAD_PURE"  # environment variable: build a wheel without kernels, for any platform
SYSTEMS = {"Linux": ("-nostdlib",), "Darwin": ()}


class KernelHook(BuildHookInterface):
    """Builds libkernels.so in the folder of its sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add onnxruntime-web; compile the kernels, and mark the wheel as one for this platform."""
        if version != "editable":  # in a clone, `make web-runtime` fetches it
            self._add_web_runtime(build_data)
        system = platform.system()
        if os.environ.get(PURE):
            return
        if system not in SYSTEMS or importlib.util.find_spec("ziglang") is None:
            self.app.display_warning("No compiler: mivhead is built without its fast kernels.")
            return
        folder = Path(self.root) / "src" / "mivhead" / "engine"
        library, new = folder / "libkernels.so", folder / "libkernels.so.new"
        flags = (*FLAGS, *CODE, *PROCESSORS.get(platform.machine(), ()), *SYSTEMS[system])
        sources = sorted(map(str, folder.glob("*.c")))
        fingerprint = runpy.run_path(str(folder / "fingerprint.py"))["fingerprint"](folder)
        flags += (f'-DFINGERPRINT="{fingerprint}"',)
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, "-m", "ziglang", "cc", *flags, *sources, "-o", str(new)],
                env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
                check=False,
            )
        if done.returncode:
            self.app.display_warning("The compiler failed: mivhead is built without its kernels.")
            return
        new.replace(library)  # atomically, because processes may have it loaded
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _add_web_runtime(self, build_data: dict[str, Any]) -> None:
        script = Path(self.root) / "src" / "mivhead" / "export" / "fetch_runtime.py"
        problem = runpy.run_path(str(script))["fetch"]()
        if problem:
            self.app.display_warning(f"mivhead is built without onnxruntime-web: {problem}.")
        else:
            build_data["artifacts"].append("src/mivhead/export/runtime/*")


def _platform_tag() -> str:
    """Return the tag of wheels with the kernels.

    Package indexes refuse `linux_x86_64`. The library needs nothing of the system, so that it fits
    the oldest Linux that pip still supports.
    """
    machine = platform.machine()
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        return f"manylinux_2_17_{machine}.manylinux2014_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
