"""A project: a folder of class folders, the photos to be named, and all changes of both.

    birds/
      robin/1.jpg ...     a folder per class, with plain photos
      wren/2.jpg ...
      model.miv           the model, which the learner writes
      .miv-app/           new photos, thumbnails, settings, and a trash for what was deleted

Whatever the app shows follows from the files, so that a project can be copied, edited in a file
manager and used by all other commands (`miv fit birds/`). A project may also come from a stranger:
links are not followed, so that nothing outside the folder is read, moved or deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout
from PIL import Image

from mivhead._util.files import replacing, write_text
from mivhead._util.schema import parse_json
from mivhead.app.history import HIDDEN, TRASH, History, Move, changing, inside, trash_path
from mivhead.decision import MAX_ERRORS, NONE, UNSURE
from mivhead.errors import ImageError, InputError, NotAvailableError, check_file, reason_of
from mivhead.images.decoding import load_image
from mivhead.images.imageset import (
    free_name,
    is_image_name,
    is_litter,
    natural_key,
    normal,
    safe_name,
)

MODEL = "model.miv"
NEW = f"{HIDDEN}/new"  # photos to be named
THUMBS = f"{HIDDEN}/thumbs"
SETTINGS = f"{HIDDEN}/settings.json"
ERRORS = (0.02, 0.05, 0.1, 0.2, 0.3)  # fractions of wrong names that can be allowed
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


class Project:
    """A folder of class folders; its methods may be called from several threads.

    The folder is created if it is missing. One process at a time may open it.

    >>> import tempfile
    >>> project = Project(tempfile.mkdtemp())
    >>> project.add_class("robin")
    >>> list(project.snapshot.classes)
    ['robin']
    >>> project.undo()
    >>> project.snapshot.classes
    {}
    >>> project.close()
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{folder} is a file: name a folder for the project.")
        try:
            for name in (NEW, THUMBS, TRASH):
                inside(self.folder, name).mkdir(parents=True, exist_ok=True)
            for path in (self.folder / HIDDEN).iterdir():
                inside(self.folder, f"{HIDDEN}/{path.name}")  # refuses links
                if not path.is_dir():
                    check_file(path)  # opening a pipe would block
            self._lock = FileLock(self.folder / HIDDEN / "lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise NotAvailableError(
                f"{folder} is open in another `miv app`: use that page, or stop it first."
            ) from None
        except OSError as error:
            reason = reason_of(error)
            raise NotAvailableError(f"Cannot open {folder}: {reason}; choose another.") from error
        self._mutex = threading.RLock()
        self.history = History(self.folder)
        self.message = self._notice()
        self.snapshot = Snapshot(0, {}, ())  # what there is; replaced as a whole
        self.max_errors = self._read_max_errors()  # fraction of wrong names that is allowed
        self.problems: dict[str, str] = {}  # why a photo cannot be read, by its id
        self.rescan()

    def close(self) -> None:
        """Let another process open the project."""
        self._lock.release()

    def _notice(self) -> str:
        """Say what the user should know at the start: old trash, and classes that are links."""
        notes = []
        folders = [path for path in (self.folder / HIDDEN).iterdir() if path.is_dir()]
        known = [self.folder / name for name in (NEW, THUMBS)]
        if filled := [str(path) for path in folders if path not in known and any(path.iterdir())]:
            notes.append(
                f"What you deleted earlier is still in {' and '.join(filled)}. Undo does not reach "
                "it; the app never empties this folder."
            )
        links = [path.name for path in self.folder.iterdir() if path.is_symlink()]
        if names := ", ".join(sorted(filter(_may_be_class, links))):
            notes.append(f"Links are not followed: {names}.")
        return " ".join(notes)

    def _read_max_errors(self) -> float:
        with suppress(OSError, ValueError):
            kept = parse_json((self.folder / SETTINGS).read_bytes())
            if kept in [{"max_errors": step} for step in ERRORS]:
                return float(kept["max_errors"])
        return MAX_ERRORS

    def allow_errors(self, max_errors: float) -> None:
        """Choose the fraction of wrong names among the names; the project keeps it."""
        if max_errors not in ERRORS:
            raise InputError(f"max_errors must be one of {ERRORS}, got {max_errors}.")
        with changing():
            write_text(self.folder / SETTINGS, json.dumps({"max_errors": max_errors}))
        self.max_errors = max_errors

    # What there is.

    def class_named(self, name: str) -> str | None:
        """Return the class of this name, regardless of case; None if there is none."""
        classes = self.snapshot.classes
        return next((known for known in classes if known.casefold() == name.casefold()), None)

    def find(self, photo_id: str) -> tuple[str, Photo]:
        """Return the class of a photo, empty for a new one, and the photo."""
        for label, photos in {**self.snapshot.classes, "": self.snapshot.new}.items():
            for photo in photos:
                if photo.id == photo_id:
                    return label, photo
        raise InputError("The photo no longer exists.")

    def rescan(self) -> None:
        """Look for changes, also those that were made in a file manager."""
        with self._mutex:
            try:
                with os.scandir(self.folder) as entries:
                    folders = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
            except OSError:  # out of reach, such as a drive that is unplugged
                return
            classes = {}
            for name in sorted(filter(_may_be_class, folders), key=natural_key):
                photos, has_others = _list_photos(self.folder, name)
                if photos or not has_others:  # else it is a folder of something else
                    classes[name] = photos
            new, _ = _list_photos(self.folder, NEW)
            before = self.snapshot
            if (classes, new) != (before.classes, before.new):
                self.snapshot = Snapshot(before.version + 1, classes, new)

    # Changes.

    def add_class(self, name: str, batch: str = "") -> None:
        """Make a class."""
        name = check_class_name(name)
        with self._mutex:
            self._check_free(name)
            with changing():
                inside(self.folder, name).mkdir()
            self.history.note("add class", name, [(trash_path(name), name)], batch)
            self.rescan()

    def rename_class(self, old: str, new: str) -> None:
        """Rename a class; if the new name is that of another class, the two become one."""
        new = check_class_name(new)
        with self._mutex:
            self._check_class(old)
            into = self.class_named(new)
            if new == old:
                return
            if into is None or into == old:
                self._check_free(new, besides=old)
                self._change("rename class", new, [(old, new)])
            else:
                moves = self._moves_into(into, self.snapshot.classes[old])
                moves.append((old, trash_path(old)))  # what is left of the folder
                self._change("merge class", into, moves)

    def remove_class(self, name: str) -> None:
        """Delete a class with its photos."""
        with self._mutex:
            self._check_class(name)
            self._change("delete class", name, [(name, trash_path(name))])

    def add_photo(self, data: bytes, name: str, label: str | None, batch: str = "") -> Photo:
        """Add a photo to a class, or to the new ones if `label` is None."""
        name = safe_name(normal(name))
        if not data:
            raise ImageError(f"{name} is empty (0 bytes).")
        picture = load_image(data, name=name)  # outside the lock: it takes a moment
        if not is_image_name(name):  # such as a pasted "image" without a suffix
            name += _suffix(data)
        with self._mutex:
            if label is not None:
                self._check_class(label)
            self._check_not_there(data, name, label)
            target = self._free_path(label or NEW, name)
            with replacing(inside(self.folder, target)) as part:
                part.write_bytes(data)
            self.history.note("add", label or "", [(trash_path(name), target)], batch)
            self.rescan()
            photos = self.snapshot.new if label is None else self.snapshot.classes[label]
            photo = next(photo for photo in photos if photo.path == target)
        with suppress(OSError):  # it can be made later
            self.thumbnail(photo, picture)
        return photo

    def move(self, ids: Sequence[str], label: str | None, *, create: bool = False) -> None:
        """Move photos to a class, which may be created, or to the new ones if `label` is None."""
        batch = uuid4().hex
        with self._mutex:
            if label is not None and create:
                label = check_class_name(label)
                label = self.class_named(label) or label
                if label not in self.snapshot.classes:
                    self.add_class(label, batch)
            if label is not None:
                self._check_class(label)
            located = [self.find(photo_id) for photo_id in ids]
            elsewhere = [photo for old, photo in located if old != (label or "")]
            if elsewhere:
                self._change("move", label or "", self._moves_into(label or NEW, elsewhere), batch)

    def remove(self, ids: Sequence[str]) -> None:
        """Delete photos."""
        with self._mutex:
            located = [self.find(photo_id) for photo_id in ids]
            moves = [(photo.path, trash_path(photo.name)) for _, photo in located]
            if moves:
                self._change("delete", located[0][0], moves)

    def undo(self) -> None:
        """Undo the last change."""
        with self._mutex:
            self.history.undo()
            self.rescan()

    def redo(self) -> None:
        """Make what was undone last again."""
        with self._mutex:
            self.history.redo()
            self.rescan()

    def _change(self, action: str, target: str, moves: Sequence[Move], batch: str = "") -> None:
        self.history.make(action, target, moves, batch)
        self.rescan()

    def _check_class(self, name: str) -> None:
        if name not in self.snapshot.classes:
            raise InputError(f"There is no class {name!r:.100}: it was renamed or deleted.")

    def _check_free(self, name: str, besides: str | None = None) -> None:
        if (known := self.class_named(name)) not in (None, besides):
            raise InputError(f"The class {known!r} already exists.")
        if name.casefold() != (besides or "").casefold() and (self.folder / name).exists():
            raise InputError(f"The project has a file or folder {name!r} that is not a class.")

    def _check_not_there(self, data: bytes, name: str, label: str | None) -> None:
        """Refuse a photo that the project has; a new one may be a shot as well."""
        groups = {None: self.snapshot.new} if label is None else self.snapshot.classes
        for group, photos in groups.items():
            for photo in photos:
                if photo.size != len(data):
                    continue
                with suppress(OSError):  # deleted meanwhile
                    if (self.folder / photo.path).read_bytes() == data:
                        where = "among the new photos" if group is None else f"in {group!r}"
                        raise InputError(f"{name} is already {where} ({photo.name}).")

    def _moves_into(self, folder: str, photos: Iterable[Photo]) -> list[Move]:
        """Return the moves of photos into a folder, under names that are free."""
        moves: dict[str, str] = {}  # by the new path
        for photo in photos:
            moves[self._free_path(folder, photo.name, moves)] = photo.path
        return [(old, new) for new, old in moves.items()]

    def _free_path(self, folder: str, name: str, taken: Container[str] = ()) -> str:
        return free_name(
            f"{folder}/{name}", lambda path: path in taken or (self.folder / path).exists()
        )

    # Thumbnails, made once per photo; they also tell which photos cannot be read.

    def thumbnail(self, photo: Photo, picture: Image.Image | None = None) -> Path:
        """Return the file of a small JPEG of a photo; raise an `ImageError` if it is unreadable."""
        path = self.folder / THUMBS / f"{photo.id}.jpg"
        if path.exists():
            return path
        if photo.id in self.problems:
            raise ImageError(self.problems[photo.id])
        try:
            small = (picture or self.preview(photo)).copy()
        except ImageError as error:
            if (self.folder / photo.path).exists():  # else it is being moved
                self.problems[photo.id] = str(error)
            raise
        small.thumbnail((THUMB, THUMB))
        part = path.with_suffix(f".{uuid4().hex[:8]}.part")
        small.save(part, "JPEG", quality=82)
        part.replace(path)
        return path

    def preview(self, photo: Photo) -> Image.Image:
        """Return the photo as a picture of at most 1,280 pixels."""
        picture = load_image(self.folder / photo.path, name=photo.name)
        picture.thumbnail((PREVIEW, PREVIEW))
        return picture


