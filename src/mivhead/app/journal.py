"""Changes of a folder that survive a crash and can be undone.

Every change is a list of moves inside the folder: a new photo is moved in from a hidden folder, a
deleted one is moved there. A change is written to the journal before its moves are made, so that a
process that was killed in between completes them when it opens the folder again. Undoing a change
is making its moves backwards, in reverse order.

A folder may come from a stranger, with a journal: its records are checked like any other document,
and nothing is moved or deleted outside the folder, in its hidden parts, or through a link.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from mivhead._util.inside import Inside, split_path
from mivhead._util.schema import from_json, parse_json
from mivhead.errors import InputError, NotAvailableError
from mivhead.images.imageset import is_litter

HIDDEN = ".miv-app"  # the hidden folder in a project
KEPT = f"{HIDDEN}/kept"  # what is not part of the project, but may come back by undo or redo
NEW = f"{HIDDEN}/new"  # photos to be named
FILE = f"{HIDDEN}/journal.jsonl"
PART = f"{HIDDEN}/journal.part"
MAX_CHANGES = 500  # that can be undone after the folder is opened again
MAX_BYTES = 64 * 2**20  # of a journal; a longer one is not ours

Move = tuple[str, str]  # from, to: paths relative to the folder, with `/`


@dataclass(frozen=True)
class FolderChange:
    """A change of the folder."""

    id: str  # distinct
    action: str  # what the user did, such as `add`
    target: str  # the name of the class concerned, or empty
    moves: tuple[Move, ...]  # from where to where, relative to the folder
    batch: str = ""  # successive changes with the same batch are undone together; empty: on its own


@dataclass(frozen=True)
class _Record:
    """A line of the journal: one of these."""

    do: FolderChange | None = None
    undo: tuple[str, ...] | None = None  # ids of changes
    redo: tuple[str, ...] | None = None
    made: tuple[str, ...] | None = None  # the moves of the line before are made


class Journal:
    """The changes of a folder; not safe for several threads.

    Changes that were begun and not completed are completed.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "a.txt").touch()
    >>> journal = Journal(folder)
    >>> journal.do("rename", "", [("a.txt", "b.txt")])
    >>> (folder / "b.txt").exists()
    True
    >>> [change.action for change in journal.undo()], (folder / "a.txt").exists()
    (['rename'], True)
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._inside = Inside(root)
        self._size = 0  # bytes of complete records
        self.done: list[FolderChange] = []
        self.undone: list[FolderChange] = []  # the next one to redo is the last
        try:
            self._inside.make(KEPT)
            self._complete(self._read())
            self._compact()
        except OSError as error:
            raise NotAvailableError(
                f"Cannot open {root}: {error.strerror or error}; choose a folder that you may "
                "write to."
            ) from error

    def keep(self) -> str:
        """Return a new path for something that is not part of the project yet."""
        return f"{KEPT}/{uuid4().hex[:16]}"

    def do(self, action: str, target: str, moves: Iterable[Move], batch: str = "") -> None:
        """Make a change, completely or not at all."""
        change = FolderChange(uuid4().hex[:16], action, target, tuple(moves), batch)
        self._apply({"do": asdict(change)}, {"undo": [change.id]}, change.moves)
        self.done.append(change)
        self.undone.clear()

    def undo(self) -> list[FolderChange]:
        """Undo the last change, with its batch; return what was undone, the last change first."""
        group = last_batch(self.done)
        if group:
            moves = [move for each in group for move in _backwards(each)]
            ids = [each.id for each in group]
            self._apply({"undo": ids}, {"redo": ids[::-1]}, moves)
            del self.done[-len(group) :]
            self.undone.extend(group)
        return group

    def redo(self) -> list[FolderChange]:
        """Make what was undone last again; return it."""
        group = last_batch(self.undone)
        if group:
            moves = [move for each in group for move in each.moves]
            ids = [each.id for each in group]
            self._apply({"redo": ids}, {"undo": ids[::-1]}, moves)
            del self.undone[-len(group) :]
            self.done.extend(group)
        return group

    def _apply(
        self, record: dict[str, Any], inverse: dict[str, Any], moves: Sequence[Move]
    ) -> None:
        """Write a record and make its moves; if one fails, undo the others."""
        self._check(moves)
        self._append(record)
        made: list[Move] = []
        try:
            for move in moves:
                self._move(*move)
                made.append(move)
        except OSError as error:
            for source, target in reversed(made):
                self._move(target, source)
            self._append(inverse)
            raise NotAvailableError(
                f"The change cannot be made: {error.strerror or error}. Nothing was changed."
            ) from error
        with suppress(NotAvailableError):  # if it is missing, the moves are checked once more
            self._append({"made": []}, sync=False)

    def _check(self, moves: Sequence[Move]) -> None:
        """Refuse moves that cannot be made, before anything is touched."""
        taken: set[str] = set()
        gone: set[str] = set()
        for source, target in moves:
            if source not in taken and not self._inside.exists(source):
                raise InputError(
                    f"{_shown(source)} no longer exists: it was moved or deleted elsewhere."
                )
            occupied = self._inside.exists(target) and target not in gone
            if (occupied and not self._same(source, target)) or target in taken:
                raise InputError(f"{_shown(target)} already exists.")
            taken.add(target)
            gone.add(source)

    def _same(self, source: str, target: str) -> bool:
        """Return whether two names are the same file, on a disk that ignores case."""
        return source.casefold() == target.casefold() and self._inside.same(source, target)

    def _complete(self, moves: Sequence[Move]) -> None:
        """Make those moves that are not made yet."""
        for source, target in moves:
            if self._inside.exists(source) and not self._inside.exists(target):
                self._move(source, target)

    def _move(self, source: str, target: str) -> None:
        self._inside.move(source, target)

    def _append(self, record: dict[str, Any], *, sync: bool = True) -> None:
        line = json.dumps(record, ensure_ascii=True).encode() + b"\n"
        try:
            with self._inside.open(FILE, "r+b" if self._inside.exists(FILE) else "xb") as file:
                file.truncate(self._size)  # what a full disk left of a record
                file.seek(self._size)
                try:
                    file.write(line)
                    file.flush()
                    if sync:
                        os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(file.fileno(), self._size)
                    raise
        except OSError as error:
            raise NotAvailableError(
                f"The change cannot be written to {self._root}: {error.strerror or error}. "
                "Nothing was changed."
            ) from error
        self._size += len(line)

    def _read(self) -> list[Move]:
        """Read all complete records; return the moves that may not have been made."""
        moves: list[Move] = []
        if not self._inside.exists(FILE):
            return moves
        with self._inside.open(FILE, "rb") as file:
            content = file.read(MAX_BYTES)
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                moves = self._replay(from_json(_Record, parse_json(line), "the journal"))
            except ValueError:
                break  # damaged: what follows cannot be trusted
            self._size += len(line)
        return moves

    def _replay(self, record: _Record) -> list[Move]:
        ((kind, value),) = ((k, v) for k, v in vars(record).items() if v is not None)
        if kind == "made":
            return []
        if record.do is not None:
            for path in (path for move in record.do.moves for path in move):
                _check_path(path)
            self.done.append(record.do)
            self.undone.clear()
            return list(record.do.moves)
        start, end = (self.done, self.undone) if kind == "undo" else (self.undone, self.done)
        group = start[-len(value) :][::-1]
        if not value or tuple(each.id for each in group) != value:
            raise InputError(f"The journal cannot {kind} {value!r:.80}.")
        del start[-len(group) :]
        end.extend(group)
        if kind == "undo":
            return [move for each in group for move in _backwards(each)]
        return [move for each in group for move in each.moves]

    def _compact(self) -> None:
        """Forget old changes, and delete what only they could bring back."""
        del self.done[:-MAX_CHANGES]
        records: list[dict[str, Any]] = [{"do": asdict(each)} for each in self.done]
        records += [{"do": asdict(each)} for each in reversed(self.undone)]
        if self.undone:
            records.append({"undo": [each.id for each in self.undone]})
        records.append({"made": []})
        data = b"".join(json.dumps(each).encode() + b"\n" for each in records)
        with suppress(OSError):  # on a full disk, the journal stays as it is
            with self._inside.open(PART, "wb") as file:
                file.write(data)
            self._inside.move(PART, FILE)
            self._size = len(data)
        named = {path for c in (*self.done, *self.undone) for move in c.moves for path in move}
        for name in self._inside.names(KEPT):
            if f"{KEPT}/{name}" not in named:
                with suppress(OSError, RecursionError):  # the latter for very deep folders
                    self._inside.delete(f"{KEPT}/{name}")


def last_batch(changes: Sequence[FolderChange]) -> list[FolderChange]:
    """Return the changes at the end that belong together, the last one first."""
    group: list[FolderChange] = []
    for each in reversed(changes):
        if group and (not each.batch or each.batch != group[0].batch):
            break
        group.append(each)
    return group


def _backwards(change: FolderChange) -> list[Move]:
    return [(target, source) for source, target in reversed(change.moves)]


def _check_path(path: str) -> None:
    """Refuse a path of the journal that is not one of a photo, of a class or of what is kept."""
    names = split_path(path)
    if "/".join(names[:2]) in (KEPT, NEW):
        del names[:2]
    if not names or any(map(is_litter, names)):  # such as hooks of version control
        raise InputError(f"The journal names {path!r:.80}, which is not a photo of the project.")


def _shown(path: str) -> str:
    """Return the name that a message shows for a path."""
    return "The photo" if path.startswith(f"{HIDDEN}/") else repr(path)
