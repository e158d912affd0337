"""A project folder: classes, photos, thumbnails, undo; what is refused; nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mivhead.app.history import HIDDEN, TRASH, History, last_batch
from mivhead.app.project import MODEL, NEW, Project, check_class_name
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError
from mivhead.images.sources import open_labelled
from tests.conftest import write_images
from tests.service.conftest import photo


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files and folders outside the hidden folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if HIDDEN not in path.parts
    }


def everything(folder: Path) -> list[bytes]:
    """All photos of a project, wherever they are."""
    places = [path for path in folder.rglob("[!.]*.png") if "thumbs" not in path.parts]
    return sorted(path.read_bytes() for path in places)


# What there is.


def test_the_folder_is_plain(project: Project) -> None:
    for name in ("robin", "wren"):
        project.add_class(name)
        project.add_photo(photo("red" if name == "robin" else "blue"), "IMG 1.png", name)
    project.add_photo(photo("green"), "IMG 1.png", None)
    assert (project.folder / "robin/IMG 1.png").read_bytes() == photo("red")
    assert open_labelled(project.folder).ids == ("robin/IMG 1.png", "wren/IMG 1.png")
    assert (project.folder / NEW / "IMG 1.png").exists()
    before = project.snapshot
    project.close()
    with closing(Project(project.folder)) as again:
        after = again.snapshot
        assert (after.classes, after.new) == (before.classes, before.new)


def test_class_folders_that_exist_are_a_project(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "shots", 2)
    (folder / "notes").mkdir()
    (folder / "notes/readme.txt").write_text("not a class")
    (folder / "red/deeper").mkdir()
    (folder / "red/0.png").rename(folder / "red/deeper/0.png")
    for name in ("unsure", "None of these"):  # as `miv predict --sort-into` makes them
        (folder / name).mkdir()
        (folder / name / "1.png").write_bytes(photo("red"))
    with closing(Project(folder)) as project:
        counts = {name: len(photos) for name, photos in project.snapshot.classes.items()}
        assert counts == {"blue": 2, "green": 2, "red": 2}


def test_changes_in_a_file_manager_are_seen(project: Project) -> None:
    project.add_class("robin")
    before = project.snapshot
    project.rescan()
    assert project.snapshot is before
    (project.folder / "robin/by hand.png").write_bytes(photo("red"))
    (project.folder / "robin/text.jpg").write_text("not a photo")
    (project.folder / MODEL).touch()
    project.rescan()
    photos = {each.name: each for each in project.snapshot.classes["robin"]}
    assert set(photos) == {"by hand.png", "text.jpg"}
    with pytest.raises(ImageError):
        project.thumbnail(photos["text.jpg"])
    assert photos["text.jpg"].id in project.problems
    assert photos["by hand.png"].id not in project.problems
    away = project.folder.with_name("unplugged")
    project.folder.rename(away)
    project.rescan()
    assert list(project.snapshot.classes) == ["robin"]
    away.rename(project.folder)


def test_a_photo_keeps_its_id_and_thumbnail_when_it_moves(project: Project) -> None:
    project.add_class("robin")
    added = project.add_photo(photo("red"), "1.png", None)
    thumb = project.thumbnail(added)
    made = thumb.stat().st_mtime_ns
    project.move([added.id], "robin")
    label, moved = project.find(added.id)
    assert label == "robin"
    assert project.thumbnail(moved) == thumb
    assert thumb.stat().st_mtime_ns == made
    with Image.open(thumb) as small:
        assert max(small.size) <= 320


# Undo.


def test_everything_is_undone_and_redone(project: Project) -> None:
    states = [project.snapshot]

    def note(_: object) -> None:
        states.append(project.snapshot)

    note(project.add_class("robin"))
    note(project.add_class("wren"))
    one = project.add_photo(photo("red", 1), "1.png", "robin")
    note(one)
    two = project.add_photo(photo("red", 2), "2.png", None)
    note(two)
    note(project.move([one.id], "wren"))
    note(project.move([two.id], "robin"))
    note(project.rename_class("wren", "dunnock"))
    note(project.rename_class("dunnock", "robin"))  # they become one
    note(project.remove([two.id]))
    note(project.remove_class("robin"))
    for state in reversed(states[:-1]):
        project.undo()
        now = project.snapshot
        assert (now.classes, now.new) == (state.classes, state.new)
    for state in states[1:]:
        project.redo()
        now = project.snapshot
        assert (now.classes, now.new) == (state.classes, state.new)
    project.undo()
    project.add_class("other")
    assert not project.history.undone  # a new change forgets what was undone


def test_a_drop_of_many_photos_is_one_step(project: Project) -> None:
    project.add_class("robin")
    for i in range(5):
        project.add_photo(photo("red", i), "same.png", "robin", batch="drop")
    names = {each.name for each in project.snapshot.classes["robin"]}
    assert names == {"same.png", *(f"same ({i}).png" for i in range(2, 6))}
    assert len(last_batch(project.history.done)) == 5
    project.undo()
    assert project.snapshot.classes == {"robin": ()}


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"))))
def test_undoing_everything_leads_back_and_redoing_everything_forth(
    steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("history").resolve()
    for name in "abcd":
        (root / name).write_text(name)
    place = {name: name for name in "abcd"}
    history = History(root)
    for name, folder in steps:
        target = f"{folder}/{name}"
        if place[name] != target:
            history.make("move", folder, [(place[name], target)])
            place[name] = target
    after = contents(root)
    while history.undo():
        pass
    assert {name for name, data in contents(root).items() if data is not None} == set("abcd")
    while history.redo():
        pass
    assert contents(root) == after


def test_a_change_is_made_completely_or_not_at_all(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    history = History(tmp_path.resolve())
    before = contents(tmp_path)
    for moves in ([("a", "1"), ("b", "c")], [("a", "1"), ("gone", "2")]):  # taken; gone
        with pytest.raises(InputError):
            history.make("move", "", moves)
        assert contents(tmp_path) == before
    assert not history.done


# What is refused.


@pytest.mark.parametrize("data", [b"Hello", b"", photo("red")[:-40]])
def test_what_is_not_a_photo_is_refused_and_nothing_else_is_lost(
    project: Project, data: bytes
) -> None:
    project.add_class("robin")
    project.add_photo(photo("red"), "0.png", "robin")
    before = project.snapshot
    with pytest.raises(ImageError, match=r"1\.jpg"):
        project.add_photo(data, "1.jpg", "robin")
    assert project.snapshot == before


def test_the_same_photo_twice_is_refused(project: Project) -> None:
    project.add_class("robin")
    project.add_class("wren")
    project.add_photo(photo("red"), "1.png", "robin")
    with pytest.raises(InputError, match="robin"):
        project.add_photo(photo("red"), "2.png", "wren")
    project.add_photo(photo("red"), "2.png", None)  # what would the model say?
    with pytest.raises(InputError, match="new photos"):
        project.add_photo(photo("red"), "3.png", None)


@pytest.mark.parametrize("name", ["../evil.png", "a/b.png", "..", "x\0y.png", "é" * 300, "CON.png"])
def test_file_names_stay_inside_their_class(project: Project, name: str) -> None:
    project.add_class("robin")
    added = project.add_photo(photo("red"), name, "robin")
    assert (project.folder / added.path).parent == project.folder / "robin"
    assert (project.folder / added.path).is_file()


@pytest.mark.parametrize(
    "name",
    [
        *("", "  ", "a/b", "..", ".hidden", "nul", "x" * 81, "unsure", "None of these", "a:b"),
        "line\nbreak\0",
    ],
)
def test_names_that_cannot_be_folders_are_refused(project: Project, name: str) -> None:
    with pytest.raises(InputError):
        project.add_class(name)
    assert project.snapshot.classes == {}


def test_names_may_be_any_text(project: Project) -> None:
    for name in ("Blåmes 🐦", "&amp;", "'; DROP TABLE", "100 %"):
        assert check_class_name(name) == name
    assert check_class_name("e\u0301") == "é"
    project.add_class("robin")
    with pytest.raises(InputError, match="exists"):
        project.add_class("Robin")
    project.rename_class("robin", "Robin")
    assert list(project.snapshot.classes) == ["Robin"]


def test_what_is_gone_or_taken_is_named(project: Project, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="robin"):
        project.add_photo(photo("red"), "1.png", "robin")
    with pytest.raises(InputError, match="no longer exists"):
        project.move(["nothing"], None)
    with pytest.raises(NotAvailableError, match="another"):  # a second process
        Project(project.folder)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file"):
        Project(tmp_path / "file")


# Nothing is lost.


@pytest.mark.parametrize("damage", ["garbled", "missing", "another version"])
def test_the_trash_stays_whatever_happens_to_the_hidden_state(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "birds"
    with closing(Project(folder)) as project:
        assert project.message == ""
        project.add_class("robin")
        ids = [project.add_photo(photo("red", i), f"{i}.png", "robin").id for i in range(5)]
        project.remove(ids)
        trash = everything(folder)
    assert len(trash) == 5
    hidden = folder / HIDDEN
    if damage == "garbled":
        for name in ("journal.jsonl", "model.stamp"):
            (hidden / name).write_bytes(b"\xff{")
    elif damage == "missing":
        for path in hidden.iterdir():
            if path.name != "trash":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:  # the trash of a version that kept a journal
        (folder / TRASH).rename(hidden / "kept")
        (hidden / "journal.jsonl").write_text(json.dumps({"made": []}) + "\n")
    for _ in range(2):
        with closing(Project(folder)) as project:
            assert str(hidden / ("kept" if damage == "another version" else "trash")) in (
                project.message
            )
            assert everything(folder) == trash


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
from mivhead.app import history, project as module
from mivhead.app.project import Project
from tests.service.conftest import photo

for line in sys.stdin:  # a child for each, which dies
    moments = int(line)
    if not (child := os.fork()):
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("died", status, flush=True)
else:
    sys.exit()
number = 10 * moments
project = Project({folder!r})

def dying(function):
    def call(*arguments, **options):
        global moments
        moments -= 1
        if moments < 0:
            os._exit(9)
        return function(*arguments, **options)
    return call

for name in ("rename", "replace", "mkdir"):
    setattr(module.Path, name, dying(getattr(module.Path, name)))
os.fsync = dying(os.fsync)
known = list(project.snapshot.classes)
for name in ("a", "b"):
    if name not in known:
        project.add_class(name)
for i in range(2):
    seed = number + i
    added = project.add_photo(photo("red", seed), f"{{seed}}.png", "a")
    print(seed, flush=True)  # acknowledged
    project.move([added.id], "b")
project.rename_class("a", "c")
project.rename_class("c", "b")
project.remove_class("b")
project.undo()
project.rename_class("b", "a")
"""


