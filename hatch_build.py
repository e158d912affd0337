"""Compiles the kernels (src/mivhead/head), fetches onnxruntime-web, lists what a wheel contains.

pip installs the compiler (ziglang) for the build, so that no other is needed. Without a compiler,
the package is built without the kernels and runs the same formulas in NumPy, which is slower. The
variable `MIVHEAD_TARGET` builds for another system than this one, `any` without kernels.

The pages of `miv export --web` contain onnxruntime-web, which npm downloads into the wheel. Without
npm, the package is built without it, and `miv export --web` says how to get it.

What a wheel contains besides its own code is listed in its metadata (`sboms/mivhead.cdx.json`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

TARGET = "MIVHEAD_TARGET"  # environment variable: a name in TARGETS, or ANY
ANY = "any"
HOME = "MIVHEAD_HOME"  # environment variable: address of the repository that publishes the package
PAPER = "https://arxiv.org/abs/2507.00401"
LIBRARY = "libkernels.so"  # on every system: it is opened by its path
# sqrt need not set errno; only functions that are marked as exported are visible.
FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-shared", "-s", "-fno-math-errno")
HIDDEN = ("-fPIC", "-fvisibility=hidden")
# AVX2 and FMA: processors since 2013. `mivhead.head.kernels` checks before it loads.
AVX2 = "-mcpu=x86_64_v3"
# Instead of Windows' C library, which takes a minute to build.
WINDOWS = """
#include <stddef.h>
int _fltused = 0;
int DllMainCRTStartup(void *module, unsigned why, void *more) {
  return (void)module, (void)why, (void)more, 1;
}
void *memset(void *to, int value, size_t count) {
  for (volatile char *p = to; count--;) *p++ = (char)value;
  return to;
}
"""


class Target(NamedTuple):
    """A system that there is a wheel with kernels for."""

    zig: str  # as the compiler calls it
    tag: str  # as pip calls it
    flags: tuple[str, ...]


# The library uses nothing from the system, so that it runs on the oldest ones that pip supports.
TARGETS = {
    "linux-x86_64": Target(
        "x86_64-linux-gnu",
        "manylinux_2_17_x86_64.manylinux2014_x86_64",
        (*HIDDEN, AVX2, "-nostdlib"),
    ),
    "linux-aarch64": Target(
        "aarch64-linux-gnu",
        "manylinux_2_17_aarch64.manylinux2014_aarch64",
        (*HIDDEN, "-nostdlib"),
    ),
    "darwin-x86_64": Target("x86_64-macos.10.13", "macosx_10_13_x86_64", (*HIDDEN, AVX2)),
    "darwin-aarch64": Target("aarch64-macos.11.0", "macosx_11_0_arm64", HIDDEN),
    "windows-x86_64": Target(
        "x86_64-windows-gnu", "win_amd64", (AVX2, "-nostdlib", "-Wl,--export-all-symbols")
    ),
}


class AddressHook(MetadataHookInterface):
    """States the addresses of the project; a fork that publishes states its own."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `urls`."""
        metadata["urls"] = {"Paper": PAPER}
        if home := os.environ.get(HOME, "").rstrip("/"):
            metadata["urls"] |= {
                "Source": home,
                "Issues": f"{home}/issues",
                "Changelog": f"{home}/blob/main/CHANGELOG.md",
                "Security": f"{home}/blob/main/SECURITY.md",
            }


