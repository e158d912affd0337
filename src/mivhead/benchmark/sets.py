"""Image sets in a data folder, found by name; and the 17 sets of the paper, declared.

A data folder holds one entry a set: a folder of class folders, a zip of one, or a folder of
Meta-Dataset's records. Its name is the set's name.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mivhead.benchmark.catalogue import SETS, DataSet
from mivhead.data.folders import open_labelled
from mivhead.data.imageset import ImageSet
from mivhead.data.naming import is_litter, natural_key
from mivhead.errors import InputError


def declared(name: str) -> DataSet | None:
    """Return what is declared of a set, by its name, the paper's title or a usual other name.

    >>> declared("Birds").name, declared("cub200_birds").name, declared("my_own_photos")
    ('cu_birds', 'cu_birds', None)
    """
    wanted = _simple(name)
    for each in SETS:
        if wanted in map(_simple, (each.name, each.title, *each.aliases)):
            return each
    return None


def find_sets(data: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of all sets in a data folder, without looking into them."""
    try:
        entries = [entry for entry in Path(data).iterdir() if not is_litter(entry.name)]
    except OSError as error:
        raise InputError(f"The data folder {data} cannot be read: {error.strerror}.") from error
    names = {
        entry.name if entry.is_dir() else entry.stem
        for entry in entries
        if entry.is_dir() or entry.suffix.lower() == ".zip"
    }
    return tuple(sorted(names, key=natural_key))


def open_set(name: str, data: str | os.PathLike[str]) -> ImageSet:
    """Open a set of a data folder; nothing is decoded yet.

    Parameters
    ----------
    name
        Of the set's folder, or of its zip without `.zip`.
    data
        The data folder.

    Returns
    -------
    ImageSet
        With labels. Of Meta-Dataset's records, the classes of the test split only.
    """
    found = find_sets(data)
    if name not in found:
        raise InputError(_not_found(name, data, found))
    folder = Path(data, name)
    return open_labelled(folder if folder.is_dir() else folder.with_name(f"{name}.zip"))


def groups_of(name: str, classes: Iterable[str]) -> dict[str, str]:
    """Return the group of each class; tasks of a set with groups stay within one.

    Only Omniglot has groups, its alphabets; a class is named `alphabet.character` there, with a
    dot or a slash.

    >>> groups_of("omniglot", ["Greek.character01", "Latin/character02"])
    {'Greek.character01': 'Greek', 'Latin/character02': 'Latin'}
    >>> groups_of("birds", ["robin", "wren"])
    {'robin': '', 'wren': ''}
    """
    info = declared(name)
    if info is None or not info.grouped:
        return dict.fromkeys(classes, "")
    groups = {each: re.split(r"[./]", each, maxsplit=1)[0] for each in classes}
    if whole := [each for each, group in groups.items() if each == group]:
        raise InputError(
            f"The class {whole[0]!r} of {name} names no alphabet; name the class folders "
            "alphabet.character, such as Greek.character01."
        )
    return groups


def _simple(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _not_found(name: str, data: str | os.PathLike[str], found: tuple[str, ...]) -> str:
    info = declared(name)
    if info is not None:
        return (
            f"{data} has no set {name!r}. `miv data list {info.name}` says how to get it; "
            f"put it into {data}/{name} or {data}/{name}.zip."
        )
    near = difflib.get_close_matches(name, found, n=1)
    if near:
        return f"{data} has no set {name!r}. Did you mean {near[0]!r}?"
    listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    return (
        f"{data} has no set {name!r}; it has {listed or 'no sets at all'}. A set is a folder of "
        "class folders or a zip of one."
    )
