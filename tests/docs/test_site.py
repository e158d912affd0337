"""The site builds without a warning, loads nothing from elsewhere and lists the whole API."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mivhead
from mivhead import errors

DOCS = Path(__file__).parents[2] / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
ROOMS = [
    f"mivhead.{name}" for name in mivhead.__all__ if isinstance(getattr(mivhead, name), ModuleType)
]
LABORATORY = ["mivhead_bench.benchmark", "mivhead_bench.datasets"]
API = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")


def documented() -> dict[str, set[str]]:
    """Names that the API reference lists, by module."""
    blocks = re.findall(r"```\{eval-rst\}\n(.*?)```", API, re.DOTALL)
    return {
        re.search(r"currentmodule:: (\S+)", block)[1]: set(re.findall(r"(?m)^   (\w+)$", block))
        for block in blocks
    }


def public(module: str) -> set[str]:
    """Names that a module exports: not its constants, nor the rooms of the package."""
    home = importlib.import_module(module)
    names = getattr(home, "__all__", None) or dir(home)
    kept = {name for name in names if not name.startswith("_") and not name.isupper()}
    return kept - {name.rpartition(".")[2] for name in ROOMS}


def test_every_room_is_in_the_api_reference():
    assert set(documented()) == {"mivhead", *ROOMS, *LABORATORY}


def test_every_public_name_is_in_the_api_reference():
    listed = documented()
    for module in sorted({"mivhead", *ROOMS, *LABORATORY} - {"mivhead.errors"}):
        elsewhere = set() if module == "mivhead" else listed["mivhead"]  # each name once
        assert listed[module] == public(module) - elsewhere, module


def test_every_error_is_in_the_api_reference():
    names = {k for k, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert documented()["mivhead.errors"] == names - {"MivError"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_nb")
    pytest.importorskip("pydata_sphinx_theme")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site):
    script = r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//"
    style = r"<link\b[^>]*rel=\"stylesheet\"[^>]*href=\"https?:"
    loads = re.compile(f"{script}|{style}")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert not loads.search(page.read_text(encoding="utf-8")), page.relative_to(site)


@pytest.mark.slow
def test_the_command_reference_shows_every_command(site):
    from tests.helpers.commands import list_commands

    page = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    commands = list_commands()
    assert len(commands) > 15
    for command in commands:
        assert f'id="{command.replace(" ", "-")}"' in page


@pytest.mark.slow
def test_formulas_are_rendered(site):
    page = (site / "explanation" / "the-head.html").read_text(encoding="utf-8")
    assert page.count("<math") > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "guide"),
    [
        ("none of these", "howto/unsure.html"),
        ("export onnx", "howto/export.html"),
        ("unlabelled", "howto/photos.html"),
        ("camera", "howto/app.html"),
        ("accuracy", "how-good.html"),
    ],
)
def test_search_finds_the_guide_before_the_changelog(site, words, guide):
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"file://{site}/search.html?q={words}")
        page.wait_for_selector("ul.search li a")
        page.get_by_text(re.compile("Search finished|found \\d+ page")).first.wait_for()
        links = page.locator("ul.search li > a").evaluate_all("all => all.map(a => a.href)")
        browser.close()
    places = [link.removeprefix(f"file://{site}/") for link in links]
    assert guide in places[:5]
    later = [place.startswith(("changelog", "_modules")) for place in places]
    assert True not in later[:5]


@pytest.mark.slow
def test_results_can_be_sorted_and_filtered(site):
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"file://{site}/results.html")
        page.fill("input.filter", "10-way ridge-all confirmation")
        page.get_by_role("button", name="accuracy").click()
        rows = page.locator("table.sortable tbody tr:visible").evaluate_all(
            "all => all.map(row => [...row.cells].map(cell => cell.textContent.trim()))"
        )
        browser.close()
    assert len(rows) > 2
    assert {tuple(row[1:4]) for row in rows} == {("10-way 5-shot", "ridge-all", "8 confirmation")}
    accuracies = [float(row[5]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
