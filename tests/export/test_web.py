"""The page of `miv export --web`, in a real browser."""

from __future__ import annotations

import base64
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.errors import InputError, NotAvailableError
from mivhead.export import fetch_runtime, web
from mivhead.export.web import PAGE, RUNTIME, check_folder, export_web, find_runtime
from tests.export.test_model import fitted, images, small_cnn

ROOT = Path(__file__).parents[2]
# Where `make web-runtime` puts the files of the npm package.
WEB = fetch_runtime.FOLDER
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
]


def test_the_runtime_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FOLDER", tmp_path)
    with pytest.raises(NotAvailableError, match="npm"):
        find_runtime()
    for name in RUNTIME:
        (tmp_path / name).touch()
    assert find_runtime() == tmp_path


def test_the_runtime_is_fetched_once_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_runtime.shutil, "which", lambda _: None)
    assert fetch_runtime.fetch(tmp_path) == "npm is not installed"
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho "not the package" > onnxruntime-web.tgz\n')
    npm.chmod(0o755)
    monkeypatch.setattr(fetch_runtime.shutil, "which", lambda _: str(npm))
    assert "is not the one that was tested" in str(fetch_runtime.fetch(tmp_path / "runtime"))
    assert not (tmp_path / "runtime").exists()
    npm.write_text("#!/bin/sh\nexit 1\n")
    assert "npm cannot download" in str(fetch_runtime.fetch(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    for name in RUNTIME:
        (tmp_path / "runtime" / name).touch()
    assert fetch_runtime.fetch(tmp_path / "runtime") is None  # nothing is fetched again


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path)
    check_folder(tmp_path / "new")
    (tmp_path / "diary.txt").touch()
    with pytest.raises(InputError, match="is not empty"):
        check_folder(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        check_folder(tmp_path / "diary.txt")
    (tmp_path / PAGE).write_text("<!doctype html><title>My diary</title>")
    with pytest.raises(InputError, match="is not empty"):
        check_folder(tmp_path)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    folder = ROOT / "src" / "mivhead" / "export" / "web_page"
    names = {web.BODY, web.STYLE, web.NOTICE, *web.SCRIPTS}
    assert {path.name for path in folder.iterdir()} == names
    for name in names - {web.NOTICE}:
        text = (folder / name).read_text(encoding="utf-8")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which it is served."""
    folder = tmp_path / "site"
    handler = partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    if not WEB.is_dir():
        pytest.skip("onnxruntime-web is not there: `make web-runtime` fetches it")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(permissions=["camera"])
        yield context.new_page()
        browser.close()


CLASSIFY = """async (data) => {
    const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
    const found = await classify(new Blob([bytes]));
    return [found.label, found.probability, found.decision];
}"""


@pytest.fixture(scope="module")
def shades() -> FewShotClassifier:
    """A small model: dark, light and red images."""
    from mivhead import Preprocessing
    from mivhead.backbones import from_module

    backbone = from_module(
        small_cnn(), ["1", "3"], name="small", preprocessing=Preprocessing(size=32)
    )
    return fitted(backbone)


@pytest.fixture(scope="module")
def double_clicked(shades: FewShotClassifier, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the page of this model, in a file."""
    if not WEB.is_dir():
        pytest.skip("onnxruntime-web is not there: `make web-runtime` fetches it")
    folder = tmp_path_factory.mktemp("site")
    export_web(shades, folder, title="Shades")
    return (folder / PAGE).as_uri()


def write_light(path: Path) -> Path:
    light = np.random.default_rng(0).integers(140, 230, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(light).save(path)
    return path


@pytest.mark.parametrize("opened", ["from a server", "by double-click"])
def test_images_are_dropped_and_taken(
    site: tuple[Path, str], page: Any, tmp_path: Path, shades: FewShotClassifier, opened: str
) -> None:
    folder, address = site
    export = export_web(shades, folder, title="Shades <b>")
    assert [path.name for path in folder.iterdir()] == [PAGE]
    assert export.bytes == (folder / PAGE).stat().st_size
    if opened == "by double-click":
        address = (folder / PAGE).as_uri()
    wanted: list[str] = []
    page.on("request", lambda request: wanted.append(request.url))
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.goto(address)
    page.wait_for_selector(".status.ready")
    assert page.title() == "Shades <b>"
    assert page.locator("#classes li").all_text_contents() == ["dark", "light", "red"]
    write_light(tmp_path / "light.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    for name in ("phone.HEIC", "notes.txt"):
        (tmp_path / name).write_bytes(b"not for a browser")
    names = ("light.png", "broken.png", "phone.HEIC", "notes.txt")
    page.set_input_files("#files", [tmp_path / name for name in names])
    page.locator(".card .file").nth(2).wait_for()
    assert page.locator(".card h2").first.text_content() == "Not readable"
    assert "HEIC" in page.locator(".card p").first.text_content()
    assert page.locator("#problem").text_content() == "Not a photo: notes.txt."
    assert page.locator(".card img").count() == 1  # and no icons of broken images
    assert page.locator(".card .ranking li").first.text_content().startswith("light")
    with page.expect_download() as download:
        page.click("#save")
    rows = download.value.path().read_text("utf-8-sig").splitlines()
    assert [row.split(",")[0] for row in rows] == ['"file"', *(f'"{name}"' for name in names[:3])]
    assert rows[2] == '"broken.png","not readable","","",""'
    assert rows[1].startswith('"light.png","light","light","0.')
    page.click("#camera")
    page.wait_for_selector("#viewfinder:not([hidden])")
    page.locator("#live li").first.wait_for()  # what the camera sees is named all the time
    assert page.locator("#name").text_content() in (
        "dark",
        "light",
        "red",
        "Unsure",
        "None of these",
    )
    page.click("#shoot")
    page.locator(".card .file").nth(3).wait_for()
    assert page.locator(".card .ranking").count() == 2
    page.click("#stop")
    assert page.evaluate("document.activeElement.id") == "camera"
    assert all(each.startswith((address, "blob:", "data:")) for each in wanted)
    assert not [each for each in problems if "Content Security Policy" in each]
    export_web(shades, folder)  # replaces itself


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_is_accessible(
    page: Any, tmp_path: Path, double_clicked: str, scheme: str, width: int
) -> None:
    package = pytest.importorskip("axe_playwright_python")
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(double_clicked)
    page.wait_for_selector(".status.ready")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Choose photos"
    page.evaluate("byId('files').addEventListener('click', () => (window.asked = true))")
    page.keyboard.press("Enter")
    assert page.evaluate("window.asked")
    page.set_input_files("#files", write_light(tmp_path / "light.png"))
    page.locator(".card .file").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#live li").first.wait_for()
    page.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate((Path(package.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    assert not [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]]


HOSTILE = [
    '<img src=x onerror="window.ran=1">',
    "</script><script>window.ran=1</script>",
    "\\u003cimg src=x onerror=window.ran=1> ${window.ran=1} {{window.ran=1}} \u202e\u2028",
]


def test_names_of_strangers_run_nothing(site: tuple[Path, str], page: Any, tmp_path: Path) -> None:
    from mivhead import Preprocessing
    from mivhead.backbones import from_module

    folder, address = site
    backbone = from_module(
        small_cnn(), ["1", "3"], name=HOSTILE[0], preprocessing=Preprocessing(size=32)
    )
    model = FewShotClassifier(backbone, threshold=0).fit(images(3), HOSTILE * 3)
    export_web(model, folder, title=HOSTILE[1])
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(address)
    page.wait_for_selector(".status.ready")
    name = "<img src=x onerror=window.ran=1>.png"
    Image.fromarray(images()[0]).save(tmp_path / name)
    (tmp_path / f"broken {name}").write_bytes(b"<script>window.ran=1</script>")
    page.set_input_files("#files", [tmp_path / name, tmp_path / f"broken {name}"])
    page.locator(".card .file").nth(1).wait_for()
    assert page.evaluate("window.ran") is None
    assert page.locator("main img[src='x'], .card script").count() == 0
    assert HOSTILE[0] in page.locator(".card .ranking").first.text_content()
    assert not [each for each in problems if "Content Security Policy" in each]


@pytest.mark.slow
def test_names_agree_on_real_images(site: tuple[Path, str], page: Any) -> None:
    """The same names on at least 98% of 200 images, and nearly the same probabilities."""
    data = os.environ.get("MIV_DATA")
    if not data:
        pytest.skip("MIV_DATA names no folder of image sets")
    folder, address = site
    shots, labels, queries = [], [], []
    for each in ("cub200_birds", "vgg_flower102", "gtsrb_traffic_signs", "eurosat"):
        for kind in sorted(path for path in Path(data, each).iterdir() if path.is_dir())[:5]:
            files = sorted(kind.iterdir())
            shots += files[:5]
            labels += [f"{each} {kind.name}"] * 5
            queries += files[5:15]
    model = FewShotClassifier(verbose=False, threshold=0).fit(shots, labels)
    export_web(model, folder)
    page.goto(address)
    page.wait_for_selector(".status.ready", timeout=120_000)
    sent = [base64.b64encode(each.read_bytes()).decode() for each in queries]
    found = [page.evaluate(CLASSIFY, data) for data in sent]
    expected = model.classify(queries)
    assert len(found) == 200
    same = [mine.label == label for mine, (label, *_) in zip(expected, found, strict=True)]
    assert np.mean(same) >= 0.98
    decided = [mine.decision == each[2] for mine, each in zip(expected, found, strict=True)]
    assert np.mean(decided) >= 0.95
    apart = [abs(mine.probability - each[1]) for mine, each in zip(expected, found, strict=True)]
    print(f"{np.mean(same):.3f} same names, {np.mean(decided):.3f} same decisions")
    print(f"probabilities: mean {np.mean(apart):.1e}, largest {np.max(apart):.1e}")
    assert np.mean(apart) < 0.01
