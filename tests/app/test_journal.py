"""The journal of a project: every change is made completely or not at all, and can be undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.app import journal as module
from mivhead.app.journal import HIDDEN, Journal
from mivhead.errors import InputError, NotAvailableError


class Killed(BaseException):
    """The process ends here."""


def contents(root: Path) -> dict[str, str]:
    """All files outside the hidden folder, with their texts."""
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and HIDDEN not in path.parts
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    return tmp_path


def test_a_change_is_undone_and_redone(root: Path) -> None:
    journal = Journal(root)
    before = contents(root)
    journal.do("move", "x", [("a.txt", "x/a.txt"), ("b.txt", "x/b.txt")])
    after = contents(root)
    assert set(after) == {"x/a.txt", "x/b.txt", "c.txt"}
    assert [each.target for each in journal.undo()] == ["x"]
    assert contents(root) == before
    assert not journal.undo()
    journal.redo()
    assert contents(root) == after
    assert not journal.redo()


def test_a_batch_is_one_step(root: Path) -> None:
    journal = Journal(root)
    before = contents(root)
    journal.do("move", "x", [("c.txt", "x/c.txt")])
    for name in "ab":
        journal.do("move", "x", [(f"{name}.txt", f"x/{name}.txt")], batch="drop")
    assert len(journal.undo()) == 2
    assert set(contents(root)) == {"a.txt", "b.txt", "x/c.txt"}
    journal.undo()
    assert contents(root) == before
    journal.redo()
    assert len(journal.redo()) == 2
    assert set(contents(root)) == {"x/a.txt", "x/b.txt", "x/c.txt"}


def test_a_new_change_forgets_what_was_undone(root: Path) -> None:
    journal = Journal(root)
    journal.do("move", "", [("a.txt", "1.txt")])
    journal.undo()
    journal.do("move", "", [("b.txt", "2.txt")])
    assert not journal.redo()


@pytest.mark.parametrize("step", ["do", "undo", "redo"])
@pytest.mark.parametrize("moves_before", [0, 1, 2])
def test_killed_in_the_middle_the_step_is_completed_later(
    root: Path, step: str, moves_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(root)
    moves = [("a.txt", "x/a.txt"), ("b.txt", "x/b.txt"), ("c.txt", "x/c.txt")]
    start = contents(root)
    if step != "do":
        journal.do("move", "x", moves)
    if step == "redo":
        journal.undo()
    real, made = Journal._move, []

    def die(self: Journal, source: str, target: str) -> None:
        if len(made) == moves_before:
            raise Killed
        made.append(source)
        real(self, source, target)

    monkeypatch.setattr(Journal, "_move", die)
    with pytest.raises(Killed):
        journal.do("move", "x", moves) if step == "do" else getattr(journal, step)()
    monkeypatch.undo()
    again = Journal(root)
    end = {"x/a.txt": "a", "x/b.txt": "b", "x/c.txt": "c"}
    assert contents(root) == (start if step == "undo" else end)
    again.redo() if step == "undo" else again.undo()
    assert contents(root) == (end if step == "undo" else start)


def test_a_record_cut_off_is_as_if_it_was_never_begun(root: Path) -> None:
    journal = Journal(root)
    journal.do("move", "", [("a.txt", "1.txt")])
    file = root / HIDDEN / "journal.jsonl"
    with file.open("ab") as opened:
        opened.write(b'{"do": {"id": "x", "act')
    again = Journal(root)
    assert [each.moves for each in again.done] == [(("a.txt", "1.txt"),)]
    again.do("move", "", [("b.txt", "2.txt")])
    assert len(Journal(root).done) == 2


def test_what_someone_else_changed_stays_changed(root: Path) -> None:
    Journal(root).do("move", "", [("a.txt", "1.txt")])
    (root / "1.txt").rename(root / "a.txt")  # by hand
    journal = Journal(root)
    assert (root / "a.txt").exists()
    with pytest.raises(InputError, match=r"'1.txt' no longer exists"):
        journal.undo()
    assert contents(root) == {"a.txt": "a", "b.txt": "b", "c.txt": "c"}


def test_nothing_is_overwritten(root: Path) -> None:
    journal = Journal(root)
    with pytest.raises(InputError, match=r"'b.txt' already"):
        journal.do("move", "", [("a.txt", "b.txt")])
    assert contents(root) == {"a.txt": "a", "b.txt": "b", "c.txt": "c"}
    assert not journal.done


def test_a_full_disk_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(root)
    journal.do("move", "", [("a.txt", "1.txt")])
    before = contents(root)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(NotAvailableError, match=r"No space left on device\. Nothing was changed"):
        journal.do("move", "", [("b.txt", "2.txt")])
    monkeypatch.undo()
    assert contents(root) == before
    assert len(Journal(root).done) == 1


def test_a_move_that_fails_takes_the_others_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(root)
    before = contents(root)
    real = Journal._move

    def refuse(self: Journal, source: str, target: str) -> None:
        if source == "b.txt":
            raise PermissionError(13, "Permission denied")
        real(self, source, target)

    monkeypatch.setattr(Journal, "_move", refuse)
    with pytest.raises(NotAvailableError, match="Permission denied"):
        journal.do("move", "", [("a.txt", "1.txt"), ("b.txt", "2.txt")])
    monkeypatch.undo()
    assert contents(root) == before
    again = Journal(root)
    assert contents(root) == before
    assert not again.done


@pytest.mark.parametrize("path", ["../out.txt", "/etc/passwd", "x/../../out.txt"])
def test_a_journal_from_strangers_reaches_nothing_outside(root: Path, path: str) -> None:
    Journal(root)
    change = {"id": "1", "action": "move", "target": "", "moves": [["a.txt", path]], "batch": ""}
    (root / HIDDEN / "journal.jsonl").write_text(json.dumps({"do": change}) + "\n")
    assert not Journal(root).done
    assert (root / "a.txt").exists()


def test_what_no_change_needs_any_more_is_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CHANGES", 1)
    journal = Journal(root)
    for name in "ab":
        journal.do("delete", "", [(f"{name}.txt", journal.keep())])
    again = Journal(root)
    assert len(list((root / module.KEPT).iterdir())) == 1
    again.undo()
    assert set(contents(root)) == {"b.txt", "c.txt"}


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.booleans())))
def test_undoing_everything_leads_back_and_redoing_everything_forth(
    steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("journal")
    for name in "abcd":
        (root / name).write_text(name)
    place = {name: name for name in "abcd"}
    journal = Journal(root)
    before = contents(root)
    for name, folder, reopened in steps:
        target = f"{folder}/{name}"
        if place[name] != target:
            journal.do("move", folder, [(place[name], target)])
            place[name] = target
        if reopened:
            journal = Journal(root)
    after = contents(root)
    while journal.undo():
        pass
    assert contents(root) == before
    journal = Journal(root)
    while journal.redo():
        pass
    assert contents(root) == after
