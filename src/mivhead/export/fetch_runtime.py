"""Fetches the files of onnxruntime-web that exported pages contain.

Run when a wheel is built (hatch_build.py) and by `make web-runtime`, as a script of its own: it
imports nothing of mivhead. npm downloads the package, from wherever it is set up to.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
# As npm publishes it: what is fetched is what was tested.
INTEGRITY = (
    "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
FILES = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
FOLDER = Path(__file__).with_name("runtime")
SECONDS = 300


def fetch(folder: Path = FOLDER) -> str | None:
    """Fetch the files, unless they are there; return why that failed, or None."""
    if all((folder / name).is_file() for name in FILES):
        return None
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    with tempfile.TemporaryDirectory() as place:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", place]
        try:
            subprocess.run(command, check=True, cwd=place, timeout=SECONDS, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"npm cannot download {PACKAGE} ({error})"
        archive = next(Path(place).glob("*.tgz"))
        digest = hashlib.sha512(archive.read_bytes()).digest()
        if base64.b64encode(digest).decode() != INTEGRITY:
            return f"the download of {PACKAGE} {VERSION} is not the one that was tested"
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for name in FILES:
                source = tar.extractfile(f"package/dist/{name}")
                assert source is not None, "the archive was checked"
                (folder / name).write_bytes(source.read())
    return None


if __name__ == "__main__":
    sys.exit(fetch())
