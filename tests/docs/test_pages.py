"""Pages are programs: their Python and bash blocks run, in order.

A page starts in an empty folder, or in one with the photos of tests/helpers/photos.py. Blocks
marked `sh` are not run: they install packages, or need what only a user has. The comment
`<!-- needs: PACKAGE -->` before a block leaves it out where the package is not installed. A block
with `file="NAME"` is written to that file instead of being run.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

from mivhead.cli.main import main
from tests.helpers.photos import write_photos

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in ("_build", "changelog.md")
)
BLOCK = re.compile(
    r"^(?:<!-- needs: (\w+) -->\n)?```(python|bash)(?: file=\"([^\"]+)\")?\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PHOTOS = (  # pages for people who have some
    *("tutorial", "photos", "python", "unsure", "predictions", "images", "export", "cache"),
    *("databases", "own-backbone"),
)
LONG = ("benchmark", "million-images", "own-method", "reports", "rivals")  # run by `make test-all`
NEEDS = {  # pages that use optional packages
    "backbones": ["timm"],
    "databases": ["lancedb"],
    "export": ["onnxscript"],
    "million-images": ["onnxscript", "pyarrow", "fsspec"],
    "own-method": ["matplotlib"],
    "photos": ["matplotlib"],
    "predictions": ["pandas"],
    "reports": ["matplotlib"],
    "rivals": ["torchvision"],
    "serve": ["starlette", "httpx"],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pages show the same photos: their features are computed once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def as_before(cache: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules of a page, so that other tests do not meet them."""
    monkeypatch.setenv("MIV_CACHE", cache)
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if "." not in name and name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(DOCS)),
            marks=[pytest.mark.slow] * (page.stem in LONG),
        )
        for page in PAGES
    ],
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if page.stem in PHOTOS:
        write_photos(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        package, kind, file, code = match.groups()
        if package and find_spec(package) is None:
            continue
        line = text[: match.start(4)].count("\n")
        if file is not None:
            Path(file).write_text(code, encoding="utf-8")
            continue
        with warnings.catch_warnings():
            if package:  # what it warns about is not an error
                warnings.simplefilter("default")
            if kind == "python":
                # The empty lines make the line numbers of a traceback those of the page.
                exec(compile("\n" * line + code, page, "exec"), names)
            else:
                run_commands(code)


def test_the_first_thing_on_a_page_is_a_sentence() -> None:
    for page in PAGES:
        title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
        assert title.startswith("# "), page
        assert not first.startswith(("```", "|", "!", "- ")), page


def run_commands(code: str) -> None:
    for line in code.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if not command:
            continue
        assert command[0] == "miv", f"only miv is run here, got {line!r}"
        if ">" in command:
            *command, _, output = command
            with Path(output).open("w", encoding="utf-8") as file, redirect_stdout(file):
                assert run(command[1:]) == 0, line
        else:
            assert run(command[1:]) == 0, line


def run(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as exit_:  # of --help
        return int(exit_.code or 0)
