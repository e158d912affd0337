"""A project folder: classes, photos, thumbnails; what is refused, and that nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from mivhead.app.project import MODEL, NEW, Project, check_class_name, opened
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.sources import open_labelled
from tests.conftest import write_images
from tests.service.conftest import photo


def test_the_folder_is_plain(project: Project) -> None:
    for name in ("robin", "wren"):
        project.add_class(name)
        project.add_photo(photo("red" if name == "robin" else "blue"), "IMG 1.png", name)
    project.add_photo(photo("green"), "IMG 1.png", None)
    assert (project.folder / "robin/IMG 1.png").read_bytes() == photo("red")
    assert open_labelled(project.folder).ids == ("robin/IMG 1.png", "wren/IMG 1.png")
    assert (project.folder / NEW / "IMG 1.png").exists()


def test_a_project_opens_where_it_was(project: Project) -> None:
    project.add_class("robin")
    project.add_photo(photo("red"), "1.png", "robin")
    project.add_photo(photo("blue"), "2.png", None)
    before = project.snapshot()
    project.close()
    again = Project(project.folder)
    after = again.snapshot()
    assert (after.classes, after.new) == (before.classes, before.new)
    again.undo()
    again.undo()
    assert again.snapshot().classes == {"robin": ()}
    again.close()


def test_class_folders_that_exist_are_a_project(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "shots", 2)
    (folder / "notes").mkdir()
    (folder / "notes/readme.txt").write_text("not a class")
    (folder / "red/deeper").mkdir()
    (folder / "red/0.png").rename(folder / "red/deeper/0.png")
    project = Project(folder)
    counts = {name: len(photos) for name, photos in project.snapshot().classes.items()}
    assert counts == {"blue": 2, "green": 2, "red": 2}
    project.close()


def test_everything_is_undone_and_redone(project: Project) -> None:
    states = [project.snapshot()]

    def note() -> None:
        states.append(project.snapshot())

    project.add_class("robin"), note()
    project.add_class("wren"), note()
    one = project.add_photo(photo("red", 1), "1.png", "robin")
    note()
    two = project.add_photo(photo("red", 2), "2.png", None)
    note()
    project.move([one.id], "wren"), note()
    project.move([two.id], "robin"), note()
    project.rename_class("wren", "dunnock"), note()
    project.remove([two.id]), note()
    project.remove_class("dunnock"), note()
    for state in reversed(states[:-1]):
        project.undo()
        now = project.snapshot()
        assert (now.classes, now.new) == (state.classes, state.new)
    for state in states[1:]:
        project.redo()
        now = project.snapshot()
        assert (now.classes, now.new) == (state.classes, state.new)


def test_a_drop_of_many_photos_is_one_step(project: Project) -> None:
    project.add_class("robin")
    for i in range(5):
        project.add_photo(photo("red", i), "same.png", "robin", batch="drop")
    names = {each.name for each in project.snapshot().classes["robin"]}
    assert names == {"same.png", *(f"same ({i}).png" for i in range(2, 6))}
    assert len(project.next_undo) == 5
    project.undo()
    assert project.snapshot().classes == {"robin": ()}


def test_a_photo_keeps_its_id_and_thumbnail_when_it_moves(project: Project) -> None:
    project.add_class("robin")
    found = project.add_photo(photo("red"), "1.png", None)
    thumb = project.thumbnail(found)
    made = thumb.stat().st_mtime_ns
    project.move([found.id], "robin")
    label, moved = project.find(found.id)
    assert label == "robin"
    assert project.thumbnail(moved) == thumb
    assert thumb.stat().st_mtime_ns == made
    with Image.open(thumb) as small:
        assert max(small.size) <= 320


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"Hello", r"1\.jpg is not a JPEG"),
        (b"", r"1\.jpg is empty"),
        (photo("red")[:-40], r"1\.jpg is corrupted"),
    ],
)
def test_what_is_not_a_photo_is_refused_and_nothing_else_is_lost(
    project: Project, data: bytes, reason: str
) -> None:
    project.add_class("robin")
    project.add_photo(photo("red"), "0.png", "robin")
    before = project.snapshot()
    with pytest.raises(ImageError, match=reason):
        project.add_photo(data, "1.jpg", "robin")
    assert project.snapshot() == before


def test_the_same_photo_twice_is_refused(project: Project) -> None:
    project.add_class("robin")
    project.add_class("wren")
    project.add_photo(photo("red"), "1.png", "robin")
    with pytest.raises(InputError, match=r"2\.png is already in the class 'robin' \(1\.png\)"):
        project.add_photo(photo("red"), "2.png", "wren")
    project.add_photo(photo("red"), "2.png", None)  # what would the model say?
    with pytest.raises(InputError, match="already among the new photos"):
        project.add_photo(photo("red"), "3.png", None)


@pytest.mark.parametrize("name", ["../evil.png", "a/b.png", "..", "x\0y.png", "é" * 300, "CON.png"])
def test_file_names_stay_inside_their_class(project: Project, name: str) -> None:
    project.add_class("robin")
    found = project.add_photo(photo("red"), name, "robin")
    assert (project.folder / found.path).parent == project.folder / "robin"
    assert (project.folder / found.path).is_file()


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
    assert project.snapshot().classes == {}


def test_names_may_be_any_text() -> None:
    for name in ("Blåmes 🐦", "&amp;", "'; DROP TABLE", "100 %"):
        assert check_class_name(name) == name
    assert check_class_name("e\u0301") == "é"


def test_class_names_differ_by_more_than_capitals(project: Project) -> None:
    project.add_class("robin")
    with pytest.raises(InputError, match="The class 'robin' already exists"):
        project.add_class("Robin")
    project.rename_class("robin", "Robin")
    assert list(project.snapshot().classes) == ["Robin"]


def test_what_is_gone_is_named(project: Project) -> None:
    with pytest.raises(InputError, match="There is no class 'robin'"):
        project.add_photo(photo("red"), "1.png", "robin")
    with pytest.raises(InputError, match="no longer exists"):
        project.move(["nothing"], None)


def test_one_process_at_a_time(project: Project) -> None:
    with pytest.raises(NotAvailableError, match="is open in another `miv app`"):
        Project(project.folder)


def test_a_file_is_not_a_project(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(InputError, match="is a file"):
        Project(tmp_path / "x")


def test_a_folder_that_is_out_of_reach_for_a_while(project: Project) -> None:
    project.add_class("robin")
    hidden = project.folder.with_name("unplugged")
    project.folder.rename(hidden)
    assert not project.rescan()
    assert list(project.snapshot().classes) == ["robin"]
    (hidden / "wren").mkdir()
    hidden.rename(project.folder)
    assert project.rescan()
    assert list(project.snapshot().classes) == ["robin", "wren"]


def test_changes_in_a_file_manager_are_seen(project: Project) -> None:
    project.add_class("robin")
    assert not project.rescan()
    (project.folder / "robin/by hand.png").write_bytes(photo("red"))
    (project.folder / "robin/text.jpg").write_text("not a photo")
    (project.folder / MODEL).touch()
    assert project.rescan()
    found = {each.name: each for each in project.snapshot().classes["robin"]}
    assert set(found) == {"by hand.png", "text.jpg"}
    with pytest.raises(ImageError):
        project.thumbnail(found["text.jpg"])
    assert "is not a JPEG" in str(project.problem(found["text.jpg"]))
    assert project.problem(found["by hand.png"]) is None


def test_a_full_disk_loses_only_the_new_photo(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.add_class("robin")
    project.add_photo(photo("red"), "1.png", "robin")
    before = project.snapshot()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotAvailableError, match=r"Cannot save 2\.png: No space left on device"):
        project.add_photo(photo("blue"), "2.png", "robin")
    monkeypatch.undo()
    assert project.snapshot() == before
    project.add_photo(photo("blue"), "2.png", "robin")


def test_folders_of_decisions_are_no_classes(tmp_path: Path) -> None:
    for name in ("robin", "unsure", "None of these"):  # as `miv predict --sort-into` makes them
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(photo("red"))
    with opened(tmp_path) as project:
        assert list(project.snapshot().classes) == ["robin"]
