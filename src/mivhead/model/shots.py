"""The shots of a model: what it keeps of its images, so that it can be changed without them.

`Shots` holds the names, labels, hashes, features, views and pictures of the support images.
Adding, removing, renaming and relabelling make new `Shots`; the model is then fitted to them.
Shots are brought into a canonical order that follows from their contents alone, so that the same
shots give the same model, bit for bit, however they came together.

How many views a shot has depends on the size of its class (`ViewRule`). Shots of a class that has
shrunk need further views, and a file of a model on the default backbone holds none: these are made
from the pictures, small lossless squares as the backbone sees them.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead._util.estimator import read_labels
from mivhead._util.files import MAX_BYTES
from mivhead._util.schema import from_json, split_tensors, to_json
from mivhead.errors import InputError
from mivhead.features import (
    Features,
    FeatureTable,
    SupportSet,
    encode,
    read_class_vectors,
    split_bytes,
)
from mivhead.images.augmentation import ViewPlan, ViewRule
from mivhead.images.imageset import free_name

MAX_LISTED = 3  # names in a message
MAX_VIEWS = 10_000  # of a shot by the rule in a file: more than anyone could wait for
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Change:
    """A change of a fitted model."""

    action: str  # what was done
    text: str  # the same in words, with names
    when: str  # time of the change in UTC, such as `2026-11-17T09:30:00Z`
    # What the user should know, such as duplicates that were left out. Not part of the history.
    notes: tuple[str, ...] = ()

    @classmethod
    def now(cls, action: str, text: str, notes: Iterable[str] = ()) -> Self:
        """Return a change that happens now."""
        return cls(action, text, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), tuple(notes))

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        return {"change": self.text, "notes": list(self.notes), "when": self.when}


@dataclass(frozen=True, eq=False)
class Shots:
    """The shots of a model, in the order of its support."""

    names: tuple[str, ...]  # a distinct name per shot, such as `robin/1.jpg`
    labels: NDArray[Any]  # (shot,): their classes
    hashes: tuple[str, ...]  # SHA-256 of each image; of its features if no image was seen
    features: Features  # one row per shot
    views: Features | None  # Features of augmented views; a shot may have more than its class uses
    # (view,): the shot of each view, ascending. The views of a shot are numbered in this order.
    view_of: NDArray[np.int64]
    # Each image as the backbone sees it, to make further views of; None if it is not known
    pictures: tuple[bytes | None, ...]
    # How many views the shots of a class use, and how they are made. None: they use those that they
    # came with.
    rule: ViewRule | None

    @classmethod
    def from_table(cls, table: FeatureTable, labels: Sequence[Any]) -> Self:
        """Take the shots of a table of features, with a label per image."""
        values = read_labels(np.asarray(labels))
        if len(values) != len(table):
            raise InputError(f"There are {len(table)} images, but {len(values)} labels.")
        rule = table.view_rule
        return cls(
            _distinct(table.ids),
            values,
            table.hashes or tuple(digests(table.features)),
            table.features,
            table.views,
            np.empty(0, np.int64) if table.view_of is None else np.asarray(table.view_of, np.int64),
            table.pictures or (None,) * len(table),
            None if rule is None else from_json(ViewRule, rule, "view_rule"),
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> list[Any]:
        """The distinct labels, sorted."""
        return sorted(set(self.labels.tolist()))

    @property
    def counts(self) -> dict[Any, int]:
        """Number of shots per class, in the order of `classes`."""
        counts = Counter(self.labels.tolist())
        return {label: counts[label] for label in self.classes}

    def rows_of(self, label: Any) -> NDArray[np.int64]:
        """Return the rows of a class."""
        return np.flatnonzero(self.labels == label)

    # What a classifier is fitted to.

    def support(
        self,
        unlabelled: Features | None = None,
        class_vectors: Mapping[Any, ArrayLike] | None = None,
    ) -> SupportSet:
        """Return the shots, which must be in order, with the views that are used."""
        counts = np.minimum(self._view_counts, self._wanted)
        starts = np.cumsum(self._view_counts) - self._view_counts
        rows = np.repeat(np.arange(len(self)), counts)
        views = None
        if self.views is not None and len(rows):
            number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            views = self.views[starts[rows] + number]
        classes, labels = encode(self.labels, len(self))
        vectors = None
        if class_vectors is not None:
            width = self.features.blocks[-1].channels
            vectors = read_class_vectors(class_vectors, classes, width)
        return SupportSet(self.features, labels, views, rows, unlabelled, vectors, classes)

    @property
    def _view_counts(self) -> NDArray[np.int64]:
        """Number of views of each shot."""
        return np.bincount(self.view_of, minlength=len(self))

    @property
    def _wanted(self) -> NDArray[np.int64]:
        """Number of views that each shot should use."""
        if self.rule is None:
            return self._view_counts
        per_image = {label: self.rule.per_image(count) for label, count in self.counts.items()}
        return np.array([per_image[label] for label in self.labels.tolist()], np.int64)

    @property
    def missing_views(self) -> list[tuple[int, int]]:
        """Row and number of every view that should be used and is not here."""
        pairs = zip(self._view_counts.tolist(), self._wanted.tolist(), strict=True)
        return [(row, i) for row, (has, wanted) in enumerate(pairs) for i in range(has, wanted)]

    @property
    def view_count(self) -> int:
        """Number of views that are used, whether they are here or made again when needed."""
        can = np.array([picture is not None for picture in self.pictures])
        has = np.where(can, self._wanted, self._view_counts)
        return int(np.minimum(has, self._wanted).sum())

    def plan_missing_views(self) -> tuple[list[tuple[str, bytes]], ViewPlan]:
        """Plan the missing views of shots with pictures: hashes and pictures, and the plan."""
        assert self.rule is not None
        missing = [(row, i) for row, i in self.missing_views if self.pictures[row] is not None]
        rows = {row: place for place, row in enumerate(dict.fromkeys(row for row, _ in missing))}
        pictures = [(self.hashes[row], self.pictures[row] or b"") for row in rows]
        view_of = np.array([rows[row] for row, _ in missing], np.int64)
        numbers = np.array([number for _, number in missing], np.int64)
        return pictures, ViewPlan(view_of, numbers, self.rule.seed)

    def with_views(self, views: Features) -> Self:
        """Add the views that `plan_missing_views` planned."""
        rows = [row for row, _ in self.missing_views if self.pictures[row] is not None]
        view_of = np.concatenate([self.view_of, np.array(rows, np.int64)])
        joined = views if self.views is None else Features.concat([self.views, views])
        order = np.argsort(view_of, kind="stable")
        return replace(self, views=joined[order], view_of=view_of[order])

    # Changes. Each returns new shots.

    def take(self, rows: Iterable[int]) -> Self:
        """Return some of the shots, in the order of `rows`."""
        chosen = np.array(list(rows), np.int64)
        place = np.full(len(self), -1)
        place[chosen] = np.arange(len(chosen))
        new_of = place[self.view_of] if len(self.view_of) else self.view_of
        order = np.argsort(new_of, kind="stable")
        order = order[new_of[order] >= 0]
        views = None if self.views is None or not len(order) else self.views[order]
        return replace(
            self,
            names=tuple(self.names[row] for row in chosen),
            labels=self.labels[chosen],
            hashes=tuple(self.hashes[row] for row in chosen),
            features=self.features[chosen],
            views=views,
            view_of=new_of[order],
            pictures=tuple(self.pictures[row] for row in chosen),
        )

    def add(self, other: Shots) -> tuple[Self, Shots, list[str]]:
        """Join other shots to these; return all, those that were added, and notes on duplicates."""
        if other.features.layout != self.features.layout:
            raise InputError(
                "The new features have other blocks or channels than those of the model: got "
                f"{other.features.layout}, expected {self.features.layout}."
            )
        seen = dict(
            zip(self.hashes, zip(self.names, self.labels.tolist(), strict=True), strict=True)
        )
        kept, twins = [], []
        for row, (name, hash_) in enumerate(zip(other.names, other.hashes, strict=True)):
            label = other.labels[row].item()
            if hash_ not in seen:
                seen[hash_] = name, label
                kept.append(row)
                continue
            twin, its_label = seen[hash_]
            if its_label != label:
                raise InputError(
                    f"{name} ({label}) has the same content as the shot {twin} of the class "
                    f"{its_label!r}: leave it out, or move the shot with `relabel`."
                )
            twins.append(name)
        if other.rule != self.rule and other.can_make_views and self.rule is not None:
            other = other.without_views()  # made by another rule: to be made again by this one
        added = other.take(kept)
        added = replace(added, names=_distinct(added.names, self.names))
        notes = [f"Not added again, as shots have the same content: {_listed(twins)}."]
        return self._joined(added), added, notes if twins else []

    def _joined(self, other: Shots) -> Self:
        views = [part.views for part in (self, other) if part.views is not None]
        return replace(
            self,
            names=self.names + other.names,
            labels=np.concatenate([self.labels, other.labels]),
            hashes=self.hashes + other.hashes,
            features=Features.concat([self.features, other.features]),
            views=Features.concat(views) if views else None,
            view_of=np.concatenate([self.view_of, other.view_of + len(self)]),
            pictures=self.pictures + other.pictures,
        )

    def remove(self, names: Sequence[str]) -> tuple[Self, list[Any], list[str]]:
        """Remove classes and single shots; return the others, these classes and these shots."""
        classes, rows = [], set()
        for name in names:
            if (label := self._find_label(name)) is not None:
                classes.append(label)
            else:
                rows.add(self.find(name, "class or shot"))
        gone = np.isin(np.arange(len(self)), list(rows)) | np.isin(self.labels, classes)
        left = self.take(np.flatnonzero(~gone))
        for label in self.classes:
            if label not in classes and label not in left.classes:
                raise InputError(f"The class {label!r} would have no shots: remove the class.")
        if len(left.classes) < 2:
            raise InputError("A classifier needs at least 2 classes.")
        return left, classes, [self.names[row] for row in sorted(rows)]

    def rename(self, old: Any, new: Any, *, merge: bool = False) -> Self:
        """Rename a class, or merge it into another one."""
        if (label := self._find_label(old)) is None:
            raise InputError(self._unknown("class", old))
        name = self.as_label(new)
        if name == label:
            raise InputError(f"The class is already called {name!r}.")
        if name in self.classes and not merge:
            raise InputError(
                f"The class {name!r} already exists: to merge {label!r} into it, pass merge=True "
                "(--merge)."
            )
        if merge and name not in self.classes:
            raise InputError(self._unknown("class", name))
        if merge and len(self.classes) < 3:
            raise InputError("A classifier needs at least 2 classes.")
        return self._relabelled(self.rows_of(label), name)

    def relabel(self, shot: str, label: Any, *, new: bool = False) -> tuple[Self, str, Any]:
        """Move a shot to another class; return all shots, its full name and its old class."""
        row = self.find(shot)
        name, old, target = self.names[row], self.labels[row].item(), self.as_label(label)
        if target not in self.classes and not new:
            hint = " Insist with --new (in Python new=True) to make a new class of the shot."
            raise InputError(self._unknown("class", target) + hint)
        if target == old:
            raise InputError(f"{name} is already a shot of {old!r}.")
        if self.counts[old] == 1:
            raise InputError(f"{name} is the last shot of {old!r}: rename or remove the class.")
        return self._relabelled(np.array([row]), target), name, old

    def _relabelled(self, rows: NDArray[np.int64], label: Any) -> Self:
        values = self.labels.tolist()
        for row in rows:
            values[row] = label
        return replace(self, labels=np.asarray(values))

    # Names.

    def find(self, name: str, kind: str = "shot") -> int:
        """Return the row of the only shot with this name, or this end of its name.

        A path that ends in its name (`shots/robin/1.jpg`) will do as well.
        """
        name = name.replace(os.sep, "/")
        if name in self.names:
            return self.names.index(name)
        rows = [
            row
            for row, known in enumerate(self.names)
            if known.endswith(f"/{name}") or name.endswith(f"/{known}")
        ]
        if len(rows) > 1:
            listed = _listed(self.names[row] for row in rows)
            raise InputError(f"{name!r} may be any of {listed}: give the full name.")
        if not rows:
            raise InputError(self._unknown(kind, name))
        return rows[0]

    def _find_label(self, name: Any) -> Any | None:
        """Return the label that a name, such as one from the command line, stands for."""
        return next((c for c in self.classes if c == name or str(c) == name), None)

    def as_label(self, name: Any) -> Any:
        """Convert the name of a class to the type of the labels."""
        kind = type(self.classes[0])
        if isinstance(name, str) and not name.strip():
            raise InputError("The name of a class must not be empty.")
        try:
            return str(name) if kind is str else kind(name)
        except (TypeError, ValueError):
            raise InputError(
                f"The classes of this model are of the type {kind.__name__}, unlike {name!r}."
            ) from None

    def _unknown(self, kind: str, name: Any) -> str:
        classes = list(map(str, self.classes))
        known = {"class": classes, "shot": self.names}.get(kind, [*classes, *self.names])
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else " `miv info --shots` lists them."
        return f"The model has no {kind} {str(name)!r}.{hint}"

    def in_order(self) -> tuple[Self, dict[str, str]]:
        """Sort by class, then by features; equal features by the image, which decides the views.

        This is the canonical order: it follows from the shots alone. Exact copies of shots of the
        same class are left out; their names are returned, each with that of the shot.
        """
        labels, codes = self.labels.tolist(), np.unique(self.labels, return_inverse=True)[1]
        keys = zip(codes.tolist(), digests(self.features), self.hashes, self.names, strict=True)
        first: dict[tuple[Any, str], int] = {}
        copies = {}
        for _, row in sorted(zip(keys, range(len(self)), strict=True)):
            content = labels[row], self.hashes[row]
            if first.setdefault(content, row) != row:
                copies[self.names[row]] = self.names[first[content]]
        return self.take(first.values()), copies

    # Files.

    @property
    def can_make_views(self) -> bool:
        """Whether all views can be made again, because there are all pictures and the rule."""
        return self.rule is not None and all(self.pictures)

    def without_views(self) -> Self:
        """Leave out the views."""
        return replace(self, views=None, view_of=self.view_of[:0])

    def without_pictures(self) -> Self:
        """Leave out the pictures, for privacy."""
        return replace(self, pictures=(None,) * len(self))

    def state(
        self, support: Features, view_blocks: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what a model file holds: a JSON object and tensors.

        The features are not written if they are the classifier's `support`, and views
        only of the blocks that it uses.
        """
        document = {
            "names": list(self.names),
            "hashes": list(self.hashes),
            "counts": list(self.counts.values()),
            "views": self._view_counts.tolist(),
            "pictures": [len(picture or b"") for picture in self.pictures],
            "rule": None if self.rule is None else to_json(self.rule),
        }
        tensors: dict[str, NDArray[Any]] = {}
        if support is not self.features:
            tensors |= {f"support.{k}": v for k, v in self.features.tensors.items()}
        if self.views is not None:
            written = tuple(f"block{i}." for i in view_blocks)
            tensors |= {
                f"views.{k}": v for k, v in self.views.tensors.items() if k.startswith(written)
            }
        if any(self.pictures):
            joined = b"".join(picture or b"" for picture in self.pictures)
            tensors["pictures.data"] = np.frombuffer(joined, np.uint8)
        return document, tensors

    @classmethod
    def from_state(
        cls,
        saved: SavedShots,
        tensors: Mapping[str, NDArray[Any]],
        classes: NDArray[Any],
        support: Features,
    ) -> Self:
        """Read what `state` returned, trusting nothing."""
        written, views, data = split_tensors(tensors, ("support", "views", "pictures"))
        features = Features.from_tensors(written) if written else support
        saved.check(len(features), len(classes))
        if data.keys() - {"data"}:
            raise InputError("the tensors 'shots.pictures.*' are not the pictures.")
        pictures = split_bytes(data.get("data", np.empty(0, np.uint8)), saved.pictures)
        return cls(
            saved.names,
            np.repeat(classes, saved.counts),
            saved.hashes,
            features,
            _read_views(views, features, sum(saved.views)),
            np.repeat(np.arange(len(features)), saved.views),
            tuple(picture or None for picture in pictures),
            saved.rule,
        )