def to_jpeg(picture: Image.Image) -> bytes:
    """Encode a picture for the page."""
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


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
    if not 1 <= len(name) <= MAX_CLASS_NAME:
        raise InputError(f"Give the class a name of at most {MAX_CLASS_NAME} characters.")
    if is_litter(name):
        raise InputError(f"{name!r} is the name of a hidden folder: choose another one.")
    if not _may_be_class(name):
        raise InputError(f"{name!r} is not a class: it holds photos that nobody named.")
    if safe_name(name) != name:
        raise InputError(f'{name!r} cannot be the name of a folder: leave out / \\ : * ? " < > |.')
    return name


def _may_be_class(name: str) -> bool:
    """Return whether a folder can be a class: not if `miv predict --sort-into` gave it no name."""
    return not is_litter(name) and name.casefold() not in (UNSURE, NONE)


def _list_photos(root: Path, folder: str) -> tuple[tuple[Photo, ...], bool]:
    """Return the photos below a folder, the newest first, and whether there are other files."""
    photos: list[Photo] = []
    has_others = False
    for place, folders, files in os.walk(root / folder):  # which does not follow links
        folders[:] = [name for name in folders if not is_litter(name)]
        below = Path(place).relative_to(root).as_posix()
        for name in files:
            with suppress(OSError, ValueError):  # deleted meanwhile, or not valid UTF-8
                facts = os.lstat(f"{place}/{name}")  # quicker than a `Path`
                if is_litter(name) or stat.S_ISLNK(facts.st_mode):
                    continue
                if stat.S_ISREG(facts.st_mode) and is_image_name(name):
                    key = f"{facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"
                    photo_id = hashlib.blake2s(key.encode(), digest_size=10).hexdigest()
                    path = f"{below}/{name}"
                    path.encode()
                    photos.append(Photo(photo_id, path, facts.st_size, facts.st_mtime_ns))
                else:
                    has_others = True
    photos.sort(key=lambda photo: (-photo.time, natural_key(photo.path)))
    return tuple(photos), has_others


def _suffix(data: bytes) -> str:
    """Return the suffix for the name of an image file, by its content."""
    with Image.open(BytesIO(data)) as image:
        return f".{(image.format or 'png').lower()}".replace("jpeg", "jpg")
