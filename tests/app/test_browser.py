"""The app in a real browser: the journey of somebody who makes a classifier, and what can go wrong.

The tests need Playwright and a Chromium (`apt-get install chromium`), and are skipped without. With
`MIV_PICTURES=docs/pictures`, the screenshots of the documentation are written.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright

from mivhead import FewShotClassifier
from mivhead.app.learner import Learner
from mivhead.app.outputs import can_export_web
from mivhead.app.project import Project
from mivhead.app.routes import make_server
from tests.helpers.services import serving

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
SECONDS = 90_000  # milliseconds that learning may take on a busy machine
expect.set_options(timeout=SECONDS)
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


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Any]:
    """Run the app in this process."""
    options = options or {"recipe": "experts", "threshold": 0}
    with closing(Project(folder)) as project:
        learner = Learner(project, FewShotClassifier(verbose=False, **options))
        token = "secret"
        learner.start()
        with serving(make_server(project, learner, token)) as address:
            yield SimpleNamespace(folder=project.folder, url=f"{address}/?token={token}")
        learner.stop()
        learner._thread.join()


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


def drop(page: Page, target: Any, paths: list[Path]) -> None:
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
        expect(card(page, name).locator(".thumb")).to_have_count(len(files))
    expect(page.locator(".ring")).to_be_visible()
    expect(page.locator(".status.ready")).to_be_visible()


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
    drop(page, page.locator(".try"), files)
    expect(page.locator(".result:not(.notYet)")).to_have_count(6)

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

    expect(page.locator(".status.ready")).to_be_visible()
    page.get_by_label("Sort by").select_option("Label these next")
    expect(page.locator(".result .reason").first).to_contain_text("?")

    # Look at one: where the model looked, and what it compared the photo with.
    page.get_by_label("Details of noon-20.jpg").click()
    expect(page.locator(".closest img").first).to_be_visible()
    expect(page.locator(".facts")).to_contain_text(re.compile("points? to|unlike all"))
    page.get_by_label("Where it looked").check()
    page.keyboard.press("Escape")

    page.reload()  # the same view, the same photos
    expect(page.locator(".result")).to_have_count(5)
    page.get_by_role("link", name="Teach").click()
    expect(card(page, "leaf").locator(".thumb")).to_have_count(5)
    expect(page.locator(".status.ready")).to_be_visible()

    for title, suffix in (
        *(("Model", ".miv"), ("Names as a table", ".csv")),
        *(("Sorted folders", ".zip"), ("Exported classifier", ".onnx")),
        *((("Web page", ".zip"),) if can_export_web() else ()),
    ):
        page.get_by_text("Download", exact=True).click()
        with page.expect_download(timeout=SECONDS) as download:
            page.get_by_role("link", name=re.compile(f"^{title}")).click()
        assert download.value.suggested_filename.endswith(suffix)
        assert download.value.path().stat().st_size > 100


def test_folders_are_dropped_and_chosen(page: Page, app: Any, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 3)
    (tmp_path / "photos/leaf/.DS_Store").write_bytes(b"litter")
    (tmp_path / "photos/leaf/notes.txt").write_text("not a photo")
    # A folder of class folders on the empty page: every folder becomes a class.
    drop(page, page.locator(".welcome"), [tmp_path / "photos"])
    for name in CLASSES:
        expect(card(page, name).locator(".thumb")).to_have_count(3)
    expect(page.locator(".problems")).to_have_count(0)
    page.keyboard.press("Control+z")  # one step
    expect(page.locator(".welcome")).to_be_visible()
    page.keyboard.press("Control+y")
    expect(page.locator(".toast").last).to_contain_text("Redone: added 9 photos.")
    # A folder on a card: its photos join this class.
    more = write_photos(tmp_path / "more", 2, first=10)
    drop(page, card(page, "noon"), [tmp_path / "more/noon", more["leaf"][0]])
    expect(card(page, "noon").locator(".thumb")).to_have_count(6)
    assert (app.folder / "noon/leaf-10.jpg").exists()
    # Photos without a folder, where they belong to no class.
    drop(page, page.locator(".new-class"), more["night"])
    expect(page.locator(".toast").last).to_contain_text("Drop photos on a class")
    page.get_by_role("link", name="Try it").click()
    page.locator(".try input[webkitdirectory]").set_input_files(tmp_path / "more")
    expect(page.locator(".result")).to_have_count(6)


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
    page.get_by_role("link", name="Try it").click()
    copy_and_paste(70)
    expect(page.locator(".result")).to_have_count(1)


def test_200_photos_at_once_and_a_text_file_among_them(page: Page, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(200):
        pixels = rng.integers(0, 255, (24, 24, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.jpg")
    (tmp_path / "notes.jpg").write_text("This is not a photo.")
    make_classes(page)
    drop(page, card(page, "noon"), sorted(tmp_path.glob("*.jpg")))
    expect(card(page, "noon")).to_contain_text("200 photos")
    expect(card(page, "noon").locator(".problems")).to_contain_text("notes.jpg is not a JPEG")
    assert card(page, "noon").locator(".thumb").count() < 60  # the others are not in sight
    page.keyboard.press("Control+z")  # one step
    expect(card(page, "noon")).to_contain_text("0 photos")


def test_a_page_whose_app_was_stopped_says_so(browser: Browser, tmp_path: Path) -> None:
    with ExitStack() as visit:
        with running(tmp_path / "garden") as app:
            page = visit.enter_context(visiting(browser, app))
            make_classes(page)
        expect(page.locator(".banner")).to_contain_text("The app cannot be reached")


def test_the_camera(page: Page, app: Any) -> None:
    make_classes(page)
    page.get_by_label("Take photos of leaf").click()
    expect(page.locator("video")).to_be_visible()
    expect(page.locator("video")).not_to_have_js_property("videoWidth", 0)
    button = page.get_by_role("button", name="Take a photo")
    button.click()
    expect(page.locator("dialog")).to_contain_text("1 photo taken")
    expect(button).to_be_focused()
    page.keyboard.down("Space")  # held: several photos
    expect(page.locator("dialog")).to_contain_text(re.compile(r"([4-9]|\d\d) photos taken"))
    page.keyboard.up("Space")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Take photos of leaf")).to_be_focused()
    assert {path.suffix for path in (app.folder / "leaf").iterdir()} == {".jpg"}


def test_the_live_camera_names_what_it_sees(page: Page, app: Any, tmp_path: Path) -> None:
    fit(page, write_photos(tmp_path / "photos", 3))
    page.get_by_role("link", name="Try it").click()
    page.get_by_role("button", name="Live camera").click()
    expect(page.locator(".live-name")).to_be_visible()
    names = (*CLASSES, *(f"{name}?" for name in CLASSES), "None of these")
    assert page.locator(".live-name").inner_text() in names
    page.get_by_role("button", name="Keep this photo").click()
    expect(page.locator(".result:not(.notYet)")).to_have_count(1)
    page.get_by_role("button", name="Stop the camera").click()
    expect(page.locator("video")).to_have_count(0)
    expect(page.get_by_role("button", name="Live camera")).to_be_focused()
    assert len(list((app.folder / ".miv-app/new").iterdir())) == 1  # frames are not kept
    page.evaluate("void (navigator.mediaDevices.getUserMedia = () => Promise.reject())")
    page.get_by_role("button", name="Live camera").click()
    expect(page.locator(".live")).to_contain_text("The camera cannot be used")
    expect(page.locator(".live")).not_to_contain_text(re.compile("Hold something|Stop"))


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
    page.get_by_label("Rename leaf").click()
    page.get_by_label("Name of the class").fill("&lt;b&gt; 'leaf'")
    page.keyboard.press("Enter")
    expect(card(page, "&lt;b&gt; 'leaf'")).to_be_visible()


def test_a_photo_is_selected_with_a_finger(browser: Browser, app: Any, tmp_path: Path) -> None:
    size = {"width": 390, "height": 2000}  # so that nothing has to be scrolled
    with visiting(browser, app, has_touch=True, is_mobile=True, viewport=size) as page:
        make_classes(page)
        add(page, "night", write_photos(tmp_path / "photos", 2)["night"])
        photo = card(page, "night").locator(".thumb").first
        expect(photo).to_be_visible()
        box = photo.bounding_box()
        assert box is not None
        session = page.context.new_cdp_session(page)
        point = {"x": box["x"] + 20, "y": box["y"] + 20}
        touch = {"type": "touchStart", "touchPoints": [point]}
        session.send("Input.dispatchTouchEvent", touch)  # held
        bar = page.get_by_role("region", name="Selected photos")
        expect(bar).to_contain_text("1 photo selected")
        session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        expect(page.locator("dialog")).to_have_count(0)
        bar.get_by_label("Move to").select_option("noon")
        expect(card(page, "noon").locator(".thumb")).to_have_count(1)


def test_none_of_these_and_new_classes_are_taught(page: Page, app: Any, tmp_path: Path) -> None:
    fit(page, write_photos(tmp_path / "photos", 3))
    new = write_photos(tmp_path / "new", 2, first=20)
    page.get_by_role("link", name="Try it").click()
    page.locator(".try input[type=file]").first.set_input_files(new["night"] + new["leaf"])
    expect(page.locator(".result:not(.notYet)")).to_have_count(4)
    page.get_by_label("Another class for leaf-20.jpg").select_option("None of these")
    expect(page.locator(".result")).to_have_count(3)
    assert (app.folder / "other/leaf-20.jpg").exists()
    page.get_by_label("Details of leaf-21.jpg").focus()
    page.keyboard.press("0")
    expect(page.locator(".result")).to_have_count(2)
    assert (app.folder / "other/leaf-21.jpg").exists()
    page.get_by_label("Another class for night-20.jpg").select_option("New class…")
    page.evaluate("void (window.confirm = (text) => Boolean(window.asked = text))")
    page.get_by_label("Name of a new class for night-20.jpg").fill("nicht")
    page.keyboard.press("Enter")
    expect(page.locator(".result")).to_have_count(1)
    assert (app.folder / "nicht/night-20.jpg").exists()
    asked = "'nicht' is nearly the class 'night'. Use this name anyway?"
    assert page.evaluate("window.asked") == asked
    page.get_by_role("link", name="Teach").click()
    expect(card(page, "other")).to_contain_text("are named “none of these”")


def test_fewer_mistakes_or_more_names(browser: Browser, tmp_path: Path) -> None:
    from sklearn.datasets import load_sample_images

    garden = tmp_path / "garden"
    write_photos(garden, 4)
    (garden / ".miv-app/new").mkdir(parents=True)
    temple, flower = (image[60:280, 100:320] for image in load_sample_images().images)
    for i, light in enumerate((0.4, 0.46, 0.52, 1.0)):  # from night to noon
        Image.fromarray((light * temple).astype(np.uint8)).save(garden / f".miv-app/new/{i}.png")
    foreign = Image.fromarray(temple // 2 + flower // 2)
    foreign.save(garden / ".miv-app/new/foreign.png")
    with running(garden, recipe="mivhead") as app, visiting(browser, app) as page:
        page.get_by_role("link", name="Try it").click()
        expect(page.locator(".status.ready")).to_be_visible()
        slider, unsure = page.get_by_role("slider"), page.locator(".chip.unsure span")
        expect(slider).to_have_value("2")
        slider.focus()
        page.keyboard.press("Home")
        expect(unsure).to_have_text(re.compile("[1-3]"))
        page.keyboard.press("End")
        expect(unsure).to_have_text("0")
        page.reload()
        expect(slider).to_have_value("4")
        # What is none of these has no bars.
        result = page.get_by_role("article", name="foreign.png: None of these")
        expect(result).to_contain_text("unlike all your photos; closest: ")
        expect(result).not_to_contain_text("%")
        page.get_by_label("Details of foreign.png").click()
        expect(page.locator(".facts")).to_contain_text("unlike all your photos; closest: ")
        expect(page.locator("dialog .bar")).to_have_count(0)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_accessible_in_every_form(
    browser: Browser, tmp_path: Path, scheme: str, width: int
) -> None:
    package = pytest.importorskip("axe_playwright_python")
    axe = (Path(package.__file__).parent / "axe.min.js").read_text("utf-8")
    write_photos(tmp_path / "garden", 3)
    name = "a class with a name that is much longer than anybody would have thought possible"
    (tmp_path / "garden" / name).mkdir()
    size = {"width": width, "height": 800}
    with (
        running(tmp_path / "garden") as app,
        visiting(browser, app, color_scheme=scheme, viewport=size) as page,
    ):

        def check(what: str) -> None:
            page.wait_for_function(STILL)  # colours are measured
            assert page.evaluate("document.documentElement.scrollWidth") <= width, what
            page.evaluate(axe)
            found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
            assert not "\n".join(
                f"{what}: {each['id']}: {node['html']}\n{node['failureSummary']}"
                for each in found["violations"]
                for node in each["nodes"]
            )

        expect(page.locator(".ring")).to_be_visible()
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
        page.get_by_role("link", name="Try it").click()
        new = write_photos(tmp_path / "new", 1, first=20)
        page.locator(".try input[type=file]").first.set_input_files(new["leaf"])
        expect(page.locator(".result:not(.notYet)")).to_have_count(1)
        check("try")
        page.get_by_role("button", name="Live camera").click()
        expect(page.locator(".live-name")).to_be_visible()
        check("live")


@pytest.mark.skipif("MIV_PICTURES" not in os.environ, reason="MIV_PICTURES is not set")
def test_pictures_of_the_documentation(browser: Browser, tmp_path: Path) -> None:
    folder, frames = Path(os.environ["MIV_PICTURES"]), []

    def shoot(page: Page, name: str, seconds: float = 0) -> None:
        page.wait_for_function(SHOWN)
        picture = Image.open(BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
        if name:  # 128 colours make it a quarter as large
            picture.quantize(128).save(folder / f"app-{name}.png", optimize=True)
        if seconds:
            frames.append((picture.resize((1024, 688)), int(1000 * seconds)))

    with running(tmp_path / "digits", recipe="mivhead") as app:
        for name, scheme, width, height in (
            *(("teach", "light", 1280, 860), ("try", "light", 1280, 860)),
            *(("dark", "dark", 1280, 860), ("phone", "light", 390, 844)),
        ):
            size = {"width": width, "height": height}
            with visiting(browser, app, color_scheme=scheme, viewport=size) as page:
                if name == "teach":
                    shoot(page, "", 1.5)
                    page.get_by_role("button", name="Look around with an example").click()
                expect(page.locator(".ring")).to_be_visible()
                expect(page.locator(".status.ready")).to_be_visible()
                if name == "try":
                    page.get_by_role("link", name="Try it").click()
                shoot(page, name, 3.5 if name in ("teach", "try") else 0)
                if name == "try":
                    page.get_by_label("Details of digit 63.png").click()
                    page.get_by_label("Where it looked").check()
                    expect(page.locator(".closest img").first).to_be_visible()
                    shoot(page, "", 3.5)
    pictures, times = zip(*frames, strict=True)
    more: Any = {"append_images": pictures[1:], "duration": times, "loop": 0, "kmax": 1}
    pictures[0].save(folder / "app.webp", save_all=True, quality=80, **more)


STILL = """() => document.getAnimations().every(
  (moving) => moving.playState !== "running" || moving.effect.getTiming().iterations === Infinity
)"""
SHOWN = """() => [...document.images].every(
  (image) => image.getBoundingClientRect().top > innerHeight || image.complete * image.naturalWidth
)"""
