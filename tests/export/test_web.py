"""The page of `miv export --web`, in a real browser."""

from __future__ import annotations

import json
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
from mivhead.export.web import PAGE, RUNTIME, check_folder, export_web, find_runtime
from tests.export.test_model import fitted, images, small_cnn

ROOT = Path(__file__).parents[2]
# Where `make test-all` installs the npm package.
WEB = Path(os.environ.get("MIV_ONNXRUNTIME_WEB", ROOT / ".venv" / "web"))
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
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotAvailableError, match="npm install onnxruntime-web"):
        find_runtime(None)
    with pytest.raises(NotAvailableError, match="does not contain it"):
        find_runtime(tmp_path)
    dist = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    dist.mkdir(parents=True)
    for name in RUNTIME:
        (dist / name).touch()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert find_runtime(None) == find_runtime(tmp_path) == find_runtime(dist.parent) == dist


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path)
    check_folder(tmp_path / "new")
    (tmp_path / "diary.txt").touch()
    with pytest.raises(InputError, match="is not empty"):
        check_folder(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        check_folder(tmp_path / "diary.txt")


def test_the_page_loads_nothing_from_elsewhere() -> None:
    folder = ROOT / "src" / "mivhead" / "export" / "web_page"
    assert sorted(path.name for path in folder.iterdir()) == sorted(PAGE)
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
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
    if not (WEB / "node_modules").is_dir() and not (WEB / "dist").is_dir():
        pytest.skip("onnxruntime-web is not installed: `make test-all` does it")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(permissions=["camera"])
        yield context.new_page()
        browser.close()


CLASSIFY = """async (name) => {
    const page = await import('./page.js');
    const found = await page.classify(await (await fetch(name)).blob());
    return [found.label, found.probability, found.decision];
}"""


def test_images_are_dropped_and_taken(site: tuple[Path, str], page: Any, tmp_path: Path) -> None:
    from mivhead import Preprocessing
    from mivhead.backbones import from_module

    folder, address = site
    backbone = from_module(
        small_cnn(), ["1", "3"], name="small", preprocessing=Preprocessing(size=32)
    )
    model = fitted(backbone)
    export_web(model, folder, runtime=WEB, title="Shades <b>", storage="half")
    document = json.loads((folder / "model.json").read_text())
    assert document["classes"] == ["dark", "light", "red"]
    wanted: list[str] = []
    page.on("request", lambda request: wanted.append(request.url))
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.goto(address)
    page.wait_for_selector(".status.ready")
    assert page.title() == "Shades <b>"
    light = np.random.default_rng(0).integers(140, 230, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(light).save(tmp_path / "light.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    page.set_input_files("#files", [tmp_path / "light.png", tmp_path / "broken.png"])
    page.locator(".card .file").nth(1).wait_for()
    assert page.locator(".card h2").first.text_content() == "Not readable"
    assert page.locator(".card .ranking li").first.text_content().startswith("light")
    page.click("#camera")
    page.wait_for_selector("#viewfinder:not([hidden])")
    page.click("#shoot")
    page.locator(".card .file").nth(2).wait_for()
    assert page.locator(".card .ranking").count() == 2
    assert all(each.startswith((address, "blob:", "data:")) for each in wanted)
    assert not [each for each in problems if "Content Security Policy" in each]
    export_web(model, folder, runtime=WEB)  # replaces itself


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
    export_web(model, folder, runtime=WEB, title=HOSTILE[1])
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
    """The same names on at least 98 % of 200 images, and nearly the same probabilities."""
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
    export_web(model, folder, runtime=WEB)
    (folder / "new").mkdir()
    names = []
    for i, file in enumerate(queries):
        names.append(f"new/{i}{file.suffix}")
        shutil.copyfile(file, folder / names[-1])
    page.goto(address)
    page.wait_for_selector(".status.ready", timeout=120_000)
    found = [page.evaluate(CLASSIFY, name) for name in names]
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