@dataclass(frozen=True)
class SavedShots:
    """The JSON object of a model file."""

    names: tuple[str, ...]
    hashes: tuple[str, ...]
    counts: tuple[int, ...]
    views: tuple[int, ...]
    pictures: tuple[int, ...]
    rule: ViewRule | None

    def check(self, shots: int, classes: int) -> None:
        """Raise an error if the values cannot be true."""
        columns = (self.names, self.hashes, self.views, self.pictures)
        if (
            any(len(column) != shots for column in columns)
            or len(set(self.names)) != shots
            or not all(map(_HASH.fullmatch, self.hashes))
            or len(self.counts) != classes
            or sum(self.counts) != shots
            or min((*self.counts, *self.views, *self.pictures)) < 0
        ):
            raise InputError(f"its shots do not fit {shots} features of {classes} classes.")
        if self.rule is not None and self.rule.per_image(1) > MAX_VIEWS:
            raise InputError(f"shots.rule.threshold is too large: {self.rule.threshold}.")


def _read_views(
    views: Mapping[str, NDArray[Any]], features: Features, count: int
) -> Features | None:
    """Complete views by zeros for the blocks that no classifier looks at, which are not written."""
    if not views and not count:
        return None
    parts = dict(views)
    fits = {array.shape[:1] for array in parts.values()} == {(count,)}  # before memory is taken
    left_out = {name: array for name, array in features.tensors.items() if name not in parts}
    zeros = sum(count * math.prod(array.shape[1:]) * array.itemsize for array in left_out.values())
    if not fits or zeros > MAX_BYTES:
        raise InputError(f"the views do not fit the shots {features}, with {count} views.")
    for name, array in left_out.items():
        parts[name] = np.zeros((count, *array.shape[1:]), array.dtype)
    complete = Features.from_tensors(parts)
    if complete.layout != features.layout:
        raise InputError(f"the views {complete} do not fit the shots {features}.")
    return complete


def digests(features: Features) -> list[str]:
    """Return the SHA-256 of the features of each image."""
    arrays = list(features.tensors.values())
    hashes = []
    for row in range(len(features)):
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(np.ascontiguousarray(array[row]).data)
        hashes.append(digest.hexdigest())
    return hashes


def _distinct(names: Iterable[str], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """Add numbers to names that occur twice: `a/1.jpg`, `a/1 (2).jpg`.

    >>> _distinct(["1.jpg", "1.jpg"], taken=["1.jpg"])
    ('1 (2).jpg', '1 (3).jpg')
    """
    used = dict.fromkeys(taken)
    known = len(used)
    for name in names:
        used[free_name(name, used.__contains__)] = None
    return tuple(used)[known:]


def _listed(names: Iterable[str]) -> str:
    """List some names in a message."""
    quoted = [repr(name) for name in names]
    more = len(quoted) - MAX_LISTED
    return ", ".join(quoted[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