class KernelHook(BuildHookInterface):
    """Builds the library of kernels, and adds it to the package."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add onnxruntime-web and the list of contents; compile the kernels and tag the wheel."""
        self._temporary = Path(tempfile.mkdtemp())  # until the wheel is written
        if version != "editable":  # in a clone, `make web-runtime` fetches it
            runtime = self._add_web_runtime(build_data)
            self._add_contents(build_data, runtime)
        name = os.environ.get(TARGET) or this_system()
        if name == ANY:
            return
        if name not in TARGETS or importlib.util.find_spec("ziglang") is None:
            self.app.display_warning("No compiler: mivhead is built without its fast kernels.")
            return
        folder = Path(self.root) / "src" / "mivhead" / "head"
        new = self._temporary / LIBRARY
        if not compile_kernels(TARGETS[name], folder, new):
            self.app.display_warning("The compiler failed: mivhead is built without its kernels.")
            return
        if (
            version == "editable"
        ):  # into the clone; atomically, because processes may have it loaded
            shutil.copy(new, folder / f"{LIBRARY}.new")
            (folder / f"{LIBRARY}.new").replace(folder / LIBRARY)
        else:
            build_data["force_include"][str(new)] = f"mivhead/head/{LIBRARY}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(name)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel contains now."""
        del version, build_data, artifact_path
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _add_web_runtime(self, build_data: dict[str, Any]) -> dict[str, Any] | None:
        script = Path(self.root) / "src" / "mivhead" / "export" / "fetch_runtime.py"
        runtime = runpy.run_path(str(script))
        problem = runtime["fetch"]()
        if problem:
            self.app.display_warning(f"mivhead is built without onnxruntime-web: {problem}.")
            return None
        build_data["artifacts"].append("src/mivhead/export/runtime/*")
        return runtime

    def _add_contents(self, build_data: dict[str, Any], runtime: dict[str, Any] | None) -> None:
        vendor = Path(self.root) / "src" / "mivhead" / "app" / "static" / "vendor" / "LICENSES.txt"
        metadata = self.metadata.core
        parts = vendored(vendor.read_text(encoding="utf-8"))
        if runtime is not None:
            parts.append(component("npm", runtime["PACKAGE"], runtime["VERSION"], "MIT"))
        document = contents(
            metadata.name, self.metadata.version, parts, sorted(metadata.dependencies)
        )
        path = self._temporary / f"{metadata.name}.cdx.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        build_data.setdefault("sbom_files", []).append(str(path))


def compile_kernels(target: Target, folder: Path, output: Path) -> bool:
    """Compile the C files of a folder for a system; return whether that worked."""
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")])  # as `mivhead.head.kernels` does
    fingerprint = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    sources = sorted(map(str, folder.glob("*.c")))
    with tempfile.TemporaryDirectory() as cache:
        if "windows" in target.zig:
            start = Path(cache) / "start.c"
            start.write_text(WINDOWS)
            sources.append(str(start))
        flags = (*FLAGS, *target.flags, f'-DFINGERPRINT="{fingerprint}"')
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", target.zig]
        done = subprocess.run(
            [*zig, *flags, *sources, "-o", str(output)],
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
            check=False,
        )
    return done.returncode == 0


def this_system() -> str:
    """Return the name that this system would have in TARGETS."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return f"{platform.system().lower()}-{machine}"


def platform_tag(name: str) -> str:
    """Return the tag of a wheel with the kernels."""
    if name == this_system() and name.startswith("linux") and platform.libc_ver()[0] != "glibc":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")  # such as Alpine's
    return TARGETS[name].tag


def vendored(text: str) -> list[dict[str, Any]]:
    """Read from LICENSES.txt what the app's page contains."""
    htm = re.search(r"npm package htm, version ([\d.]+)", text)
    preact = re.search(r"Preact ([\d.]+\d)", text)
    assert htm is not None, "LICENSES.txt states both versions"
    assert preact is not None, "LICENSES.txt states both versions"
    return [
        component("npm", "htm", htm[1], "Apache-2.0"),
        component("npm", "preact", preact[1], "MIT"),
    ]


def component(kind: str, name: str, version: str | None, licence: str | None) -> dict[str, Any]:
    """Describe a part of the package, or something that it needs."""
    purl = f"pkg:{kind}/{name}" + (f"@{version}" if version else "")
    described: dict[str, Any] = {"type": "library", "name": name, "bom-ref": purl, "purl": purl}
    if version:
        described["version"] = version
    if licence:
        described["licenses"] = [{"license": {"id": licence}}]
    return described


def contents(
    name: str, version: str, parts: list[dict[str, Any]], requirements: list[str]
) -> dict[str, Any]:
    """Return a software bill of materials in the format CycloneDX.

    Parameters
    ----------
    name, version : str
        The package.
    parts : list of dict
        What its wheel contains besides its own code.
    requirements : list of str
        What it needs; pip chooses the versions.
    """
    needed = [re.split(r"[ <>=!~;\[]", each, maxsplit=1)[0] for each in requirements]
    others = [
        component("pypi", re.sub(r"[-_.]+", "-", each).lower(), None, None) for each in needed
    ]
    own = component("pypi", name, version, "Apache-2.0")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [*parts, *others],
        "dependencies": [
            {"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in [*parts, *others]]}
        ],
    }