def test_each_acknowledged_photo_exists_once_however_often_the_app_is_killed(
    tmp_path: Path,
) -> None:
    root, folder = str(Path(__file__).parents[2]), tmp_path / "birds"
    script = KILLED.format(root=root, folder=str(folder))
    acknowledged: list[int] = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        for moments in (1, 4, 6, 9, 12, 14):
            process.stdin.write(f"{moments}\n")
            while (line := process.stdout.readline()).strip().isdecimal():
                acknowledged.append(int(line))
            assert line == "died 9\n"
            photos = everything(folder)
            assert len(acknowledged) in (len(photos), len(photos) - 1)  # or not acknowledged yet
            assert all(photos.count(photo("red", seed)) == 1 for seed in acknowledged)
        process.stdin.close()
    with closing(Project(folder)):  # and the app starts on it
        pass
    assert len(acknowledged) > 4


def test_a_full_disk_loses_only_the_new_photo(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.add_class("robin")
    project.add_photo(photo("red"), "1.png", "robin")
    before = project.snapshot

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotAvailableError, match="No space left"):
        project.add_photo(photo("blue"), "2.png", "robin")
    monkeypatch.undo()
    assert project.snapshot == before
    assert len(everything(project.folder)) == 1
    project.add_photo(photo("blue"), "2.png", "robin")


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
    with closing(Project(folder)) as project:
        project.add_class("robin")
        project.add_photo(photo("red"), "1.png", "robin")
    with suppress(OSError), (full_disk / "filler").open("wb") as file:
        while True:
            file.write(bytes(4096))
    with closing(Project(folder)) as project:
        assert len(project.snapshot.classes["robin"]) == 1
        with pytest.raises(NotAvailableError, match="No space left"):
            project.add_photo(photo("blue"), "2.png", "robin")


