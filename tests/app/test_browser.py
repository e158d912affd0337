"""The app in a real browser: the journey of somebody who makes a classifier, and what can go wrong.

The tests need Playwright and a Chromium (`apt-get install chromium`), and are skipped without. With
`MIV_PICTURES=docs/pictures`, the screenshots of the documentation are written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright

from mivhead import FewShotClassifier
from mivhead.app.learner import Learner
from mivhead.app.outputs import can_export, can_export_web
from mivhead.app.project import opened
from mivhead.app.routes import Token, make_server
from tests.helpers.services import serving, toy

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
SECONDS = 90_000  # milliseconds that learning may take on a busy machine
CLASSES = ("night", "noon", "leaf")


def write_photos(folder: Path, count: int, first: int = 0) -> dict[str, list[Path]]:
    """Crops of two real photographs and a drawn one, by class."""
    from sklearn.datasets import load_sample_images

    temple, flower = load_sample_images().images
    found: dict[str, list[Path]] = {}
    for name, picture in zip(CLASSES, (temple // 3, temple, flower), strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        found[name] = []
        for i in range(first, first + count):
            x, y = 37 * i % 400, 23 * i % 200
            path = folder / name / f"{name}-{i}.jpg"
            Image.fromarray(picture[y : y + 220, x : x + 220]).save(path, quality=90)
            found[name].append(path)
    return found


class Process:
    """`miv app` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._process: Any = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mivhead", "app", str(self.folder), "--no-browser"]
        command += ["--json", "--threads", "1", "--method", "ncc"]
        cache = self.folder.with_name("cache")  # which keeps the token of the page
        self._process = subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "MIV_CACHE": str(cache)},
        )
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(self._process.stdout.readline())
            assert lines[-1], "miv app did not start"
        self.url = json.loads("".join(lines))["url"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Any]:
    """Run the app in this process, which has PyTorch loaded."""
    options = options or {"method": "ncc", "threshold": 0}
    with opened(folder) as project:
        learner = Learner(project, FewShotClassifier(verbose=False, **options))
        token = Token(project)
        learner.start()
        with serving(make_server(project, learner, token)) as address:
            yield SimpleNamespace(folder=project.folder, url=f"{address}/?token={token.value}")
        learner.stop()
        learner._thread.join()  # PyTorch aborts a process that ends while it computes


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield started
        started.close()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Any]:
    with running(tmp_path / "garden") as started:
        yield started


@pytest.fixture
def page(browser: Browser, app: Any) -> Iterator[Page]:
    with visiting(browser, app) as opened:
        yield opened


@contextmanager
def visiting(browser: Browser, app: Any, **options: Any) -> Iterator[Page]:
    """Open the app; whatever goes wrong on the page, or is asked of another server, is an error."""
    context = browser.new_context(accept_downloads=True, **options)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda asked: (
            asked.url.startswith((app.url.partition("/?")[0], "blob:"))
            or problems.append(asked.url)
        ),
    )
    page.goto(app.url)
    try:
        yield page
    finally:
        context.close()
    assert not problems


def card(page: Page, name: str) -> Any:
    return page.get_by_role("article", name=name, exact=True)


def make_classes(page: Page, names: tuple[str, ...] = CLASSES) -> None:
    page.get_by_label("First class").fill(names[0])
    page.get_by_label("Second class").fill(names[1])
    page.get_by_role("button", name="Start").click()
    for name in names[2:]:
        page.get_by_label("Name of the new class").fill(name)
        page.get_by_role("button", name="Create", exact=True).click()
    for name in names:
        expect(card(page, name)).to_be_visible()


def add(page: Page, name: str, files: list[Path]) -> None:
    card(page, name).locator("input[type=file]").set_input_files(files)


