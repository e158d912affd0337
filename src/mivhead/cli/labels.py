"""What to say about the classes and shots that a model is going to learn."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from mivhead.cli.output import plural
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.model.shots import Shots

MAX_NOTES = 5  # of a kind, listed one by one
MAX_KINDS = 3  # suffixes of ignored files


def check_class_names(names: Iterable[Any]) -> None:
    """Refuse classes with the names of decisions, which images without a class get.

    >>> check_class_names(["robin", "Unsure"])
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: 'Unsure' cannot be a class: `miv predict` reports it for images \
without a name, and `--sort-into` uses it for their folder. Sort these images into classes, or \
move the folder elsewhere.
    """
    from mivhead.model.decision import NONE, UNSURE  # here: it imports NumPy

    for name in names:
        if str(name).casefold() in (UNSURE, NONE):
            raise InputError(
                f"{name!r} cannot be a class: `miv predict` reports it for images without a name, "
                "and `--sort-into` uses it for their folder. Sort these images into classes, or "
                "move the folder elsewhere."
            )


def notes_on_names(names: Iterable[Any], other: object) -> list[str]:
    """Return what the user should know about the names of classes.

    `other` is the class that stands for everything else, if there is one of this name.

    >>> notes_on_names(["cat", "Cat", "dog"], "other")[0].partition(":")[0]
    "The classes 'Cat' and 'cat' differ in upper and lower case only"
    """
    from mivhead.model.decision import NONE

    given = sorted(map(str, names))
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in given:
        alike[name.casefold()].append(name)
    notes = [
        f"The classes {' and '.join(map(repr, twins))} differ in upper and lower case only: if "
        "they are the same, rename one of them."
        for twins in alike.values()
        if len(twins) > 1
    ]
    if str(other) in given:
        notes.append(
            f"The class {str(other)!r} stands for everything else: an image like its images is "
            f"named {NONE!r}."
        )
    return notes


def notes_on_ignored(files: Sequence[str]) -> list[str]:
    """Return how many files were ignored, and of which kinds.

    >>> notes_on_ignored(["cat/notes.txt", "cat/a.pdf", "dog/b.txt", "1.jpg"])
    ['Ignored 4 files that are not images in class folders (.txt, .jpg, .pdf).']
    """
    if not files:
        return []
    suffixes = Counter(PurePosixPath(each).suffix.lower() or "no suffix" for each in files)
    kinds = sorted(suffixes, key=lambda each: (-suffixes[each], each))
    shown = ", ".join(kinds[:MAX_KINDS]) + (", ..." if len(kinds) > MAX_KINDS else "")
    what = "is not an image" if len(files) == 1 else "are not images"
    place = "a class folder" if len(files) == 1 else "class folders"
    return [f"Ignored {plural(len(files), 'file')} that {what} in {place} ({shown})."]


def notes_on_duplicates(shots: Shots, copies: Mapping[str, str]) -> list[str]:
    """Return which shots have the same content as others, perhaps in other classes.

    `copies` are the names of images that were left out, and of the shots that they equal.
    """
    same: defaultdict[str, list[str]] = defaultdict(list)
    for name, hash_ in zip(shots.names, shots.hashes, strict=True):
        same[hash_].append(name)
    across = [" = ".join(names) for names in same.values() if len(names) > 1]
    notes = _listed(across, "The same image is in several classes, so at least one label is wrong")
    within = [f"{copy} = {shot}" for copy, shot in copies.items()]
    return notes + _listed(within, "The same image occurs more than once, and counts once")


def _listed(found: Sequence[str], text: str) -> list[str]:
    notes = [f"{text}: {each}." for each in found[:MAX_NOTES]]
    if len(found) > MAX_NOTES:
        notes.append(f"... and {len(found) - MAX_NOTES} more (`miv data check` lists all).")
    return notes