# Projects of strangers: nothing outside is read, moved, written or deleted.


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What a stranger is after: files of the user, outside the project."""
    folder = tmp_path / "home"
    (folder / "Documents").mkdir(parents=True)
    (folder / "Documents/thesis.txt").write_text("ten years")
    (folder / "Documents/me.png").write_bytes(photo("red"))
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A project that was sent by a stranger."""
    with closing(Project(tmp_path / "theirs")) as project:
        for name in ("robin", "wren"):
            project.add_class(name)
            project.add_photo(photo("red" if name == "robin" else "blue"), "1.png", name)
        return project.folder


@pytest.mark.parametrize("name", ["", "trash", "new", "thumbs", "lock", "model.stamp"])
@pytest.mark.parametrize("goal", ["Documents", "Documents/thesis.txt", "nothing yet"])
def test_links_in_the_hidden_folder_are_refused(
    theirs: Path, home: Path, name: str, goal: str
) -> None:
    before = contents(home)
    place = theirs / HIDDEN / name if name else theirs / HIDDEN
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(home / goal)
    with pytest.raises(MivError):
        Project(theirs)
    assert contents(home) == before


@pytest.mark.parametrize("name", ["lock", "model.stamp"])
def test_a_pipe_in_the_hidden_folder_is_refused(theirs: Path, name: str) -> None:
    (theirs / HIDDEN / name).unlink(missing_ok=True)
    os.mkfifo(theirs / HIDDEN / name)
    with pytest.raises(InputError, match=name):  # and does not block
        Project(theirs)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_links_and_pipes_among_photos_are_left_out(theirs: Path, home: Path) -> None:
    (theirs / "documents").symlink_to(home / "Documents")
    (theirs / "robin/link.png").symlink_to(home / "Documents/me.png")
    (theirs / "robin/deeper").symlink_to(home / "Documents")
    os.mkfifo(theirs / "robin/pipe.png")
    before = contents(home)
    with closing(Project(theirs)) as project:
        assert "documents" in project.message
        classes = project.snapshot.classes
        assert {name: [p.path for p in photos] for name, photos in classes.items()} == {
            "robin": ["robin/1.png"],
            "wren": ["wren/1.png"],
        }
        with pytest.raises(InputError):
            project.remove_class("documents")
        project.remove_class("robin")
        project.undo()
        project.remove_class("robin")
    assert contents(home) == before


