"""Open images as an `ImageSet`: from folders, zips, tables, or images in memory.

`open_labelled` is for training and evaluation, `open_unlabelled` and `as_image_set` for prediction.
Nothing is decoded until an image is loaded.
"""

from __future__ import annotations

import glob
import os
import stat
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from PIL import Image

from mivhead._util.tables import LABELS, PATHS, read_columns
from mivhead.errors import ImageError, InputError, check_file, no_such_path, reading
from mivhead.images.decoding import check_local, read_capped
from mivhead.images.imageset import (
    ImageSet,
    ImageSource,
    check_names,
    from_images,
    given,
    is_image_name,
    is_litter,
    natural_key,
    normal,
)

# Of zips.
MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 16 * 2**30
MAX_RATIO = 200  # only checked above 1 GiB: a few plain bitmaps may compress this well
MAX_DEPTH = 64  # folders around an image
_RATIO_FROM = 2**30
# Other methods (bzip2, LZMA) can expand a few bytes to gigabytes before Python checks the size.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Listing(NamedTuple):
    """What is in a folder or zip; ids and names are paths inside it."""

    images: list[ImageSource]
    folders: set[str]
    others: list[str]  # files that are not images


def open_labelled(
    path: str | os.PathLike[str], *, min_classes: int = 2, label: str | None = None
) -> ImageSet:
    """Open labelled images without decoding them.

    Parameters
    ----------
    path : str or path-like
        A folder that contains one folder per class (deeper folders belong to the class that they
        are in), a zip of such a folder, or a CSV with a path and a label column. Hidden files are
        ignored; `ImageSet.ignored` names other files that are not images in class folders.
    min_classes : int, default=2
        The minimum number of classes: two for training, one for evaluation.
    label : str or None, default=None
        The column of the labels in a CSV; None: `label` or `class`.

    Returns
    -------
    ImageSet
        Folders and zips are sorted by name in natural order, a CSV keeps the order of its rows. A
        folder and a zip of it have the same ids.
    """
    check_local(path)
    path = Path(path)
    is_table = path.suffix.lower() in (".csv", ".tsv") and not path.is_dir()
    if label is not None and not is_table:
        raise InputError(f"A label column is for CSV files, and {path} is not one.")
    if path.is_dir():
        images = _label_by_folder(path, _list_folder(path))
    elif not path.exists():
        raise no_such_path(path)
    elif is_table:
        images = _open_table(path, label)
    elif path.suffix.lower() == ".zip":
        images = _label_by_folder(path, list_zip(path))
    else:
        raise InputError(f"{path} is not a folder of class folders, a .zip or a .csv.")
    check_names((*images.classes, *images.ids))
    if len(images.classes) < min_classes:
        only = images.classes[0]
        raise InputError(f"{path} has only the class {only!r}; {min_classes} are required.")
    return images


