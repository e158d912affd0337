"""Which columns of a table hold what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mivhead.errors import InputError, check_one_of

# The columns of a table that mivhead made, beside its features.
ID = "id"
LABEL = "label"
VIEW_OF = "view_of"  # id of the image that a view was made from
POSITION = "position"  # order of the rows


@dataclass(frozen=True)
class Columns:
    """Which rows and columns of a table to read.

    Parameters
    ----------
    id
        Column of the names of the rows; None: `id`, or what the database itself uses.
    label
        Column of the labels; None: `label`, if there is one.
    vectors
        Columns of the features, one per block, shallow to deep; none: those that mivhead wrote, or
        the only column of vectors.
    where
        Filter in the database's own language, passed on as it is: never build it from texts of
        strangers.
    """

    id: str | None = None
    label: str | None = None
    vectors: tuple[str, ...] = ()
    where: str | None = None

    def choose_vectors(self, candidates: Sequence[str], table: str) -> tuple[str, ...]:
        """Choose the features among the columns that hold vectors."""
        for column in self.vectors:
            check_one_of("vectors", column, candidates)
        if self.vectors:
            return self.vectors
        if len(candidates) != 1:
            found = ", ".join(candidates) or "none"
            raise InputError(
                f"{table} needs one column of vectors, but there are {found}: name the ones to "
                "read, shallow to deep, with `vectors`."
            )
        return tuple(candidates)

    def choose_id(self, existing: Sequence[str]) -> str | None:
        """Choose the column of the ids: the one that was asked for, or the usual one, if any."""
        return _choose(ID, self.id, existing)

    def choose_label(self, existing: Sequence[str]) -> str | None:
        """Choose the column of the labels: the one that was asked for, or the usual one, if any."""
        return _choose(LABEL, self.label, existing)


def _choose(role: str, given: str | None, existing: Sequence[str]) -> str | None:
    if given is None:
        return role if role in existing else None
    check_one_of(role, given, existing)
    return given