def drop(target: Any, files: list[tuple[str, bytes]]) -> None:
    """Drop files, as the browser would."""
    target.evaluate(
        """(element, files) => {
            const data = new DataTransfer();
            for (const [name, bytes] of files)
                data.items.add(new File([new Uint8Array(bytes)], name));
            for (const kind of ["dragenter", "dragover", "drop"])
                element.dispatchEvent(
                    new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        [[name, list(data)] for name, data in files],
    )


def drop_paths(page: Page, target: Any, paths: list[Path]) -> None:
    """Drop files and folders of the disk: only the browser itself can make a drop with folders."""
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 20}
    data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **place, "data": data})


def fit(page: Page, photos: dict[str, list[Path]]) -> None:
    """Make the classes, add the photos and wait for the estimate."""
    make_classes(page)
    for name, files in photos.items():
        add(page, name, files)
        expect(card(page, name).locator(".thumb")).to_have_count(len(files), timeout=SECONDS)
    expect(page.locator(".ring")).to_be_visible(timeout=SECONDS)
    expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)


def test_the_journey(browser: Browser, tmp_path: Path) -> None:
    with (
        running(tmp_path / "garden", recipe="mivhead") as app,  # what users get
        visiting(browser, app) as page,
    ):
        journey(page, app, tmp_path)


def journey(page: Page, app: Any, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 4)
    new = write_photos(tmp_path / "new", 2, first=20)
    fit(page, photos)
    expect(page.locator(".insights")).to_contain_text("of 12 were right")

    page.get_by_role("link", name="Try it").click()
    files = [path for paths in new.values() for path in paths]
    drop(page.locator(".try"), [(path.name, path.read_bytes()) for path in files])
    expect(page.locator(".result:not(.notYet)")).to_have_count(6, timeout=SECONDS)

    # Correct one with a click, and one with a key.
    page.get_by_label("Another class for leaf-20.jpg").select_option("leaf")
    expect(page.locator(".result")).to_have_count(5)
    assert (app.folder / "leaf/leaf-20.jpg").exists()
    focused = page.get_by_label("Details of noon-21.jpg")
    focused.focus()
    page.keyboard.press("1")
    expect(page.locator(".result")).to_have_count(4)
    page.keyboard.press("Control+z")
    expect(page.locator(".result")).to_have_count(5)
    page.keyboard.press("Control+Shift+z")
    expect(page.locator(".result")).to_have_count(4)
    page.get_by_role("button", name=re.compile("Undo: move 1 photo")).click()
    expect(page.locator(".result")).to_have_count(5)

    expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)
    page.get_by_label("Sort by").select_option("Label these next")
    expect(page.locator(".result:not(.notYet)")).to_have_count(5, timeout=SECONDS)

    # Look at one: where the model looked, and what it compared the photo with.
    page.get_by_label("Details of noon-20.jpg").click()
    expect(page.locator(".closest img").first).to_be_visible(timeout=SECONDS)
    page.get_by_label("Where it looked").check()
    page.keyboard.press("Escape")

    page.reload()  # the same view, the same photos
    expect(page.locator(".result")).to_have_count(5)
    page.get_by_role("link", name="Teach").click()
    expect(card(page, "leaf").locator(".thumb")).to_have_count(5)
    expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)

    for title, suffix in (
        *(("Model", ".miv"), ("Names as a table", ".csv")),
        *(("Sorted folders", ".zip"), ("Report", ".html")),
        *((("Exported classifier", ".onnx"),) if can_export() else ()),
        *((("Web page", ".zip"),) if can_export_web() else ()),
    ):
        slow = title in ("Exported classifier", "Web page")
        page.get_by_text("Download", exact=True).click()
        with page.expect_download(timeout=SECONDS) as download:
            page.get_by_role("button" if slow else "link", name=re.compile(f"^{title}")).click()
            if slow:
                expect(page.locator(".toast.wait")).to_contain_text(f"Preparing: {title}")
        assert download.value.suggested_filename.endswith(suffix)
        assert download.value.path().stat().st_size > 100
    if can_export_web():
        with zipfile.ZipFile(download.value.path()) as archive:
            assert archive.namelist() == ["index.html"]
            assert "<title>garden</title>" in archive.read("index.html")[:20_000].decode()


def test_folders_are_dropped_and_chosen(page: Page, app: Any, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 3)
    (tmp_path / "photos/leaf/.DS_Store").write_bytes(b"litter")
    (tmp_path / "photos/leaf/notes.txt").write_text("not a photo")
    # A folder of class folders on the empty page: every folder becomes a class.
    drop_paths(page, page.locator(".welcome"), [tmp_path / "photos"])
    for name in CLASSES:
        expect(card(page, name).locator(".thumb")).to_have_count(3, timeout=SECONDS)
    expect(page.locator(".problems")).to_have_count(0)
    # A folder on a card: its photos join this class.
    more = write_photos(tmp_path / "more", 2, first=10)
    drop_paths(page, card(page, "noon"), [tmp_path / "more/noon", more["leaf"][0]])
    expect(card(page, "noon").locator(".thumb")).to_have_count(6)
    assert (app.folder / "noon/leaf-10.jpg").exists()
    # Photos without a folder, where they belong to no class.
    drop_paths(page, page.locator(".new-class"), more["night"])
    expect(page.locator(".toast")).to_contain_text("Drop photos on a class")
    page.get_by_role("link", name="Try it").click()
    page.locator(".try input[webkitdirectory]").set_input_files(tmp_path / "more")
    expect(page.locator(".result")).to_have_count(6, timeout=SECONDS)
    # Classes from a folder that is chosen, without a mouse.
    page.get_by_role("link", name="Teach").click()
    chooser = page.locator(".new-class input[webkitdirectory]")
    chooser.evaluate("(e) => e.addEventListener('click', () => (e.dataset.asked = 'yes'))")
    page.get_by_role("button", name="Choose a folder of classes").focus()
    page.keyboard.press("Enter")
    expect(chooser).to_have_attribute("data-asked", "yes")
    write_photos(tmp_path / "third", 1, first=30)
    (tmp_path / "third/leaf").rename(tmp_path / "third/dusk")
    chooser.set_input_files(tmp_path / "third")
    expect(card(page, "dusk").locator(".thumb")).to_have_count(1, timeout=SECONDS)


def test_photos_are_pasted(page: Page) -> None:
    def copy_and_paste(side: int) -> None:
        page.evaluate(
            """async (side) => {
                const canvas = new OffscreenCanvas(side, side);
                canvas.getContext("2d").fillRect(5, 5, 20, 20);
                const blob = await canvas.convertToBlob();
                await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
            }""",
            side,
        )
        page.keyboard.press("Control+v")

    make_classes(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for side, name in enumerate(("noon", "leaf"), start=40):
        card(page, name).hover()  # photos go to the class under the pointer
        copy_and_paste(side)
        expect(card(page, name).locator(".thumb")).to_have_count(1)
    card(page, "night").hover()
    page.get_by_label("Name of the new class").focus()  # a text field does not swallow a photo
    copy_and_paste(60)
    expect(card(page, "night").locator(".thumb")).to_have_count(1)
    page.get_by_role("link", name="Try it").click()
    copy_and_paste(70)
    expect(page.locator(".result")).to_have_count(1)


def test_photos_are_dragged_between_classes_renamed_and_deleted(
    page: Page, app: Any, tmp_path: Path
) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    make_classes(page)
    add(page, "night", photos["night"] + photos["noon"][:1])
    expect(card(page, "night").locator(".thumb")).to_have_count(3)
    page.get_by_label("noon-0.jpg").drag_to(card(page, "noon"))
    expect(card(page, "noon").locator(".thumb")).to_have_count(1)
    assert (app.folder / "noon/noon-0.jpg").exists()
    page.get_by_label("Rename leaf").click()
    page.get_by_label("Name of the class").fill('<img src=x> & "x"')
    page.keyboard.press("Enter")
    expect(page.locator(".toast.error")).to_contain_text("cannot be the name of a folder")
    page.get_by_label("Rename leaf").click()
    page.get_by_label("Name of the class").fill("&lt;b&gt; 'leaf'")
    page.keyboard.press("Enter")
    expect(card(page, "&lt;b&gt; 'leaf'")).to_be_visible()
    page.get_by_label("night-0.jpg").focus()
    page.keyboard.press("Delete")
    expect(card(page, "night").locator(".thumb")).to_have_count(1)
    page.get_by_label("Delete the class night").click()
    expect(card(page, "night")).to_have_count(0)
    for _ in range(2):
        page.keyboard.press("Control+z")
    expect(card(page, "night").locator(".thumb")).to_have_count(2)


def test_200_photos_at_once_and_a_text_file_among_them(page: Page, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = []
    for i in range(200):
        path = tmp_path / f"{i}.jpg"
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), np.uint8)).save(path)
        files.append((path.name, path.read_bytes()))
    files.insert(100, ("notes.jpg", b"This is not a photo."))
    make_classes(page)
    drop(card(page, "noon"), files)
    expect(card(page, "noon")).to_contain_text("200 photos", timeout=SECONDS)
    expect(card(page, "noon").locator(".problems")).to_contain_text("notes.jpg is not a JPEG")
    assert card(page, "noon").locator(".thumb").count() < 60  # the others are not in sight
    page.keyboard.press("Control+z")  # one step
    expect(card(page, "noon")).to_contain_text("0 photos")


def test_killed_and_started_again_under_an_open_page(browser: Browser, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    app = Process(tmp_path / "garden")
    app.start()
    try:
        with visiting(browser, app) as page:
            make_classes(page)
            add(page, "night", photos["night"])
            expect(card(page, "night").locator(".thumb")).to_have_count(2)
            app.kill()
            expect(page.locator(".banner")).to_contain_text("The app is not running")
            expect(page.locator(".status")).to_contain_text("Not connected")
            add(page, "noon", photos["noon"])  # waits for the app
            app.start()
            expect(page.locator(".banner")).to_have_count(0, timeout=SECONDS)
            expect(card(page, "noon").locator(".thumb")).to_have_count(2, timeout=SECONDS)
            expect(card(page, "night").locator(".thumb")).to_have_count(2)
            expect(page.locator(".status")).not_to_contain_text("Not connected")
    finally:
        app.kill()


def test_thumbnails_that_failed_are_loaded_when_the_app_is_back(
    browser: Browser, tmp_path: Path
) -> None:
    write_photos(tmp_path / "garden", 2)
    with running(tmp_path / "garden") as app, visiting(browser, app) as page:
        page.route("**/thumb/*", lambda route: route.abort())
        page.reload()
        expect(page.locator(".cards .thumb")).to_have_count(6)
        expect(page.locator(".cards .thumb img[hidden]")).to_have_count(6)
        page.unroute("**/thumb/*")
        page.context.set_offline(True)
        page.get_by_label("Delete the class noon").click()
        expect(page.locator(".banner")).to_be_visible()
        page.context.set_offline(False)
        expect(page.locator(".banner")).to_have_count(0, timeout=SECONDS)
        expect(page.locator(".cards .thumb img:not([hidden])")).to_have_count(6)


def test_two_tabs_show_the_same(page: Page, app: Any) -> None:
    make_classes(page)
    other = page.context.new_page()
    other.goto(app.url)
    other.get_by_label("Delete the class noon").click()
    expect(card(page, "noon")).to_have_count(0)
    page.get_by_role("button", name="Undo: delete noon").click()
    expect(card(other, "noon")).to_be_visible()


def test_a_slow_network(page: Page, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    make_classes(page)
    session = page.context.new_cdp_session(page)
    session.send(
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": 300,
            "downloadThroughput": 40_000,
            "uploadThroughput": 20_000,
        },
    )
    add(page, "night", photos["night"])
    expect(page.locator(".toast.progress")).to_contain_text("Adding photos")
    expect(card(page, "night").locator(".thumb")).to_have_count(2, timeout=SECONDS)


@pytest.mark.slow
def test_5000_photos_stay_fluid(browser: Browser, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for c in range(50):
        folder = tmp_path / "garden" / f"class {c}"
        folder.mkdir(parents=True)
        for i in range(100):
            pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).resize((64, 64), 0).save(folder / f"{i}.png")
    with (
        running(tmp_path / "garden", backbone=toy(), method="ncc", threshold=0) as app,
        visiting(browser, app) as page,
    ):
        expect(page.locator(".card")).to_have_count(51, timeout=SECONDS)
        # Every frame of a scroll through all classes, while the model is learning.
        frames = page.evaluate(
            """async () => {
                const times = [];
                for (let y = 0; y < document.documentElement.scrollHeight; y += 150) {
                    const start = performance.now();
                    scrollTo(0, y);
                    await new Promise((done) => requestAnimationFrame(done));
                    times.push(performance.now() - start);
                }
                return times;
            }"""
        )
        assert page.locator(".thumb").count() < 50 * 40
        assert np.median(frames) < 100, np.median(frames)  # milliseconds, on a busy machine
        started = time.monotonic()
        page.get_by_label("Name of the new class").fill("another")
        page.get_by_role("button", name="Create", exact=True).click()
        expect(card(page, "another")).to_have_count(1, timeout=SECONDS)
        assert time.monotonic() - started < 5


def test_the_camera(page: Page, app: Any) -> None:
    make_classes(page)
    page.get_by_label("Take photos of leaf").click()
    expect(page.locator("video")).to_be_visible()
    page.wait_for_timeout(1500)
    button = page.get_by_role("button", name="Take a photo")
    button.click()
    expect(page.locator("dialog")).to_contain_text("1 photo taken")
    expect(button).to_be_focused()
    page.keyboard.down("Space")  # held: several photos
    expect(page.locator("dialog")).to_contain_text(re.compile(r"([4-9]|\d\d) photos taken"))
    page.keyboard.up("Space")
    page.wait_for_timeout(3000)  # the last ones are still being encoded
    count = int(page.locator("dialog [aria-live]").inner_text().split()[0])
    page.wait_for_timeout(700)
    expect(page.locator("dialog")).to_contain_text(f"{count} photos taken")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Take photos of leaf")).to_be_focused()
    expect(card(page, "leaf")).to_contain_text(f"{count} photos")
    assert {path.suffix for path in (app.folder / "leaf").iterdir()} == {".jpg"}
    page.keyboard.press("Control+z")  # what was recorded while the key was held is one step
    expect(card(page, "leaf").locator(".thumb")).to_have_count(1)


def test_the_live_camera_names_what_it_sees(page: Page, app: Any, tmp_path: Path) -> None:
    fit(page, write_photos(tmp_path / "photos", 3))
    page.get_by_role("link", name="Try it").click()
    page.get_by_role("button", name="Live camera").click()
    expect(page.locator(".live .ranking li")).to_have_count(3, timeout=SECONDS)
    names = (*CLASSES, *(f"{name}?" for name in CLASSES), "None of these")
    assert page.locator(".live-name").inner_text() in names
    page.get_by_role("button", name="Keep this photo").click()
    expect(page.locator(".result:not(.notYet)")).to_have_count(1, timeout=SECONDS)
    page.get_by_role("button", name="Stop the camera").click()
    expect(page.locator("video")).to_have_count(0)
    expect(page.get_by_role("button", name="Live camera")).to_be_focused()
    assert len(list((app.folder / ".miv-app/new").iterdir())) == 1  # frames are not kept


def test_several_photos_are_selected_moved_and_deleted(
    page: Page, app: Any, tmp_path: Path
) -> None:
    make_classes(page)
    photos = write_photos(tmp_path / "photos", 6)
    add(page, "night", photos["night"])
    thumbs = card(page, "night").locator(".thumb")
    expect(thumbs).to_have_count(6)
    first, third = thumbs.nth(0), thumbs.nth(2)
    first.click(modifiers=["Control"])
    third.click(modifiers=["Shift"])  # everything in between
    bar = page.get_by_role("region", name="Selected photos")
    expect(bar).to_contain_text("3 photos selected")
    bar.get_by_label("Move to").select_option("noon")
    expect(card(page, "noon").locator(".thumb")).to_have_count(3)
    expect(bar).to_have_count(0)
    page.locator(".toast").get_by_role("button", name="Undo").click()
    expect(thumbs).to_have_count(6)
    # By keys: select, extend, drag nothing, delete; the focus stays in the grid.
    thumbs.nth(0).focus()
    page.keyboard.press("x")
    page.keyboard.press("Shift+ArrowRight")
    expect(bar).to_contain_text("2 photos selected")
    page.keyboard.press("Delete")
    expect(thumbs).to_have_count(4)
    expect(thumbs.nth(1)).to_be_focused()
    page.keyboard.press("Control+a")
    expect(bar).to_contain_text("4 photos selected")
    thumbs.nth(0).drag_to(card(page, "leaf"))  # the whole selection
    expect(card(page, "leaf").locator(".thumb")).to_have_count(4)
    page.keyboard.press("Escape")
    # A selection can become a new class.
    card(page, "leaf").locator(".thumb").nth(0).click(modifiers=["Control"])
    bar.get_by_label("Move to").select_option("New class…")
    bar.get_by_label("Name of the new class").fill("dusk")
    page.keyboard.press("Enter")
    expect(card(page, "dusk").locator(".thumb")).to_have_count(1, timeout=SECONDS)
    page.keyboard.press("Control+z")  # the class and the move are one step
    expect(card(page, "dusk")).to_have_count(0)
    expect(card(page, "leaf").locator(".thumb")).to_have_count(4)


def test_photos_are_dragged_with_a_finger(browser: Browser, app: Any, tmp_path: Path) -> None:
    size = {"width": 390, "height": 2000}  # so that nothing has to be scrolled
    with visiting(browser, app, has_touch=True, is_mobile=True, viewport=size) as page:
        make_classes(page)
        add(page, "night", write_photos(tmp_path / "photos", 2)["night"])
        photo = card(page, "night").locator(".thumb").first
        expect(photo).to_be_visible()
        session = page.context.new_cdp_session(page)

        def touch(kind: str, *points: dict[str, float]) -> None:
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

        box, target = photo.bounding_box(), card(page, "noon").bounding_box()
        assert box is not None
        assert target is not None
        start = {"x": box["x"] + 20, "y": box["y"] + 20}
        end = {"x": target["x"] + 60, "y": target["y"] + 20}
        touch("touchStart", start)
        page.wait_for_timeout(600)  # held
        expect(page.get_by_role("region", name="Selected photos")).to_be_visible()
        for part in (0.3, 0.6, 1.0):
            touch("touchMove", {k: start[k] + part * (end[k] - start[k]) for k in start})
        expect(page.locator(".ghost")).to_be_visible()
        touch("touchEnd")
        expect(card(page, "noon").locator(".thumb")).to_have_count(1)
        expect(page.locator(".ghost")).to_have_count(0)
        expect(page.locator("dialog")).to_have_count(0)


def test_a_class_is_merged_by_renaming_and_deleted_with_a_way_back(
    page: Page, app: Any, tmp_path: Path
) -> None:
    photos = write_photos(tmp_path / "photos", 2)
    make_classes(page)
    for name in ("night", "noon"):
        add(page, name, photos[name])
        expect(card(page, name).locator(".thumb")).to_have_count(2)
    page.get_by_label("Rename night").click()
    page.get_by_label("Name of the class").fill("NOON")
    page.keyboard.press("Enter")
    expect(card(page, "noon").locator(".thumb")).to_have_count(4)
    expect(card(page, "night")).to_have_count(0)
    expect(page.locator(".toast")).to_contain_text("night is now part of noon.")
    page.locator(".toast").get_by_role("button", name="Undo").click()
    expect(card(page, "night").locator(".thumb")).to_have_count(2)
    page.get_by_label("Delete the class night").click()
    expect(page.locator(".toast").last).to_contain_text("night and its 2 photos were deleted.")
    page.get_by_label("Delete the class leaf").click()
    expect(card(page, "leaf")).to_have_count(0)
    # The earlier message no longer offers to undo what is not the last change.
    expect(page.locator(".toast", has_text="night and its")).to_have_count(0)
    page.locator(".toast", has_text="leaf and its").get_by_role("button", name="Undo").click()
    expect(card(page, "leaf")).to_be_visible()


def test_none_of_these_and_new_classes_are_taught(page: Page, app: Any, tmp_path: Path) -> None:
    fit(page, write_photos(tmp_path / "photos", 3))
    new = write_photos(tmp_path / "new", 2, first=20)
    page.get_by_role("link", name="Try it").click()
    page.locator(".try input[type=file]").first.set_input_files(new["night"] + new["leaf"])
    expect(page.locator(".result:not(.notYet)")).to_have_count(4, timeout=SECONDS)
    page.get_by_label("Another class for leaf-20.jpg").select_option("None of these")
    expect(page.locator(".result")).to_have_count(3)
    assert (app.folder / "other/leaf-20.jpg").exists()
    page.wait_for_timeout(500)  # the focus goes to the next photo
    page.get_by_label("Details of leaf-21.jpg").focus()
    page.keyboard.press("0")
    expect(page.locator(".result")).to_have_count(2)
    assert (app.folder / "other/leaf-21.jpg").exists()
    page.get_by_label("Another class for night-20.jpg").select_option("New class…")
    page.get_by_label("Name of a new class for night-20.jpg").fill("dusk")
    page.keyboard.press("Enter")
    expect(page.locator(".result")).to_have_count(1)
    assert (app.folder / "dusk/night-20.jpg").exists()
    page.get_by_role("link", name="Teach").click()
    expect(card(page, "other")).to_contain_text("are named “none of these”")


def test_dialogs_by_keys(page: Page, app: Any, tmp_path: Path) -> None:
    make_classes(page)
    add(page, "night", write_photos(tmp_path / "photos", 3)["night"])
    thumbs = card(page, "night").locator(".thumb")
    expect(thumbs).to_have_count(3)
    names = [thumbs.nth(i).get_attribute("aria-label") for i in range(3)]
    thumbs.nth(0).focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog")
    expect(dialog).to_have_attribute("aria-label", names[0])
    page.keyboard.press("ArrowRight")  # at once, without Tab
    expect(dialog).to_have_attribute("aria-label", names[1])
    page.keyboard.press("Escape")
    expect(thumbs.nth(1)).to_be_focused()  # the photo that was shown last
    page.keyboard.press("Enter")
    page.keyboard.press("Delete")
    expect(dialog).to_have_attribute("aria-label", names[2])  # the next one
    page.keyboard.press("Escape")
    expect(thumbs.nth(1)).to_be_focused()
    page.get_by_label("Delete the class night").focus()
    page.keyboard.press("Enter")
    expect(card(page, "night")).to_have_count(0)
    assert page.evaluate("document.activeElement.className").startswith("cards")
    # One photo of a grid is a stop of Tab, however many there are.
    page.keyboard.press("Control+z")
    expect(thumbs).to_have_count(2)
    assert [thumbs.nth(i).get_attribute("tabindex") for i in range(2)].count("0") == 1


def test_a_long_name_fits_the_photo_dialog(browser: Browser, tmp_path: Path) -> None:
    name = "a class with a name that is much longer than anybody would have thought possible"
    photos = write_photos(tmp_path / "photos", 1)
    shutil.copytree(photos["leaf"][0].parent, tmp_path / "garden" / name)
    (tmp_path / "garden" / "leaf").mkdir()
    with running(tmp_path / "garden") as app:
        for width in (1280, 390):
            size = {"width": width, "height": 800}
            with visiting(browser, app, viewport=size) as page:
                page.locator(".thumb").click()
                assert page.locator("dialog").evaluate("e => e.scrollWidth <= e.clientWidth")
                assert page.locator(".facts").evaluate("e => e.scrollWidth <= e.clientWidth")


def test_an_example_to_look_around(page: Page) -> None:
    page.get_by_role("button", name="Look around with an example").click()
    expect(page.locator(".card")).to_have_count(5, timeout=SECONDS)  # and the one for a new class
    expect(page.locator(".ring")).to_be_visible(timeout=SECONDS)
    page.get_by_role("link", name="Try it").click()
    expect(page.locator(".result:not(.notYet)")).to_have_count(12, timeout=SECONDS)
    page.keyboard.press("Control+z")  # one step
    page.get_by_role("link", name="Teach").click()
    expect(page.locator(".welcome")).to_be_visible()


def test_new_photos_are_learned_from_if_that_is_chosen(browser: Browser, tmp_path: Path) -> None:
    write_photos(tmp_path / "garden", 3)
    new = write_photos(tmp_path / "new", 3, first=20)
    with running(tmp_path / "garden", recipe="mivhead") as app, visiting(browser, app) as page:
        page.get_by_role("link", name="Try it").click()
        files = [path for paths in new.values() for path in paths]
        page.locator(".try input[type=file]").first.set_input_files(files)
        expect(page.locator(".result:not(.notYet)")).to_have_count(9, timeout=SECONDS)
        page.get_by_label("Learn from these photos, too").check()
        page.get_by_role("link", name="Teach").click()
        expect(page.locator(".insights")).to_contain_text(
            "Learned from 9 new photos without names", timeout=SECONDS
        )
        page.reload()
        page.get_by_role("link", name="Try it").click()
        expect(page.get_by_label("Learn from these photos, too")).to_be_checked()
        expect(page.locator(".check")).to_contain_text("Learned from 9 new photos")


def test_code_to_copy_and_a_phone(page: Page, app: Any) -> None:
    make_classes(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("Download", exact=True).click()
    page.get_by_role("button", name="Use it in your own programs").click()
    page.locator("dialog").get_by_role("button", name="Copy").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f"miv predict {app.folder}/model.miv new-photos/ --sort-into sorted/"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.get_by_label("Use a phone").click()
    expect(page.locator("dialog")).to_contain_text("--host 0.0.0.0")
    expect(page.locator("dialog")).to_contain_text("is not encrypted")


def test_it_speaks_german(browser: Browser, app: Any, tmp_path: Path) -> None:
    with visiting(browser, app, locale="de-AT") as page:
        expect(page.get_by_role("heading")).to_have_text("Was möchtest du unterscheiden?")
        assert page.locator("html").get_attribute("lang") == "de"
        page.get_by_label("Sprache").select_option("English")
        expect(page.get_by_role("heading")).to_have_text("What do you want to tell apart?")


def test_every_language_has_every_text(page: Page) -> None:
    shapes = page.evaluate(
        """async () => {
            const { en } = await import("/static/strings.en.js");
            const { de } = await import("/static/strings.de.js");
            const shape = (x) => Array.isArray(x) ? x.map(shape)
                : typeof x === "object" ? Object.entries(x).map(([k, v]) => [k, shape(v)])
                : typeof x === "function" ? `function of ${x.length}` : typeof x;
            return [shape(en), shape(de)];
        }"""
    )
    assert shapes[0] == shapes[1]


def test_percentages_are_those_of_the_command_line(page: Page) -> None:
    shown = page.evaluate(
        """async () => {
            const { percent } = await import("/static/numbers.js");
            return [1, 0.99996, 0.995, 0.947, 0.004, 0].map(percent);
        }"""
    )
    assert [each.replace("\u00a0", " ") for each in shown] == [
        *("100 %", ">99 %", ">99 %", "95 %", "<1 %", "0 %")
    ]


def test_an_expired_page_says_so(page: Page, app: Any) -> None:
    make_classes(page)
    page.context.clear_cookies()
    page.get_by_label("Delete the class noon").click()
    expect(page.locator(".toast.error")).to_contain_text("This page has expired")
    page.reload()
    expect(page.locator("body")).to_contain_text("This link has expired")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_accessible_in_every_form(
    browser: Browser, tmp_path: Path, scheme: str, width: int
) -> None:
    axe = find_axe()
    write_photos(tmp_path / "garden", 3)
    name = "a class with a name that is much longer than anybody would have thought possible"
    (tmp_path / "garden" / name).mkdir()
    size = {"width": width, "height": 800}
    with (
        running(tmp_path / "garden") as app,
        visiting(browser, app, color_scheme=scheme, viewport=size) as page,
    ):

        def check(what: str) -> None:
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, what
            page.evaluate(axe)
            found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
            assert not "\n".join(
                f"{what}: {each['id']}: {node['html']}\n{node['failureSummary']}"
                for each in found["violations"]
                for node in each["nodes"]
            )

        expect(page.locator(".ring")).to_be_visible(timeout=SECONDS)
        check("teach")
        page.locator(".cards .thumb").first.focus()
        page.keyboard.press("x")
        check("selection")
        page.keyboard.press("Escape")
        page.keyboard.press("Enter")
        check("photo")
        page.keyboard.press("Escape")
        page.get_by_label("Take photos of leaf").click()
        check("camera")
        page.keyboard.press("Escape")
        page.locator("summary[aria-label=Download]").click()
        check("menu")
        page.get_by_role("button", name="Use it in your own programs").click()
        check("code")
        page.keyboard.press("Escape")
        if width > 640:
            page.get_by_label("Use a phone").click()
            check("phone")
            page.keyboard.press("Escape")
        page.get_by_role("link", name="Try it").click()
        new = write_photos(tmp_path / "new", 1, first=20)
        page.locator(".try input[type=file]").first.set_input_files(new["leaf"])
        expect(page.locator(".result:not(.notYet)")).to_have_count(1, timeout=SECONDS)
        check("try")
        page.get_by_role("button", name="Live camera").click()
        expect(page.locator(".live .ranking li").first).to_be_visible(timeout=SECONDS)
        check("live")


def find_axe() -> str:
    """The source of axe-core."""
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text("utf-8")


# What the documentation shows: digits that 43 people wrote, which scikit-learn carries, and
# photographs of something else, which matplotlib and scikit-learn carry.
DIGITS = {"three": 3, "four": 4, "eight": 8, "nine": 9}


def write_digits(folder: Path, first: int, count: int) -> None:
    from mivhead.datasets.bundled import enlarge_scan, load_scans

    scans, labels = load_scans()
    for name, digit in DIGITS.items():
        (folder / name).mkdir(parents=True)
        rows = np.flatnonzero(labels == digit)[first::14][:count]  # of different people
        for number, row in enumerate(rows, 1):
            enlarge_scan(scans[row]).save(folder / name / f"{name} {number}.png")


def write_others(folder: Path) -> list[Path]:
    from matplotlib.cbook import get_sample_data
    from sklearn.datasets import load_sample_image

    with get_sample_data("grace_hopper.jpg") as portrait:
        Image.open(portrait).save(folder / "portrait.jpg")
    Image.fromarray(load_sample_image("flower.jpg")).save(folder / "flower.jpg")
    return [folder / "portrait.jpg", folder / "flower.jpg"]


SHOWN = """() => [...document.images].every(
  (each) => each.getBoundingClientRect().top > innerHeight || (each.complete && each.naturalWidth)
)"""


def capture(page: Page, path: Path) -> None:
    """Write a screenshot, as soon as all pictures are there."""
    while not page.evaluate(SHOWN):
        page.wait_for_timeout(100)
    page.screenshot(path=path)


def take(page: Page, path: Path) -> None:
    """Write a screenshot with 128 colours, a quarter of its size."""
    capture(page, path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(path, optimize=True)


@pytest.mark.skipif("MIV_PICTURES" not in os.environ, reason="MIV_PICTURES is not set")
def test_pictures_of_the_documentation(browser: Browser, tmp_path: Path) -> None:
    pictures = Path(os.environ["MIV_PICTURES"])
    digits, new = tmp_path / "digits", tmp_path / "new"
    write_digits(digits, 0, 9)
    write_digits(new, 7, 3)
    (digits / "nine/nine 2.png").rename(digits / "four/four 10.png")  # a mistake to find
    files = [*sorted(new.rglob("*.png")), *write_others(new)]
    with running(digits, recipe="mivhead") as app:
        for name, scheme, width, height in (
            *(("teach", "light", 1280, 860), ("dark", "dark", 1280, 860)),
            ("phone", "light", 390, 844),
        ):
            size = {"width": width, "height": height}
            with visiting(browser, app, color_scheme=scheme, viewport=size) as page:
                expect(page.locator(".ring")).to_be_visible(timeout=SECONDS)
                expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)
                page.wait_for_timeout(1000)
                take(page, pictures / f"app-{name}.png")
                if name == "teach":
                    page.get_by_role("link", name="Try it").click()
                    page.locator(".try input[type=file]").first.set_input_files(files)
                    named = page.locator(".result:not(.notYet)")
                    expect(named).to_have_count(len(files), timeout=SECONDS)
                    expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)
                    expect(page.locator(".toast")).to_have_count(0)
                    page.wait_for_timeout(1000)
                    take(page, pictures / "app-try.png")


@pytest.mark.skipif("MIV_PICTURES" not in os.environ, reason="MIV_PICTURES is not set")
def test_animation_of_the_readme(browser: Browser, tmp_path: Path) -> None:
    photos, new, frames = tmp_path / "photos", tmp_path / "new", []
    write_digits(photos, 0, 5)
    write_digits(new, 7, 2)
    others = write_others(new)
    view = {"width": 1120, "height": 740}
    with (
        running(tmp_path / "digits", recipe="mivhead") as app,
        visiting(browser, app, color_scheme="light", viewport=view) as page,
    ):

        def keep(milliseconds: int) -> None:
            page.wait_for_timeout(1000)
            path = tmp_path / f"{len(frames)}.png"
            capture(page, path)
            frames.append((Image.open(path).convert("RGB").resize((896, 592)), milliseconds))

        names = page.locator("input[type=text]")
        keep(1500)
        names.nth(0).fill("three")
        names.nth(1).fill("four")
        keep(1200)
        page.get_by_role("button", name="Start").click()
        for name in ("three", "four"):
            keep(900)
            files = sorted((photos / name).iterdir())
            card(page, name).locator("input[type=file]").set_input_files(files)
        expect(page.locator(".ring")).to_be_visible(timeout=SECONDS)
        expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)
        keep(3000)
        page.get_by_role("link", name="Try it").click()
        keep(900)
        files = [others[0], *(new / "three").iterdir(), *(new / "four").iterdir()]
        page.locator(".try input[type=file]").first.set_input_files(files)
        expect(page.locator(".result:not(.notYet)")).to_have_count(5, timeout=SECONDS)
        expect(page.locator(".toast")).to_have_count(0, timeout=SECONDS)
        expect(page.locator(".status.ready")).to_be_visible(timeout=SECONDS)
        keep(4000)
    pictures, times = zip(*frames, strict=True)
    pictures[0].save(
        Path(os.environ["MIV_PICTURES"]) / "app.webp",
        save_all=True,
        append_images=pictures[1:],
        duration=list(times),
        loop=0,
        quality=72,
    )
