"""Changes of a folder that can be undone as long as the app runs.

Every change is a list of moves inside the folder: what is deleted is moved to a trash, which
nothing empties unasked. Undoing a change is making its moves backwards. One move is one
`os.rename`, so that a process that is killed leaves every file in exactly one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from uuid import uuid4

from mivhead.errors import InputError, NotAvailableError, reason_of

HIDDEN = ".miv-app"  # the hidden folder in a project
TRASH = f"{HIDDEN}/trash"

Move = tuple[str, str]  # from, to: paths relative to the folder, with `/`


@dataclass(frozen=True)
class FolderChange:
    """A change of the folder."""

    action: str  # what the user did, such as `add`
    target: str  # the name of the class concerned, or empty
    moves: tuple[Move, ...]
    batch: str = ""  # successive changes with the same batch are undone together; empty: on its own


class History:
    """The changes of a folder; not safe for several threads.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()).resolve()
    >>> (folder / "a.txt").touch()
    >>> history = History(folder)
    >>> history.make("rename", "", [("a.txt", "b.txt")])
    >>> (folder / "b.txt").exists()
    True
    >>> [change.action for change in history.undo()], (folder / "a.txt").exists()
    (['rename'], True)
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.done: list[FolderChange] = []
        self.undone: list[FolderChange] = []  # the next one to redo is the last

    def make(self, action: str, target: str, moves: Iterable[Move], batch: str = "") -> None:
        """Make a change, completely or not at all."""
        moves = tuple(moves)
        self._move_all(moves)
        self.note(action, target, moves, batch)

    def note(self, action: str, target: str, moves: Iterable[Move], batch: str = "") -> None:
        """Note a change that is made already."""
        self.done.append(FolderChange(action, target, tuple(moves), batch))
        self.undone.clear()

    def undo(self) -> list[FolderChange]:
        """Undo the last change, with its batch; return what was undone, the last change first."""
        group = last_batch(self.done)
        moves = [move for change in group for move in reversed(change.moves)]
        self._move_all([(target, source) for source, target in moves])
        del self.done[len(self.done) - len(group) :]
        self.undone += group
        return group

    def redo(self) -> list[FolderChange]:
        """Make what was undone last again; return it."""
        group = last_batch(self.undone)
        self._move_all([move for change in group for move in change.moves])
        del self.undone[len(self.undone) - len(group) :]
        self.done += group
        return group

    def _move_all(self, moves: Sequence[Move]) -> None:
        made: list[Move] = []
        with changing():
            try:
                for source, target in moves:
                    self._move(source, target)
                    made.append((source, target))
            except (OSError, InputError):
                for source, target in reversed(made):
                    self._move(target, source)
                raise

    def _move(self, source: str, target: str) -> None:
        old, new = inside(self._root, source), inside(self._root, target)
        if not old.exists():
            raise InputError(f"{old.name!r} no longer exists: it was moved or deleted elsewhere.")
        if new.exists() and not new.samefile(old):  # the same on a disk that ignores case
            raise InputError(f"{target!r} already exists.")
        new.parent.mkdir(exist_ok=True)
        old.rename(new)


def last_batch(changes: Sequence[FolderChange]) -> list[FolderChange]:
    """Return the changes at the end that belong together, the last one first."""
    batch = changes[-1].batch if changes else ""
    group = list(takewhile(lambda change: batch and change.batch == batch, reversed(changes)))
    return group or list(changes[-1:])


def inside(root: Path, path: str) -> Path:
    """Return a path in a folder, which must not lead out of it or through a link.

    >>> inside(Path("/birds"), "robin/../../1.jpg")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: 'robin/../../1.jpg' is not a path inside the folder.
    """
    place = root
    for name in path.split("/"):
        place /= name
        if name in ("", ".", "..") or "\0" in name or not place.is_relative_to(root):
            raise InputError(f"{path!r:.200} is not a path inside the folder.")
        if place.is_symlink():
            raise InputError(f"{path!r:.200} is or contains a link, which is not followed.")
    return place


def trash_path(name: str) -> str:
    """Return a new path in the trash for something of this name."""
    return f"{TRASH}/{uuid4().hex[:8]} {name}"


@contextmanager
def changing() -> Iterator[None]:
    """Say in one sentence what the disk refuses."""
    try:
        yield
    except OSError as error:
        reason = reason_of(error)
        raise NotAvailableError(f"Cannot change the folder: {reason}. It is as it was.") from error