def open_unlabelled(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> ImageSet:
    """Open images to predict, without decoding them.

    Parameters
    ----------
    paths : path or iterable of paths
        Images, folders (searched recursively), zips, patterns such as `new/*.jpg`, or several of
        these. The given order is kept; the contents of a folder, zip or pattern are sorted by name
        in natural order.

    Returns
    -------
    ImageSet
        Without labels. An id is the given path, followed by the path inside a folder or zip.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    names = [os.fspath(path) for path in paths]
    whole = " ".join(names)
    if len(names) > 1 and os.path.exists(whole):  # noqa: PTH110  # a Path may be too long
        raise InputError(f'Put a name with spaces into quotes: "{whole}".')
    sources: list[ImageSource] = []
    for name in names:
        check_local(name)
        sources += _find(Path(name))
    if not sources:
        raise InputError("There are no images: give at least one.")
    return ImageSet(tuple(sources))


def as_image_set(images: Any) -> ImageSet:
    """Return an `ImageSet` of paths, folders, zips, images, arrays, or another `ImageSet`."""
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, str | os.PathLike):
        return open_unlabelled([images])
    one = isinstance(images, Image.Image | bytes) or hasattr(images, "read")  # a file is iterable
    if one or getattr(images, "ndim", 4) in (2, 3):
        return from_images([images])
    listed = list(images)
    if listed and all(isinstance(image, str | os.PathLike) for image in listed):
        return open_unlabelled(listed)
    return from_images(listed)


def _find(path: Path) -> Iterator[ImageSource]:
    is_zip = path.suffix.lower() == ".zip" and path.is_file()
    if path.is_dir() or is_zip:
        listing = list_zip(path) if is_zip else _list_folder(path)
        if not listing.images:
            raise InputError(f"{path} contains no images.")
        for source in _sorted(listing.images):
            yield replace(source, id=f"{path.as_posix()}/{source.id}")
    elif path.exists():
        if is_image_name(path.name) or not is_litter(path.name):  # `new/*` may name a Thumbs.db
            yield ImageSource(path.as_posix(), given(path), str(path))
    else:
        matches = expand_pattern(path)
        if not matches:
            raise no_such_path(path)
        for match in matches:
            yield from _find(match)


def expand_pattern(pattern: Path) -> list[Path]:
    """Return what matches a pattern: some shells do not expand it, and Python never does."""
    if "**" in pattern.parts:  # unlike `glob.glob`, this follows no links
        base = Path(pattern.anchor)
        found: Iterable[Path] = base.glob(str(pattern.relative_to(base)))
    else:
        found = map(Path, glob.glob(str(pattern)))  # noqa: PTH207  # also absolute patterns
    matches: dict[Path, None] = {}
    for path in sorted(found, key=lambda path: natural_key(str(path))):
        # What is in a folder that matches is listed with the folder.
        if not is_litter(path.name) and matches.keys().isdisjoint(path.parents):
            matches[path] = None
    return list(matches)


def walk(root: str | Path) -> Iterator[tuple[str, bool]]:
    """Yield the files and folders below a folder, and whether each is a folder.

    Paths are relative to `root`, with `/`. A folder's files come first, in natural order, then its
    folders; hidden ones are left out. Links are followed after everything else, and every real
    folder is visited once: folders that link to each other would otherwise never end.
    """
    visited: set[tuple[int, int]] = set()
    waiting = deque([str(root)])

    def fail(error: OSError) -> None:
        raise error

    while waiting:
        top = waiting.popleft()
        with reading(f"The folder {top}"):
            for folder, below, files in os.walk(top, onerror=fail):
                facts = os.stat(folder)  # noqa: PTH116  # a string
                below[:] = sorted((name for name in below if not is_litter(name)), key=natural_key)
                if (facts.st_dev, facts.st_ino) in visited:
                    below.clear()
                    continue
                visited.add((facts.st_dev, facts.st_ino))
                inside = Path(folder).relative_to(root)
                if inside.parts:
                    yield inside.as_posix(), True
                for name in sorted(files, key=natural_key):
                    if not is_litter(name):
                        yield (inside / name).as_posix(), False
                waiting += [str(Path(folder, n)) for n in below if Path(folder, n).is_symlink()]


def _list_folder(root: Path) -> Listing:
    listing = Listing([], set(), [])
    for inside, is_folder in walk(root):
        if is_folder:
            listing.folders.add(normal(inside))
        elif is_image_name(inside):
            file = root / inside
            listing.images.append(ImageSource(normal(inside), given(file), str(file)))
        else:
            listing.others.append(inside)
    return listing


def _label_by_folder(path: Path, listing: Listing) -> ImageSet:
    images, folders, others = _unwrap(listing)
    inside = _sorted(source for source in images if "/" in source.id)
    labels = tuple(_top(source.id) for source in inside)
    layout = f"put each class's images into a folder named after it, such as {path}/cat/1.jpg."
    if not images:
        raise InputError(f"{path} contains no images; {layout}")
    if not inside:
        raise InputError(f"{path} contains images but no class folders; {layout}")
    if empty := sorted(set(map(_top, folders)) - set(labels)):
        raise InputError(
            f"The class folder {empty[0]!r} in {path} contains no images; add some or remove it."
        )
    ignored = [source.id for source in images if "/" not in source.id]
    ignored += [name for name in others if not name.endswith(".miv")]  # the app's model
    return ImageSet(tuple(inside), labels, tuple(ignored))


def _unwrap(listing: Listing) -> Listing:
    """Remove the single folder that zip programs often put around the class folders."""
    images, folders, others = listing
    inner = {_below(folder) for folder in folders if "/" in folder}
    wrapped = len(set(map(_top, folders))) == 1 and len(set(map(_top, inner))) > 1
    if not wrapped or any(source.id.count("/") < 2 for source in images):
        return listing
    return Listing([replace(source, id=_below(source.id)) for source in images], inner, others)


def _below(path: str) -> str:
    return path.partition("/")[2]


def _top(path: str) -> str:
    return path.partition("/")[0]


def _sorted(sources: Iterable[ImageSource]) -> list[ImageSource]:
    return sorted(sources, key=lambda source: natural_key(source.id))


# Zips: members are read one at a time and never unpacked to disk. A zip may come from anyone: one
# with absolute or `..` paths, links, passwords or an implausible compression ratio is refused as a
# whole, and a member is read up to a limit, whatever its header says.


def list_zip(path: Path | str, file: IO[bytes] | None = None) -> Listing:
    """List a zip; an open file is read instead of the path, which then only names it."""
    with reading(f"The zip {path}", zipfile.BadZipFile, ValueError, NotImplementedError, Warning):
        if file is None:
            check_file(path)
        archive = zipfile.ZipFile(path if file is None else file)
    members = archive.infolist()
    _check_size(path, members, archive.fp)
    listing = Listing([], set(), [])
    for member in members:
        name = normal(member.filename.replace("\\", "/"))
        _check_member(path, name, member)
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if any(map(is_litter, parts)):
            continue
        is_folder = name.endswith("/")
        depth = len(parts) if is_folder else len(parts) - 1
        listing.folders.update("/".join(parts[: end + 1]) for end in range(depth))
        if is_image_name(name):
            get = partial(_read_member, archive, member, f"{path}/{name}")
            listing.images.append(ImageSource("/".join(parts), get, f"{path}/{name}"))
        elif not is_folder:
            listing.others.append("/".join(parts))
    return listing


def _check_size(path: Path | str, members: list[zipfile.ZipInfo], file: IO[bytes] | None) -> None:
    if len(members) > MAX_MEMBERS:
        raise InputError(f"{path} has {len(members):,} members; at most {MAX_MEMBERS:,} are read.")
    total = sum(member.file_size for member in members)
    ratio = total / max(1, file.seek(0, os.SEEK_END) if file is not None else 0)
    if total > MAX_TOTAL_BYTES or (total > _RATIO_FROM and ratio > MAX_RATIO):
        size = f"{total / 2**30:.1f} GiB, {ratio:,.0f} times its size"
        raise InputError(f"{path} would unpack to {size}, which is too much.")


def _check_member(path: Path | str, name: str, member: zipfile.ZipInfo) -> None:
    """Raise an error for a suspicious member; `name` has forward slashes only."""
    problem = None
    if name.startswith("/") or name[1:2] == ":" or ".." in name.split("/"):
        problem = "a path that leads out of the zip"
    elif name.count("/") > MAX_DEPTH:
        problem = f"a path of more than {MAX_DEPTH} folders"
    elif stat.S_ISLNK(member.external_attr >> 16):
        problem = "a link"
    elif member.flag_bits & 0x1:
        problem = "which is encrypted"
    elif member.compress_type not in _METHODS:
        problem = "in an unsupported compression"
    if problem is not None:
        raise InputError(f"{path} contains {member.filename!r:.200}, {problem}; zip it again.")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> bytes:
    try:
        with archive.open(member) as file:
            return read_capped(file, name)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ImageError(f"{name} is corrupted: {error or type(error).__name__}.") from error


# Tables of image paths and labels.


def _open_table(path: Path, label: str | None) -> ImageSet:
    """Open a table with one row per image: its path and its label.

    Without a header, these are the first two columns. Paths are relative to the folder of the
    table, to the current folder, or absolute. Rows keep their order.
    """
    check_file(path)
    sources, labels, seen = [], [], set()
    columns = (PATHS, LABELS if label is None else [label])
    is_data = is_image_name if label is None else None  # a header names the column
    with reading(path), path.open("rb") as file:
        for line, (cell, name) in read_columns(file, str(path), *columns, is_data=is_data):
            relative = PurePosixPath(cell.replace("\\", "/"))
            if relative in seen:
                raise InputError(f"{path}, line {line}: {relative} is listed twice.")
            if str(relative).startswith("//"):
                raise InputError(f"{path}, line {line}: {relative} is on another computer.")
            seen.add(relative)
            image = path.parent / relative
            if not image.exists() and Path(relative).exists():
                image = Path(relative)  # of the current folder: the table came from elsewhere
            place = f"{image} ({path.name}, line {line})"
            sources.append(ImageSource(normal(str(relative)), given(image), place))
            labels.append(normal(name))
    if not sources:
        raise InputError(f"{path} lists no images.")
    return ImageSet(tuple(sources), tuple(labels))
