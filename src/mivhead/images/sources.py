"""Open images as an `ImageSet`: from folders, zips, tables, records, or images in memory.

`open_labelled` is for training and evaluation, `open_unlabelled` and `as_image_set` for prediction.
Nothing is decoded until an image is loaded.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from pkgutil import resolve_name
from typing import IO, Any

from PIL import Image

from mivhead.errors import ImageError, InputError
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
from mivhead.images.places import check_depth, walk

# Tables: suffixes, names of the columns in a header, and the largest size.
_TABLES = (".csv", ".tsv")
PATH_NAMES = ("path", "file", "image", "filename")
LABEL_NAMES = ("label", "class")
MAX_TABLE_BYTES = 64 * 2**20

# Files of arrays and data frames, which hold no images.
_ARRAYS = (".npz", ".npy", ".pt", ".pth", ".pkl", ".parquet", ".feather", ".h5", ".hdf5", ".mat")

# Zips.
MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 16 * 2**30
MAX_RATIO = 200  # only checked above 1 GiB: a few plain bitmaps may compress this well
_RATIO_FROM = 2**30
# Other methods (bzip2, LZMA) can expand a few bytes to gigabytes before Python checks the size.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

# Folders with such a file have a format of their own. The function that opens them is named, not
# imported, because `mivhead.datasets` builds on this package.
_FORMATS = {"dataset_spec.json": "mivhead.datasets.records:open_records"}


def open_labelled(
    path: str | os.PathLike[str],
    *,
    min_classes: int = 2,
    label: str | None = None,
    encoding: str | None = None,
) -> ImageSet:
    """Open labelled images without decoding them.

    Parameters
    ----------
    path : str or path-like
        A folder that contains one folder per class (deeper folders belong to the class that they
        are in), a zip of such a folder, or a CSV with a path and a label column. Hidden files,
        files that are not images, and files outside the class folders are ignored. A folder of
        Meta-Dataset's records is accepted as well; its test split is used.
    min_classes : int, default=2
        The minimum number of classes: two for training, one for evaluation.
    label : str or None, default=None
        The column of the labels in a CSV; None: `label` or `class`.
    encoding : str or None, default=None
        The encoding of a CSV, such as `"cp1252"`; None: UTF-8, or UTF-16 with a byte-order mark.

    Returns
    -------
    ImageSet
        Folders and zips are sorted by name in natural order, a CSV keeps the order of its rows. A
        folder and a zip of it have the same ids.
    """
    check_local(path)
    path = Path(path)
    is_table = path.suffix.lower() in _TABLES and not path.is_dir()
    if (label or encoding) and not is_table:
        raise InputError(
            f"A label column and an encoding are for CSV files, and {path} is not one."
        )
    opener = next((name for file, name in _FORMATS.items() if (path / file).is_file()), None)
    if opener is not None:
        images: ImageSet = resolve_name(opener)(path)
    elif path.is_dir():
        images = _label_by_folder(path, *_unwrap(*_list_folder(path)))
    elif not path.exists():
        raise InputError(f"{path} does not exist.")
    elif is_table:
        images = open_table(path, label, encoding)
    elif path.suffix.lower() == ".zip":
        images = _label_by_folder(path, *_unwrap(*list_zip(path)))
    elif path.suffix.lower() in _ARRAYS:
        raise InputError(
            f"{path} is not a folder of class folders, a .zip or a .csv. If it holds features, fit "
            "them in Python, mivhead.MIVClassifier().fit(X, y), or write them to a features file, "
            "mivhead.FeatureTable(mivhead.Features(X), ids, labels).save('features.safetensors'), "
            "which miv fit takes."
        )
    else:
        raise InputError(f"{path} is not a folder of class folders, a .zip or a .csv.")
    check_names(images.classes)
    check_names(images.ids)
    if len(images.classes) < min_classes:
        only = ", ".join(map(repr, images.classes))
        raise InputError(
            f"{path} has only the class {only}; at least {min_classes} classes are required, "
            "each in its own folder."
        )
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
    paths = list(paths)
    for path in paths:
        check_local(path)
    sources = [source for path in paths for source in _find(Path(path))]
    if not sources:
        raise InputError("There are no images: give at least one.")
    return ImageSet(tuple(sources))


def as_image_set(images: Any) -> ImageSet:
    """Return an `ImageSet` of paths, folders, zips, images, arrays, or another `ImageSet`.

    >>> len(as_image_set(io.BytesIO(b"a file is one image, although it is iterable")))
    1
    """
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, str | os.PathLike):
        return open_unlabelled([images])
    one = isinstance(images, Image.Image | bytes) or hasattr(images, "read")
    if one or getattr(images, "ndim", 4) in (2, 3):
        return from_images([images])
    listed = list(images)
    if listed and all(isinstance(each, str | os.PathLike) for each in listed):
        return open_unlabelled(listed)
    return from_images(listed)


def _find(path: Path) -> Iterator[ImageSource]:
    if path.is_dir() or (path.suffix.lower() == ".zip" and path.is_file()):
        _, found = _list_folder(path) if path.is_dir() else list_zip(path)
        if not found:
            raise InputError(f"{path} contains no images.")
        for source in _sorted(found):
            yield replace(source, id=f"{path.as_posix()}/{source.id}")
    elif path.exists():
        if is_image_name(path.name) or not is_litter(path.name):  # `new/*` may name a Thumbs.db
            yield ImageSource(path.as_posix(), given(path), str(path))
    else:
        matches = expand_pattern(path)
        if not matches:
            raise InputError(f"{path} does not exist.")
        for match in matches:
            yield from _find(match)


def expand_pattern(pattern: Path) -> list[Path]:
    """Return what matches a pattern: some shells do not expand it, and Python never does."""
    matches: Iterable[Path]
    if "**" not in pattern.parts:
        matches = map(Path, glob.glob(str(pattern)))  # noqa: PTH207  # Path.glob takes relative patterns only
    else:  # unlike `glob.glob`, this follows no links
        base = Path(pattern.anchor)
        found = base.glob(str(pattern.relative_to(base)))
        matches = (path for path in found if not is_litter(path.name))
    kept: set[Path] = set()
    for path in sorted(matches, key=lambda path: natural_key(str(path))):
        if kept.isdisjoint(path.parents):  # else it is listed with the folder that it is in
            kept.add(path)
    return sorted(kept, key=lambda path: natural_key(str(path)))


def _list_folder(root: Path) -> tuple[set[str], list[ImageSource]]:
    """Return the folders below `root` and its images, whose ids are their paths inside `root`."""
    folders, sources = set(), []
    for inside, is_folder in walk(str(root)):
        if is_folder:
            folders.add(normal(inside))
        elif is_image_name(inside):
            entry = root / inside
            sources.append(ImageSource(normal(inside), given(entry), str(entry)))
    return folders, sources


def list_ignored(path: str | os.PathLike[str]) -> list[str]:
    """Return the files of a folder or zip of class folders that `open_labelled` ignores.

    Those are files that are not images, and images outside the class folders. What systems leave
    behind, such as `.DS_Store`, and the model of an app's project do not count. Anything else than
    a folder or zip ignores nothing.
    """
    path = Path(path)
    if path.is_dir():
        files = (each for each, is_folder in walk(str(path)) if not is_folder)
    elif path.suffix.lower() == ".zip" and path.is_file():
        with zipfile.ZipFile(path) as archive:
            names = [
                PurePosixPath(each.filename) for each in archive.infolist() if not each.is_dir()
            ]
        files = (str(each) for each in names if not any(map(is_litter, each.parts)))
    else:
        return []
    outside = [each for each in files if "/" not in each or not is_image_name(each)]
    return [each for each in outside if not each.endswith(".miv")]


def _unwrap(folders: set[str], sources: list[ImageSource]) -> tuple[set[str], list[ImageSource]]:
    """Remove the single folder that zip programs often put around the class folders."""
    inner = {_below(folder) for folder in folders if "/" in folder}
    wrapped = len(_tops(folders)) == 1 and len(_tops(inner)) > 1
    if not wrapped or any(source.id.count("/") < 2 for source in sources):
        return folders, sources
    return inner, [replace(source, id=_below(source.id)) for source in sources]


def _below(path: str) -> str:
    return path.partition("/")[2]


def _tops(folders: Iterable[str]) -> set[str]:
    return {folder.partition("/")[0] for folder in folders}


def _label_by_folder(path: Path, folders: set[str], sources: list[ImageSource]) -> ImageSet:
    inside = _sorted(source for source in sources if "/" in source.id)
    labels = tuple(source.id.partition("/")[0] for source in inside)
    layout = (
        "put each class's images into a folder named after it, "
        f"such as {path}/cat/1.jpg and {path}/dog/1.jpg."
    )
    if not sources:
        raise InputError(f"{path} contains no images; {layout}")
    if not inside:
        raise InputError(f"{path} contains images but no class folders; {layout}")
    if empty := sorted(_tops(folders) - set(labels)):
        raise InputError(
            f"The class folder {empty[0]!r} in {path} contains no images; add some or remove it."
        )
    return ImageSet(tuple(inside), labels)


def _sorted(sources: Iterable[ImageSource]) -> list[ImageSource]:
    return sorted(sources, key=lambda source: natural_key(source.id))


# Zips: members are read one at a time and never unpacked to disk. A zip may come from anyone: one
# with absolute or `..` paths, links, passwords or an implausible compression ratio is refused as a
# whole, and a member is read up to a limit, whatever its header says.


def list_zip(path: Path | str, file: IO[bytes] | None = None) -> tuple[set[str], list[ImageSource]]:
    """Return the folders in a zip and its images, whose ids are their paths inside the zip.

    An open file is read instead of the path, which then only names it.
    """
    try:
        archive = zipfile.ZipFile(path if file is None else file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path} cannot be read as a zip: {error}.") from error
    infos = archive.infolist()
    _check_size(path, infos, archive.fp)
    folders: set[str] = set()
    sources = []
    for info in infos:
        member = normal(info.filename.replace("\\", "/"))
        _check_member(path, member, info)
        parts = [part for part in member.split("/") if part not in ("", ".")]
        check_depth(f"{path}/{member}", len(parts))
        if any(map(is_litter, parts)):
            continue
        is_folder = member.endswith("/")
        depth = len(parts) if is_folder else len(parts) - 1
        folders.update("/".join(parts[: end + 1]) for end in range(depth))
        if not is_folder and is_image_name(member):
            get = partial(_read_member, archive, info, f"{path}/{member}")
            sources.append(ImageSource("/".join(parts), get, f"{path}/{member}"))
    return folders, sources


def _check_size(path: Path | str, infos: list[zipfile.ZipInfo], file: IO[bytes] | None) -> None:
    if len(infos) > MAX_MEMBERS:
        raise InputError(f"{path} has {len(infos):,} members; at most {MAX_MEMBERS:,} are read.")
    total = sum(info.file_size for info in infos)
    ratio = total / max(1, file.seek(0, os.SEEK_END) if file is not None else 0)
    if total > MAX_TOTAL_BYTES or (total > _RATIO_FROM and ratio > MAX_RATIO):
        raise InputError(
            f"{path} would unpack to {total / 2**30:.1f} GiB, {ratio:,.0f} times its size; "
            f"the limits are {MAX_TOTAL_BYTES // 2**30} GiB and {MAX_RATIO} times."
        )


def _check_member(path: Path | str, member: str, info: zipfile.ZipInfo) -> None:
    """Raise an error for a suspicious member; `member` has forward slashes only."""
    if member.startswith("/") or member[1:2] == ":" or ".." in member.split("/"):
        raise InputError(
            f"{path} contains {info.filename!r}, a path that leads out of the zip; zip it again."
        )
    if stat.S_ISLNK(info.external_attr >> 16):
        raise InputError(f"{path} contains the link {member!r}; zip the files themselves.")
    if info.flag_bits & 0x1:
        raise InputError(f"{path} is encrypted ({member!r}); zip it without a password.")
    if info.compress_type not in _METHODS:
        raise InputError(f"{path} contains {member!r} in an unsupported compression; use deflate.")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> bytes:
    try:
        with archive.open(info) as file:
            return read_capped(file, name)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ImageError(f"{name} is corrupted: {error or type(error).__name__}.") from error


# Tables of image paths and labels.


def open_table(path: Path, label: str | None = None, encoding: str | None = None) -> ImageSet:
    """Open a table with one row per image: its path and its label.

    A header names the columns (`path`, `file`, `image` or `filename`; `label`, `class`, or the
    given one); without a header they are the first two. The separator is a comma, semicolon or tab.
    Paths are relative to the folder of the table, to the current folder, or absolute. Rows keep
    their order.
    """
    rows = _read_rows(path, encoding)
    if not rows:
        raise InputError(f"{path} is empty; expected a row with a path and a label per image.")
    path_at, label_at, rows = _find_columns(path, rows, label)
    sources, labels, seen = [], [], set()
    for line, row in rows:
        if len(row) <= max(path_at, label_at) or not row[path_at] or not row[label_at]:
            raise InputError(f"{path}, line {line}: expected a path and a label, got {row}.")
        relative = PurePosixPath(row[path_at].replace("\\", "/"))
        if relative in seen:
            raise InputError(f"{path}, line {line}: {relative} is listed twice.")
        seen.add(relative)
        file = path.parent / relative
        if not file.exists() and Path(relative).exists():
            file = Path(relative)  # of the current folder, where the table was downloaded elsewhere
        name = f"{file} ({path.name}, line {line})"
        sources.append(ImageSource(normal(str(relative)), given(file), name))
        labels.append(normal(row[label_at]))
    if not sources:
        raise InputError(f"{path} has a header but no rows.")
    return ImageSet(tuple(sources), tuple(labels))


def _read_rows(path: Path, encoding: str | None) -> list[tuple[int, list[str]]]:
    """Return the non-blank rows with their line numbers."""
    chosen = encoding
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a regular file.")  # reading a pipe could block
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise InputError(f"{path} is larger than {MAX_TABLE_BYTES // 2**20} MiB.")
        data = path.read_bytes()
        if chosen is None:
            marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            chosen = "utf-16" if marked else "utf-8-sig"
        text = data.decode(chosen)
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except LookupError:
        raise InputError(f"The encoding {encoding!r} is not known; try utf-8 or cp1252.") from None
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is not encoded in {encoding or 'UTF-8'}: save it as CSV in UTF-8, or give its "
            "encoding, often cp1252 (--encoding cp1252)."
        ) from None
    except (OSError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    return [(line, row) for line, row in rows if any(row)]


def _find_columns(
    path: Path, rows: list[tuple[int, list[str]]], label: str | None
) -> tuple[int, int, list[tuple[int, list[str]]]]:
    first = [cell.casefold() for cell in rows[0][1]]
    label_names = LABEL_NAMES if label is None else (label.casefold(),)
    path_at = next((i for i, cell in enumerate(first) if cell in PATH_NAMES), None)
    label_at = next((i for i, cell in enumerate(first) if cell in label_names), None)
    if path_at is not None and label_at is not None:
        return path_at, label_at, rows[1:]
    if label is None and is_image_name(first[0]):
        return 0, 1, rows
    other = "; name another one with --label" if label is None else ""
    raise InputError(
        f"{path} needs a header with a path column ({', '.join(PATH_NAMES)}) and a label column "
        f"({', '.join(label_names)}{other}); got {', '.join(rows[0][1])}."
    )
