"""Open a folder of class folders, a zip of one, a CSV, or records; or any images to predict."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from mivhead.data.imageset import ImageSet, ImageSource, given
from mivhead.data.metadataset import is_records, open_records
from mivhead.data.naming import is_image_name, is_litter, natural_key, normal
from mivhead.data.tables import open_table
from mivhead.data.zips import list_zip
from mivhead.errors import InputError

_TABLES = (".csv", ".tsv")


def open_labelled(path: str | os.PathLike[str], *, min_classes: int = 2) -> ImageSet:
    """Open labelled images; nothing is decoded yet.

    Parameters
    ----------
    path
        A folder that holds one folder per class (deeper folders belong to the class they are in),
        a zip of such a folder, or a CSV with a path and a label column. Hidden files, other files
        than images, and files beside the class folders are left out. Or a folder of Meta-Dataset's
        records, of which the test split is taken.
    min_classes
        The fewest classes that make sense: two for training, one for evaluation.

    Returns
    -------
    ImageSet
        In the natural order of names for folders and zips, in the order of rows for a CSV. The
        ids of a folder and of its zip are the same.
    """
    path = Path(path)
    if is_records(path):
        images = open_records(path)
    elif path.is_dir():
        images = _label_by_folder(path, *_unwrap(*_list_folder(path)))
    elif not path.exists():
        raise InputError(f"{path} does not exist.")
    elif path.suffix.lower() in _TABLES:
        images = open_table(path)
    elif path.suffix.lower() == ".zip":
        images = _label_by_folder(path, *_unwrap(*list_zip(path)))
    else:
        raise InputError(f"{path} is neither a folder of class folders, nor a .zip, nor a .csv.")
    if len(images.classes) < min_classes:
        only = ", ".join(map(repr, images.classes))
        raise InputError(
            f"{path} has only the class {only}; at least {min_classes} classes are needed, "
            "each in a folder of its own."
        )
    return images


def open_unlabelled(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> ImageSet:
    """Open images to predict; nothing is decoded yet.

    Parameters
    ----------
    paths
        Images, folders (searched to any depth), zips, patterns such as `new/*.jpg`, or several of
        these. They are taken in the given order; what a folder, zip or pattern holds, in the
        natural order of names.

    Returns
    -------
    ImageSet
        Without labels. An id is the path as it was given, plus the path inside a folder or zip.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    sources = [source for path in paths for source in _find(Path(path))]
    if not sources:
        raise InputError("No images were given.")
    return ImageSet(tuple(sources))


def _find(path: Path) -> Iterator[ImageSource]:
    if path.is_dir() or (path.suffix.lower() == ".zip" and path.is_file()):
        _, found = _list_folder(path) if path.is_dir() else list_zip(path)
        if not found:
            raise InputError(f"{path} holds no images.")
        for source in _sorted(found):
            yield replace(source, id=f"{path.as_posix()}/{source.id}")
    elif path.exists():
        if is_image_name(path.name) or not is_litter(path.name):  # `new/*` may name a Thumbs.db
            yield ImageSource(path.as_posix(), given(path), str(path))
    else:
        # Some shells, and Python, pass patterns on as they are.
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207  # Path's are relative only
        if not matches:
            raise InputError(f"{path} does not exist.")
        for match in sorted(matches, key=natural_key):
            yield from _find(Path(match))


def _list_folder(root: Path) -> tuple[set[str], list[ImageSource]]:
    """Return the folders below `root`, and the images; their ids are the paths inside."""
    folders, sources = set(), []
    for entry in _walk(root, ()):
        inside = normal(entry.relative_to(root).as_posix())
        if entry.is_dir():
            folders.add(inside)
        elif is_image_name(entry.name):
            sources.append(ImageSource(inside, given(entry), str(entry)))
    return folders, sources


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield all that is below a folder; links are followed, but not in circles."""
    here = folder.resolve()
    if here in above:
        return
    try:
        entries = [entry for entry in folder.iterdir() if not is_litter(entry.name)]
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be read: {error.strerror}.") from error
    for entry in entries:
        yield entry
        if entry.is_dir():
            yield from _walk(entry, (*above, here))


def _unwrap(folders: set[str], sources: list[ImageSource]) -> tuple[set[str], list[ImageSource]]:
    """Step into the one folder that zip programs often put around the class folders."""
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
        raise InputError(f"{path} holds no images; {layout}")
    if not inside:
        raise InputError(f"{path} holds images but no class folders; {layout}")
    if empty := sorted(_tops(folders) - set(labels)):
        raise InputError(
            f"The class folder {empty[0]!r} in {path} holds no images; add some or remove it."
        )
    return ImageSet(tuple(inside), labels)


def _sorted(sources: Iterable[ImageSource]) -> list[ImageSource]:
    return sorted(sources, key=lambda source: natural_key(source.id))
