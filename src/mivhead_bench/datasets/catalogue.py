"""What is known of image sets: the 17 of the paper and some more, declared in `sets.toml`."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mivhead._util.schema import from_json
from mivhead.errors import InputError


@dataclass(frozen=True)
class DataSet:
    """Facts about an image set; `sets.toml` says what each of them means."""

    name: str
    title: str
    classes: int
    split: str
    source: str
    licence: str
    preparation: str
    benchmark: Literal["MD", "MD+"] | None = None
    aliases: tuple[str, ...] = ()
    grouped: bool = False
    paper_size: int | None = None
    folders: str | None = None
    within: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


def _read() -> tuple[DataSet, ...]:
    text = Path(__file__).with_name("sets.toml").read_text(encoding="utf-8")
    declared: list[dict[str, Any]] = tomllib.loads(text)["sets"]
    return tuple(from_json(DataSet, facts, "sets.toml") for facts in declared)


ALL_SETS = _read()
SETS = tuple(info for info in ALL_SETS if info.benchmark)  # the paper's
BENCHMARKS = {
    "MD": tuple(info.name for info in SETS if info.benchmark == "MD"),
    "MD+": tuple(info.name for info in SETS),
}
MORE_SETS = tuple(info for info in ALL_SETS if not info.benchmark)


def _simplify(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


_BY_NAME = {
    _simplify(name): info for info in ALL_SETS for name in (info.name, info.title, *info.aliases)
}


def find_declared(name: str) -> DataSet | None:
    """Find a declared set by its name, its title in the paper or an alias, in any spelling.

    Parameters
    ----------
    name : str
        Compared without regard to case and punctuation.

    Returns
    -------
    DataSet or None
        None if the set is not declared.

    Examples
    --------
    >>> find_declared("Birds").name, find_declared("cub200-birds").name
    ('cu_birds', 'cu_birds')
    """
    return _BY_NAME.get(_simplify(name))


def get_declared(name: str) -> DataSet:
    """Find a declared set; the error suggests the nearest name.

    >>> get_declared("trashne")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: 'trashne' is not a declared set: did you mean 'trashnet'?
    """
    declared = find_declared(name)
    if declared is None:
        near = difflib.get_close_matches(name, [info.name for info in ALL_SETS], n=1)
        hint = f": did you mean {near[0]!r}?" if near else "; `miv bench data list` shows them."
        raise InputError(f"{name!r} is not a declared set{hint}")
    return declared


def paper_size(name: str) -> int | None:
    """Return the side to which the paper's authors resized the images of a set first, if any.

    >>> paper_size("CIFAR-10"), paper_size("aircraft")
    (84, None)
    """
    declared = find_declared(name)
    return None if declared is None else declared.paper_size


def groups_of(name: str, classes: Iterable[str]) -> dict[str, str]:
    """Return the group of each class; each task of a grouped set stays within one group.

    Only Omniglot has groups, its alphabets. Its classes are named `alphabet.character`, with a dot
    or a slash. In other sets, the group is an empty string.

    >>> groups_of("omniglot", ["Greek.character01", "Latin/character02"])
    {'Greek.character01': 'Greek', 'Latin/character02': 'Latin'}
    """
    declared = find_declared(name)
    if declared is None or not declared.grouped:
        return dict.fromkeys(classes, "")
    groups = {label: re.split(r"[./]", label, maxsplit=1)[0] for label in classes}
    if ungrouped := [label for label, group in groups.items() if label == group]:
        raise InputError(
            f"The class {ungrouped[0]!r} of {name} does not name its alphabet; name the class "
            "folders alphabet.character, such as Greek.character01."
        )
    return groups
