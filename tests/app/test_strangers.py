"""Project folders of strangers: nothing outside is read, moved, written or deleted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("starlette")
from mivhead.app.journal import HIDDEN, KEPT, Journal
from mivhead.app.project import NEW, Project, opened
from mivhead.app.routes import Token, make_server
from mivhead.errors import InputError, MivError, NotAvailableError
from tests.service.conftest import photo


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What the stranger is after: files of the user, outside the project."""
    folder = tmp_path / "home"
    (folder / "Documents").mkdir(parents=True)
    (folder / "Documents" / "thesis.txt").write_text("ten years")
    (folder / "Documents" / "me.png").write_bytes(photo("red"))
    (folder / ".config/autostart").mkdir(parents=True)
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A project that was sent by a stranger."""
    folder = tmp_path / "theirs"
    project = Project(folder)
    for name in ("robin", "wren"):
        project.add_class(name)
        project.add_photo(photo("red" if name == "robin" else "blue"), "1.png", name)
    project.close()
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def forge(folder: Path, *moves: tuple[str, str]) -> None:
    """Write a journal with one change that was begun and not completed."""
    change = {"id": "1", "action": "add", "target": "", "moves": moves, "batch": ""}
    (folder / HIDDEN / "journal.jsonl").write_text(json.dumps({"do": change}) + "\n")


@pytest.mark.parametrize(
    "name",
    [
        *("kept", "new", "thumbs", "lock", "token", "port", "journal.jsonl", "journal.part"),
        *("model.stamp", "model.onnx", "thumbs/0.jpg", "new/deep/er"),
    ],
)
@pytest.mark.parametrize("goal", ["Documents", "Documents/thesis.txt", "nothing yet"])
def test_a_link_in_the_hidden_folder_is_refused(
    theirs: Path, home: Path, name: str, goal: str
) -> None:
    before = contents(home)
    place = theirs / HIDDEN / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(home / goal)
    with pytest.raises(MivError, match="link"):
        Project(theirs)
    assert contents(home) == before


def test_the_hidden_folder_may_not_be_a_link(theirs: Path, home: Path) -> None:
    shutil.move(theirs / HIDDEN, home / "theirs")
    (theirs / HIDDEN).symlink_to(home / "theirs")
    before = contents(home)
    with pytest.raises(NotAvailableError, match="is a link"):
        Project(theirs)
    assert contents(home) == before


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("robin/1.png", "away/.config/autostart/evil.desktop"),
        ("robin/1.png", "away/evil.png"),
        ("away/Documents/me.png", "robin/2.png"),
        ("away/Documents", f"{KEPT}/gone"),
        ("away", f"{KEPT}/gone"),
        ("robin/1.png", "../home/evil.desktop"),
        ("../home/Documents", f"{KEPT}/gone"),
        ("robin/1.png", ".git/hooks/post-checkout"),
        ("robin/1.png", f"{HIDDEN}/token"),
        ("robin/1.png", f"{HIDDEN}/new/../../../home/evil"),
        (KEPT, "robin/kept"),
    ],
)
def test_a_forged_journal_moves_nothing(theirs: Path, home: Path, source: str, target: str) -> None:
    (theirs / ".git/hooks").mkdir(parents=True)
    (theirs / "away").symlink_to(home)
    forge(theirs, (source, target))
    watched = home, theirs / ".git", theirs / "robin"
    before = [contents(each) for each in watched]
    with suppress(NotAvailableError):
        Project(theirs).close()
    assert [contents(each) for each in watched] == before
    with suppress(InputError, NotAvailableError), opened(theirs) as project:
        project.undo()
    assert [contents(each) for each in watched] == before


@pytest.mark.parametrize(
    "record",
    [
        {"do": {"id": "1", "action": "add", "target": "", "moves": [["a", "b", "c"]]}},
        {"do": {"id": "1", "action": "add", "target": "", "moves": [["robin", 7]]}},
        {"do": {"id": 1, "action": "add", "target": "", "moves": []}},
        {"do": {"id": "1", "action": "add", "target": "", "moves": [], "root": "/"}},
        {"do": {"id": "1", "action": ["add"], "target": {}, "moves": []}},
        {"do": [], "undo": []},
        {"undo": ["1"], "redo": ["1"]},
        {"undo": "1"},
        {"made": None},
        {},
        [],
        None,
        "do",
    ],
)
def test_a_journal_is_a_document_with_a_closed_schema(theirs: Path, record: Any) -> None:
    file = theirs / HIDDEN / "journal.jsonl"
    file.write_text(json.dumps(record) + "\n")
    before = contents(theirs / "robin")
    assert not Journal(theirs).done
    assert contents(theirs / "robin") == before


def test_a_pipe_or_a_device_blocks_nothing(theirs: Path) -> None:
    (theirs / HIDDEN / "journal.jsonl").unlink()
    os.mkfifo(theirs / HIDDEN / "journal.jsonl")
    with pytest.raises(InputError, match="a link or a device"):
        Project(theirs)
    with pytest.raises(NotAvailableError, match="not a regular file"):
        Journal(theirs)


def test_links_outside_the_hidden_folder_are_left_out(theirs: Path, home: Path) -> None:
    (theirs / "documents").symlink_to(home / "Documents")
    (theirs / "robin/link.png").symlink_to(home / "Documents/me.png")
    (theirs / "robin/deeper").symlink_to(home / "Documents")
    os.mkfifo(theirs / "robin/pipe.png")
    before = contents(home)
    project = Project(theirs)
    assert project.links == ("documents",)
    classes = project.snapshot().classes
    assert {name: [each.path for each in found] for name, found in classes.items()} == {
        "robin": ["robin/1.png"],
        "wren": ["wren/1.png"],
    }
    with pytest.raises(InputError, match="no class 'documents'"):
        project.remove_class("documents")
    project.remove_class("robin")
    project.undo()
    project.remove_class("robin")
    project.close()
    (theirs / HIDDEN / "journal.jsonl").unlink()
    Project(theirs).close()  # deletes the class for good, but not what it links to
    assert not any((theirs / KEPT).iterdir())
    assert contents(home) == before


@pytest.mark.parametrize("action", ["delete", "add", "undo", "rename"])
def test_a_folder_that_becomes_a_link_later_is_not_followed(
    theirs: Path, home: Path, action: str
) -> None:
    project = Project(theirs)
    (one,) = project.snapshot().classes["robin"]
    before = contents(home)
    for name in (KEPT, NEW, "robin"):
        shutil.move(theirs / name, theirs / f"{name} before".replace("/", "_"))
        (theirs / name).symlink_to(home / "Documents")
    actions: dict[str, Callable[[], Any]] = {
        "delete": lambda: project.remove([one.id]),
        "add": lambda: project.add_photo(photo("green"), "2.png", "robin"),
        "undo": project.undo,
        "rename": lambda: project.rename_class("robin", "dunnock"),
    }
    with pytest.raises(MivError):
        actions[action]()
    assert contents(home) == before
    project.close()


def test_other_files_among_the_new_photos_are_left_out(theirs: Path) -> None:
    (theirs / NEW / "x.py").touch()
    with opened(theirs) as project:
        assert project.snapshot().new == ()


def test_a_very_deep_folder_opens(theirs: Path) -> None:
    place = os.open(theirs / "robin", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        deeper = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = deeper
    os.close(place)
    project = Project(theirs)
    assert len(project.snapshot().classes["robin"]) == 1
    project.remove_class("robin")
    project.close()
    (theirs / HIDDEN / "journal.jsonl").unlink()
    Project(theirs).close()  # forgets the class, and deletes what it can
    subprocess.run(["rm", "-rf", theirs], check=True)  # which pytest could not


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, with room for 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_project_on_a_full_disk_opens(full_disk: Path) -> None:
    folder = full_disk / "birds"
    with opened(folder) as project:
        project.add_class("robin")
        project.add_photo(photo("red"), "1.png", "robin")
    with suppress(OSError), (full_disk / "filler").open("wb") as file:
        while True:
            file.write(bytes(4096))
    with opened(folder) as project:
        Token(project)
        make_server(project, cast("Any", None), Token(project)).close()
        assert len(project.snapshot().classes["robin"]) == 1
        with pytest.raises(NotAvailableError, match="No space left"):
            project.add_photo(photo("blue"), "2.png", "robin")
    (full_disk / "filler").unlink()
    with opened(folder) as project:
        project.undo()
        assert project.snapshot().classes == {"robin": ()}


def test_the_vendored_library_is_the_stated_one() -> None:
    folder = resources.files("mivhead.app") / "static" / "vendor"
    found = hashlib.sha256((folder / "htm-preact.js").read_bytes()).hexdigest()
    assert found in (folder / "LICENSES.txt").read_text("utf-8")