@pytest.mark.parametrize("action", ["delete", "add", "undo", "rename"])
def test_a_folder_that_becomes_a_link_is_not_followed(
    theirs: Path, home: Path, action: str
) -> None:
    with closing(Project(theirs)) as project:
        (one,) = project.snapshot.classes["robin"]
        project.rename_class("wren", "dunnock")
        before = contents(home)
        for name in (TRASH, NEW, "robin", "dunnock"):
            shutil.move(theirs / name, theirs / f"{name} before".replace("/", "_"))
            (theirs / name).symlink_to(home / "Documents")
        actions: dict[str, Callable[[], Any]] = {
            "delete": lambda: project.remove([one.id]),
            "add": lambda: project.add_photo(photo("green"), "2.png", "robin"),
            "undo": project.undo,
            "rename": lambda: project.rename_class("robin", "blackbird"),
        }
        with pytest.raises(MivError):
            actions[action]()
        assert contents(home) == before


def test_a_linked_model_is_set_aside(theirs: Path, home: Path) -> None:
    from tests.app.test_learner import learning, ready, wait

    (theirs / MODEL).symlink_to(home / "Documents/thesis.txt")
    before = contents(home)
    with closing(Project(theirs)) as project, learning(project) as learner:
        assert "another program" in wait(learner, ready).problem
    assert contents(home) == before
    assert not (theirs / MODEL).is_symlink()
