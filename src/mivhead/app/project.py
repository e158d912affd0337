"""A project: a folder of class folders, the photos to be named, and all changes of both.

    birds/
      robin/1.jpg ...     a folder per class, with plain photos
      wren/2.jpg ...
      model.miv           the model, which the learner writes
      .miv-app/           new photos, thumbnails, the journal

Whatever the app shows follows from the files, so that a project can be copied, edited in a file
manager and used by all other commands (`miv fit birds/`).

A project may also come from a stranger: links are not followed, so that nothing outside the folder
is read, moved or deleted (`mivhead._util.inside`).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

from mivhead._util.inside import Inside
from mivhead._util.schema import parse_json
from mivhead.app.journal import HIDDEN, KEPT, NEW, FolderChange, Journal, Move, last_batch
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.decoding import load_image
from mivhead.images.imageset import (
    is_image_name,
    is_litter,
    natural_key,
    normal,
    numbered,
    safe_name,
)
from mivhead.model.decision import NONE, UNSURE

MODEL = "model.miv"
THUMBS = f"{HIDDEN}/thumbs"
SETTINGS = f"{HIDDEN}/settings.json"
MAX_CLASS_NAME = 80  # characters
THUMB = 320  # pixels of the longer side
PREVIEW = 1280


@dataclass(frozen=True)
class Photo:
    """A photo in the project."""

    id: str  # stays the same when the photo is moved or renamed
    path: str  # relative to the project, with `/`
    size: int  # bytes
    time: int  # when it was last written, in nanoseconds

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Snapshot:
    """What a project contains at one moment."""

    version: int  # grows with every change
    # The photos of each class, the newest first; classes in natural order
    classes: dict[str, tuple[Photo, ...]]
    new: tuple[Photo, ...]  # photos to be named, the newest first


@dataclass(frozen=True)
class Settings:
    """What the user has chosen for a project."""

    unlabelled: bool = False  # learn from the new photos as well, which have no names


class Project:
    """A folder of class folders; its methods may be called from several threads.

    The folder is created if it is missing. One process at a time may open it.

    >>> import tempfile
    >>> project = Project(tempfile.mkdtemp())
    >>> project.add_class("robin")
    >>> list(project.snapshot().classes), project.undo()[0].action
    (['robin'], 'add class')
    >>> project.snapshot().classes
    {}
    >>> project.close()
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{folder} is a file: name a folder for the project.")
        self._inside = Inside(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for each in (NEW, THUMBS):
                self._inside.make(each)
            self._inside.check_plain(HIDDEN, besides=KEPT)  # a class may contain links
            self._lock = FileLock(self.folder / HIDDEN / "lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise NotAvailableError(
                f"{folder} is open in another `miv app`: use that page, or stop it first."
            ) from None
        except OSError as error:
            raise NotAvailableError(
                f"Cannot open {folder}: {error.strerror or error}; choose a folder that you may "
                "write to."
            ) from error
        self._mutex = threading.RLock()
        self._journal = Journal(self.folder)
        self.settings = _read_settings(self.folder / SETTINGS)
        self._found: dict[str, tuple[Photo, ...]] = {NEW: ()}  # by top-level folder, and NEW
        self._version = 1
        self._bad: dict[str, str] = {}
        self.links: tuple[str, ...] = ()  # folders that would be classes, but are links
        self._places: tuple[int, dict[str, tuple[str, Photo]]] = 0, {}  # by id, of a version
        self.rescan()

    def close(self) -> None:
        """Let another process open the project."""
        self._lock.release()

    # What there is.

    def snapshot(self) -> Snapshot:
        """Return the classes and photos."""
        with self._mutex:
            names = sorted((name for name in self._found if name != NEW), key=natural_key)
            classes = {name: self._found[name] for name in names}
            return Snapshot(self._version, classes, self._found[NEW])

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    @property
    def next_undo(self) -> list[FolderChange]:
        """The changes that `undo` would undo."""
        with self._mutex:
            return last_batch(self._journal.done)

    @property
    def next_redo(self) -> list[FolderChange]:
        """The changes that `redo` would make again."""
        with self._mutex:
            return last_batch(self._journal.undone)

    def class_named(self, name: str) -> str | None:
        """Return the class of this name, regardless of case; None if there is none."""
        names = (each for each in self._found if each != NEW)
        return next((each for each in names if each.casefold() == name.casefold()), None)

    def find(self, photo_id: str) -> tuple[str, Photo]:
        """Return the class of a photo, empty for a new one, and the photo."""
        with self._mutex:
            if self._places[0] != self._version:
                places = {
                    each.id: ("" if name == NEW else name, each)
                    for name, photos in self._found.items()
                    for each in photos
                }
                self._places = self._version, places
            found = self._places[1].get(photo_id)
        if found is None:
            raise InputError("The photo no longer exists.")
        return found

    def rescan(self) -> bool:
        """Look for changes that were made in a file manager; return whether there are any."""
        with self._mutex:
            try:
                with os.scandir(self.folder) as entries:
                    folders = [e for e in entries if e.is_dir() and _may_be_class(e.name)]
            except OSError:  # out of reach, such as a drive that is unplugged
                return False
            before, self._found = self._found, {}
            self.links = tuple(e.name for e in folders if e.is_symlink())
            self._look_into([*(e.name for e in folders if not e.is_symlink()), NEW])
            if self._found == before:
                return False
            self._version += 1
            return True

    def _look_into(self, folders: Iterable[str]) -> None:
        for name in folders:
            photos, others = _list_photos(self.folder, name)
            if photos or not others or name == NEW:
                self._found[name] = photos
            else:  # a folder of something else
                self._found.pop(name, None)

    # Changes.

    def add_class(self, name: str, batch: str = "") -> None:
        """Make a class."""
        name = check_class_name(name)
        with self._mutex:
            self._check_free(name)
            kept = self._journal.keep()
            try:
                self._inside.make(kept)
            except OSError as error:
                raise _cannot("create the class", error) from error
            self._change("add class", name, [(kept, name)], batch)

    def rename_class(self, old: str, new: str) -> None:
        """Rename a class; if the new name is that of another class, the two become one."""
        new = check_class_name(new)
        with self._mutex:
            self._check_class(old)
            if new == old:
                return
            into = self.class_named(new)
            if into is not None and into != old:
                self._merge(old, into)
            else:
                self._check_free(new, besides=old)
                self._change("rename class", new, [(old, new)])

    def _merge(self, old: str, into: str) -> None:
        moves = self._moves_into(into, self._found[old])
        moves.append((old, self._journal.keep()))  # what is left of the folder
        self._change("merge class", into, moves)

    def remove_class(self, name: str) -> None:
        """Delete a class with its photos."""
        with self._mutex:
            self._check_class(name)
            self._change("delete class", name, [(name, self._journal.keep())])

    def add_photo(self, data: bytes, name: str, label: str | None, batch: str = "") -> Photo:
        """Add a photo to a class, or to the new ones if `label` is None.

        Raises
        ------
        ImageError
            If it is not a readable image.
        InputError
            If the project has it already, or there is no such class.
        """
        name = safe_name(normal(name))
        if not data:
            raise ImageError(f"{name} is empty (0 bytes).")
        picture = load_image(data, name=name)  # outside the lock: it takes a moment
        folder = NEW if label is None else label
        with self._mutex:
            if label is not None:
                self._check_class(label)
            self._check_not_there(data, name, among_new=label is None)
            kept = self._journal.keep()
            try:
                with self._inside.open(kept, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                with suppress(OSError):
                    self._inside.delete(kept)
                raise _cannot(f"save {name}", error) from error
            if not is_image_name(name):  # such as a pasted "image" without a suffix
                name += _suffix(data)
            target = self._free_path(folder, name)
            self._change("add", label or "", [(kept, target)], batch)
            photo = next(each for each in self._found[folder] if each.path == target)
        with suppress(OSError):  # it can be made later
            self._write_thumb(photo, picture)
        return photo

    def move(self, ids: Sequence[str], label: str | None, batch: str = "") -> None:
        """Move photos to a class, or back to the new ones if `label` is None."""
        with self._mutex:
            if label is not None:
                self._check_class(label)
            folder = NEW if label is None else label
            found = [self.find(photo_id) for photo_id in ids]
            moves = self._moves_into(folder, [each for old, each in found if old != (label or "")])
            if moves:
                self._change("move", label or "", moves, batch)

    def remove(self, ids: Sequence[str]) -> None:
        """Delete photos."""
        with self._mutex:
            found = [self.find(photo_id) for photo_id in ids]
            moves = [(photo.path, self._journal.keep()) for _, photo in found]
            if moves:
                self._change("delete", found[0][0], moves)

    def undo(self, change_id: str | None = None) -> list[FolderChange]:
        """Undo the last change; return what was undone.

        If it is not `change_id`, because another one was made since, it is refused.
        """
        with self._mutex:
            if change_id is not None and change_id not in {each.id for each in self.next_undo}:
                raise InputError(
                    "There are later changes: undo them one by one with the arrow above."
                )
            return self._step(self._journal.undo)

    def redo(self) -> list[FolderChange]:
        """Make what was undone last again; return it."""
        return self._step(self._journal.redo)

    def set(self, settings: Settings) -> None:
        """Change the settings."""
        with self._mutex:
            try:
                with self._inside.open(SETTINGS, "wb") as file:
                    file.write(json.dumps(asdict(settings)).encode())
            except OSError as error:
                raise _cannot("save the settings", error) from error
            self.settings = settings
            self._version += 1

    def _step(self, step: Any) -> list[FolderChange]:
        with self._mutex:
            group: list[FolderChange] = step()
            self._update(group)
            return group

    def _change(self, action: str, target: str, moves: Sequence[Move], batch: str = "") -> None:
        self._journal.do(action, target, moves, batch)
        self._update(self._journal.done[-1:])

    def _update(self, changes: Iterable[FolderChange]) -> None:
        """Look into the folders that changes have touched."""
        touched = set()
        for change in changes:
            for path in (path for move in change.moves for path in move):
                if path.startswith(f"{NEW}/"):
                    touched.add(NEW)
                elif not path.startswith(f"{HIDDEN}/"):
                    touched.add(path.partition("/")[0])
        for name in touched:
            place = self.folder / name
            if place.is_dir() and not place.is_symlink():
                self._look_into([name])
            else:
                self._found.pop(name, None)
        self._version += bool(touched)

    def _check_class(self, name: str) -> None:
        if name == NEW or name not in self._found:
            raise InputError(f"There is no class {name!r:.100}: it was renamed or deleted.")

    def _check_free(self, name: str, besides: str | None = None) -> None:
        if (known := self.class_named(name)) not in (None, besides):
            raise InputError(f"The class {known!r} already exists.")
        if name.casefold() != (besides or "").casefold() and (self.folder / name).exists():
            raise InputError(f"The project has a file or folder {name!r} that is not a class.")

    def _check_not_there(self, data: bytes, name: str, *, among_new: bool) -> None:
        """Refuse a photo that the project has; a new one may be a shot as well."""
        folders = [NEW] if among_new else [each for each in self._found if each != NEW]
        for folder in folders:
            for photo in self._found[folder]:
                if photo.size == len(data) and self._has_content(photo, data):
                    where = "among the new photos" if among_new else f"in the class {folder!r}"
                    raise InputError(f"{name} is already {where} ({photo.name}).")

    def _has_content(self, photo: Photo, data: bytes) -> bool:
        try:
            return (self.folder / photo.path).read_bytes() == data
        except OSError:
            return False

    def _moves_into(self, folder: str, photos: Iterable[Photo]) -> list[Move]:
        """Return the moves of photos into a folder, under names that are free."""
        moves: dict[str, str] = {}  # by the new path
        for photo in photos:
            moves[self._free_path(folder, photo.name, moves)] = photo.path
        return [(old, new) for new, old in moves.items()]

    def _free_path(self, folder: str, name: str, taken: Container[str] = ()) -> str:
        return next(
            path
            for each in numbered(name)
            if (path := f"{folder}/{each}") not in taken and not (self.folder / path).exists()
        )

    # Thumbnails, made once per photo; they also tell which photos cannot be read.

    def thumbnail(self, photo: Photo) -> Path:
        """Return the file of a small JPEG of a photo; raise an `ImageError` if it is unreadable."""
        path = self._thumb_path(photo)
        if path.exists():
            return path
        if (reason := self._bad.get(photo.id)) is not None:
            raise ImageError(reason)
        try:
            picture = load_image(self.folder / photo.path, name=photo.name)
        except ImageError as error:
            if (self.folder / photo.path).exists():  # else it is being moved
                self._bad[photo.id] = str(error)
            raise
        return self._write_thumb(photo, picture)

    def problem(self, photo: Photo) -> str | None:
        """Return why a photo cannot be used, if that is known."""
        return self._bad.get(photo.id)

    def preview(self, photo: Photo) -> Any:
        """Return the photo as a picture of at most 1,280 pixels."""
        picture = load_image(self.folder / photo.path, name=photo.name)
        picture.thumbnail((PREVIEW, PREVIEW))
        return picture

    def _thumb_path(self, photo: Photo) -> Path:
        return self.folder / THUMBS / f"{photo.id}.jpg"

    def _write_thumb(self, photo: Photo, picture: Any) -> Path:
        path = self._thumb_path(photo)
        small = picture.copy()
        small.thumbnail((THUMB, THUMB))
        part = path.with_suffix(f".{uuid4().hex[:8]}.part")
        small.save(part, "JPEG", quality=82)
        part.replace(path)
        return path


def check_class_name(name: str) -> str:
    r"""Return the name of a class as it will be its folder's; raise an error if it cannot be.

    >>> check_class_name("  house   sparrow ")
    'house sparrow'
    >>> check_class_name("a/b")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: 'a/b' cannot be the name of a folder: leave out / \ : * ? " < > |.
    """
    name = normal(" ".join(name.split()))
    if not name:
        raise InputError("Give the class a name.")
    if len(name) > MAX_CLASS_NAME:
        raise InputError(
            f"The name has {len(name)} characters; {MAX_CLASS_NAME} are allowed: shorten it."
        )
    if name.casefold() in (UNSURE, NONE):
        raise InputError(f"{name!r} is for photos without a class: choose another name.")
    if name.startswith(".") or is_litter(name):
        raise InputError(f"{name!r} would be a hidden folder: choose another name.")
    if safe_name(name) != name:
        raise InputError(f'{name!r} cannot be the name of a folder: leave out / \\ : * ? " < > |.')
    return name


def _may_be_class(name: str) -> bool:
    """Return whether a folder can be a class: not if `miv predict --sort-into` gave it no name."""
    return not is_litter(name) and name.casefold() not in (UNSURE, NONE)


def _list_photos(root: Path, folder: str) -> tuple[tuple[Photo, ...], bool]:
    """Return the photos below a folder, the newest first, and whether there are other files."""
    found: list[Photo] = []
    others = False
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        with suppress(OSError), os.scandir(root / place) as entries:  # deleted meanwhile
            for each in entries:
                if is_litter(each.name) or each.is_symlink():
                    continue
                path = f"{place}/{each.name}"
                if each.is_dir():
                    waiting.append(path)
                elif not (each.is_file() and is_image_name(each.name)):
                    others = True
                else:
                    with suppress(OSError, ValueError):  # deleted meanwhile, or not valid UTF-8
                        path.encode()
                        found.append(_photo(path, each.stat()))
    found.sort(key=lambda each: (-each.time, natural_key(each.path)))
    return tuple(found), others


def _photo(path: str, stat: os.stat_result) -> Photo:
    key = f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}".encode()
    id_ = hashlib.blake2s(key, digest_size=10).hexdigest()
    return Photo(id_, path, stat.st_size, stat.st_mtime_ns)


def _read_settings(path: Path) -> Settings:
    """Return what was chosen; the defaults if nothing was, or the file is damaged."""
    try:
        found = parse_json(path.read_bytes())
        return Settings(unlabelled=found["unlabelled"] is True)
    except (OSError, ValueError, TypeError, KeyError):
        return Settings()


def _suffix(data: bytes) -> str:
    """Return the suffix for the name of an image file, by its content."""
    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        return f".{(image.format or 'png').lower()}".replace("jpeg", "jpg")


def _cannot(what: str, error: OSError) -> NotAvailableError:
    return NotAvailableError(
        f"Cannot {what}: {error.strerror or error}. Everything else is as it was."
    )


@contextmanager
def opened(folder: str | Path) -> Iterator[Project]:
    """Open a project until the end of the block."""
    project = Project(folder)
    try:
        yield project
    finally:
        project.close()
