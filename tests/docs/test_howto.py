"""The how-to pages are programs: their Python and bash blocks run, in order, in an empty folder.

Blocks marked `sh` are not run: they install packages, or need images that only a user has.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mivhead.cli.main import main

PAGES = sorted(Path(__file__).parents[2].joinpath("docs", "howto").glob("*.md"))
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {  # pages that use optional packages
    "backbones-http": ["tenacity"],
    "backbones-onnx": ["onnxscript", "timm"],
    "backbones-timm": ["timm"],
    "backbones-transformers": ["transformers"],
    "databases": ["lancedb"],
    "reports": ["matplotlib"],
    "rivals": ["torchvision"],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        kind, code = match.groups()
        line = text[: match.start(2)].count("\n")
        if kind == "python":
            # The empty lines make the line numbers of a traceback those of the page.
            exec(compile("\n" * line + code, page, "exec"), names)
        else:
            run_commands(code)


def run_commands(code: str) -> None:
    for line in code.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if command:
            assert command[0] == "miv", f"only miv is run here, got {line!r}"
            assert main(command[1:]) == 0, line
