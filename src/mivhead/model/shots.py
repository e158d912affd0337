"""The shots of a model: what it keeps of its images, so that it can be changed without them.

`Shots` holds the names, labels, hashes, features, views and pictures of the support images.
Adding, removing, renaming and relabelling make new `Shots`; `FewShotClassifier` then fits to them.
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
from mivhead.features import Features, FeatureTable, join_bytes, split_bytes
from mivhead.images.augmentation import ViewPlan, ViewRule
from mivhead.support import SupportSet, encode

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
        """Return plain values for a JSON document.

        Returns
        -------
        dict
        """
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
    unseen: tuple[Any, ...] = ()  # classes without shots, which the model knows by their names only

    @classmethod
    def from_table(cls, table: FeatureTable, labels: Any) -> Self:
        """Take the shots of a table of features.

        Parameters
        ----------
        table : FeatureTable
            Features, names and, if they are known, hashes, pictures and the rule for the views.
        labels : sequence
            A label per image.
        """
        values = read_labels(np.asarray(labels))
        if len(values) != len(table):
            raise InputError(
                f"The table has {len(table)} images, but {len(values)} labels are given."
            )
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
    def every_class(self) -> list[Any]:
        """The classes with and without shots, sorted."""
        return sorted({*self.classes, *self.unseen})

    @property
    def counts(self) -> dict[Any, int]:
        """Number of shots per class, in the order of `every_class`."""
        counts = Counter(self.labels.tolist())
        return {label: counts[label] for label in self.every_class}

    def rows_of(self, label: Any) -> NDArray[np.int64]:
        """Return the rows of a class."""
        return np.flatnonzero(self.labels == label)

    # What a classifier is fitted to.

    def support(
        self, unlabelled: Any = None, class_vectors: Mapping[Any, ArrayLike] | None = None
    ) -> SupportSet:
        """Return the shots, which must be in order, with the views that are used.

        Parameters
        ----------
        unlabelled, class_vectors
            As for `mivhead.classifier.FeatureClassifier.fit`.
        """
        counts = np.minimum(self._view_counts, self._wanted)
        starts = np.cumsum(self._view_counts) - self._view_counts
        rows = np.repeat(np.arange(len(self)), counts)
        views = None
        if self.views is not None and len(rows):
            number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            views = self.views[starts[rows] + number]
        classes, labels = encode(self.labels, len(self), named=class_vectors is not None)
        support = SupportSet(self.features, labels, views, rows, classes=classes)
        return support.with_others(unlabelled, class_vectors)

    @property
    def _view_counts(self) -> NDArray[np.int64]:
        """Number of views of each shot."""
        return np.bincount(self.view_of, minlength=len(self))

    @property
    def _wanted(self) -> NDArray[np.int64]:
        """Number of views that each shot should use."""
        if self.rule is None:
            return self._view_counts
        counts = self.counts
        wanted = [self.rule.per_image(counts[label]) for label in self.labels.tolist()]
        return np.array(wanted, np.int64)

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
        rows: dict[int, int] = {}
        pictures: list[tuple[str, bytes]] = []
        view_of, numbers = [], []
        for row, number in self.missing_views:
            if (picture := self.pictures[row]) is None:
                continue
            if row not in rows:
                rows[row] = len(pictures)
                pictures.append((self.hashes[row], picture))
            view_of.append(rows[row])
            numbers.append(number)
        plan = ViewPlan(np.array(view_of, np.int64), np.array(numbers, np.int64), self.rule.seed)
        return pictures, plan

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

    def distinct(self) -> tuple[Self, dict[str, str]]:
        """Leave out exact copies of shots of the same class, which bring nothing new.

        Returns
        -------
        distinct : Shots
            The others.
        copies : dict of str to str
            Names of the copies, and of the shots that they equal.
        """
        keys = list(zip(self.labels.tolist(), self.hashes, strict=True))
        first: dict[tuple[Any, str], int] = {}
        for row, key in enumerate(keys):
            first.setdefault(key, row)
        copies = {
            self.names[row]: self.names[first[key]]
            for row, key in enumerate(keys)
            if first[key] != row
        }
        return (self.take(first.values()) if copies else self), copies

    def add(self, other: Shots) -> tuple[Self, Shots, list[str]]:
        """Join other shots to these.

        Returns
        -------
        joined : Shots
            All shots, with distinct names.
        added : Shots
            Those of `other` that were added, under the names that they got.
        notes : list of str
            Which were left out, because they are duplicates.

        Raises
        ------
        InputError
            If the layout of the features is another one, or a duplicate has another label.
        """
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
                    f"{its_label!r}: an image has one class; leave it out, or move the shot with "
                    "`relabel`."
                )
            twins.append((name, twin))
        if other.rule != self.rule and other.can_make_views and self.rule is not None:
            other = other.without_views()  # made by another rule: to be made again by this one
        added = other.take(kept)
        added = replace(added, names=_distinct(added.names, self.names))
        return self._joined(added), added, _about_twins(twins)

    def _joined(self, other: Shots) -> Self:
        views = [each for each in (self.views, other.views) if each is not None]
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

    def remove(
        self, names: Sequence[str], *, named: bool = False
    ) -> tuple[Self, list[Any], list[str]]:
        """Remove classes and single shots.

        Parameters
        ----------
        names : sequence of str
            The classes and shots.
        named : bool, default=False
            Whether the model knows its classes by name as well, so that all shots of a class may
            be removed.

        Returns
        -------
        left : Shots
            The other shots.
        classes : list
            The removed classes.
        shots : list of str
            The names of shots that were removed one by one.
        """
        if not names:
            raise InputError("Name at least one class or shot to remove.")
        classes, rows = [], set()
        for name in names:
            if (label := self._find_label(name)) is not None:
                classes.append(label)
            else:
                rows.add(self.find(name, or_class=True))
        gone = np.isin(np.arange(len(self)), list(rows)) | np.isin(self.labels, classes)
        left = replace(
            self.take(np.flatnonzero(~gone)),
            unseen=tuple(label for label in self.unseen if label not in classes),
        )
        emptied = [c for c in self.classes if c not in classes and c not in left.classes]
        if named:
            left = left.with_unseen([*left.unseen, *emptied])
        elif emptied:
            raise InputError(
                f"{_listed(self._names(rows))} would leave the class {emptied[0]!r} without shots: "
                f"to remove the class, name it ({emptied[0]!r})."
            )
        if len(left.every_class) < 2:
            raise InputError(
                f"Without {_listed(map(str, classes))}, the model would have "
                f"{len(left.every_class)} class; a classifier needs at least 2."
            )
        return left, classes, self._names(row for row in rows if self.labels[row] not in classes)

    def rename(self, old: Any, new: Any, *, merge: bool = False) -> Self:
        """Rename a class, or merge it into another one."""
        label = self.find_label(old)
        name = self.as_label(new)
        if name == label:
            raise InputError(f"The class is already called {name!r}.")
        if name in self.every_class and not merge:
            raise InputError(
                f"The class {name!r} already exists. To merge {label!r} into it, pass merge=True "
                "(--merge)."
            )
        if merge and name not in self.every_class:
            raise InputError(self._unknown("class", name, map(str, self.every_class)))
        if merge and len(self.every_class) < 3:
            raise InputError(
                f"Merging {label!r} into {name!r} would leave one class; a classifier needs at "
                "least 2."
            )
        left = tuple(each for each in self.unseen if each != label)
        unseen = left if merge or label in self.classes else (*left, name)
        return replace(self._relabelled(self.rows_of(label), name), unseen=unseen)

    def relabel(self, shot: str, label: Any, *, new: bool = False) -> tuple[Self, str, Any]:
        """Move a shot to another class.

        Returns
        -------
        shots : Shots
            All shots.
        name : str
            The full name of the shot.
        old : object
            The class that it came from.
        """
        row = self.find(shot)
        name, old = self.names[row], self.labels[row].item()
        target = self.as_label(label)
        if target not in self.every_class and not new:
            raise InputError(
                self._unknown("class", target, map(str, self.every_class))
                + " To make a new class of the shot, pass new=True (--new)."
            )
        if target == old:
            raise InputError(f"{name} is already a shot of {old!r}.")
        if len(self.rows_of(old)) == 1:
            raise InputError(
                f"{name} is the last shot of the class {old!r}: rename the class, or remove it."
            )
        return self._relabelled(np.array([row]), target), name, old

    def _relabelled(self, rows: NDArray[np.int64], label: Any) -> Self:
        values = self.labels.tolist()
        for row in rows:
            values[row] = label
        return replace(self, labels=np.asarray(values))

    # Names.

    def find(self, name: str, *, or_class: bool = False) -> int:
        """Return the row of a shot.

        It is given by its name, by the end of its name (`1.jpg`), or by a path that ends in its
        name (`shots/robin/1.jpg`), if only one shot fits.
        """
        name = name.replace(os.sep, "/")
        if name in self.names:
            return self.names.index(name)
        ends = [
            row
            for row, each in enumerate(self.names)
            if each.endswith(f"/{name}") or name.endswith(f"/{each}")
        ]
        if len(ends) == 1:
            return ends[0]
        if ends:
            raise InputError(
                f"{name!r} may be any of {len(ends)} shots: {_listed(self._names(ends))}; "
                "give the full name."
            )
        if or_class:
            names = [*map(str, self.every_class), *self.names]
            raise InputError(self._unknown("class or shot", name, names))
        raise InputError(self._unknown("shot", name, self.names))

    def find_label(self, name: Any) -> Any:
        """Return the label that a name, such as one from the command line, stands for."""
        if (label := self._find_label(name)) is None:
            raise InputError(self._unknown("class", name, map(str, self.every_class)))
        return label

    def _find_label(self, name: Any) -> Any | None:
        return next((c for c in self.every_class if c == name or str(c) == name), None)

    def as_label(self, name: Any) -> Any:
        """Convert the name of a class to the type of the labels."""
        first = self.every_class[0]
        if isinstance(name, str) and not name.strip():
            raise InputError("The name of a class must not be empty.")
        if isinstance(first, str):
            return str(name)
        kind = float if isinstance(first, float) else int
        if isinstance(name, int | np.integer) and kind is int:
            return name
        try:
            return kind(name)
        except (TypeError, ValueError):
            what = "numbers" if kind is float else "integers"
            raise InputError(
                f"The classes of this model are {what}, and {name!r} is not one."
            ) from None

    def _names(self, rows: Iterable[int]) -> list[str]:
        return [self.names[row] for row in sorted(rows)]

    @staticmethod
    def _unknown(kind: str, name: Any, known: Iterable[str]) -> str:
        near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else " `miv info --shots` lists them."
        return f"The model has no {kind} {str(name)!r}.{hint}"

    def in_order(self) -> Self:
        """Sort by class, then by features; equal features by the image, which decides the views.

        This is the canonical order: it follows from the shots alone.
        """
        _, codes = np.unique(self.labels, return_inverse=True)
        keys = zip(codes.tolist(), digests(self.features), self.hashes, self.names, strict=True)
        ranked = sorted(zip(keys, range(len(self)), strict=True))
        return self.take(row for _, row in ranked).with_unseen(self.unseen)

    def by_class(self) -> Self:
        """Sort by class; the shots of a class stay in their order."""
        return self.take(np.argsort(self.labels, kind="stable"))

    def with_unseen(self, classes: Iterable[Any]) -> Self:
        """Know further classes by their names; those of the shots may be among them."""
        return replace(self, unseen=tuple(sorted({*classes} - {*self.classes})))

    # Files.

    @property
    def can_make_views(self) -> bool:
        """Whether all views can be made again, because there are all pictures and the rule."""
        return self.rule is not None and all(self.pictures)

    def without_views(self) -> Self:
        """Leave out the views."""
        return replace(self, views=None, view_of=self.view_of[:0])

    def compact(self) -> Self:
        """Leave out what only later changes need: views and pictures."""
        return replace(self.without_views(), pictures=(None,) * len(self))

    def to_file(
        self, support: Features | None, view_blocks: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the section of a model file: a JSON object and tensors.

        Parameters
        ----------
        support : Features or None
            The features that the classifier writes itself; if they are those of the shots, they
            are not written twice.
        view_blocks : sequence of int
            The blocks whose views the classifier uses; those of other blocks are not written.
        """
        document = {
            "names": list(self.names),
            "hashes": list(self.hashes),
            "counts": list(self.counts.values()),
            "views": self._view_counts.tolist(),
            "pictures": [0 if each is None else len(each) for each in self.pictures],
            "rule": None if self.rule is None else to_json(self.rule),
        }
        tensors: dict[str, NDArray[Any]] = {}
        if support is None or support != self.features:
            tensors |= {f"support.{k}": v for k, v in self.features.tensors.items()}
        if self.views is not None:
            written = tuple(f"block{i}." for i in view_blocks)
            tensors |= {
                f"views.{k}": v for k, v in self.views.tensors.items() if k.startswith(written)
            }
        if any(self.pictures):
            tensors["pictures.data"] = join_bytes(each or b"" for each in self.pictures)
        return document, tensors

    @classmethod
    def from_file(
        cls,
        document: Any,
        tensors: Mapping[str, NDArray[Any]],
        classes: NDArray[Any],
        support: Features | None,
    ) -> Self:
        """Read what `to_file` wrote, trusting nothing.

        Parameters
        ----------
        document, tensors
            The section of the file.
        classes : array of shape (class,)
            The classes of the model.
        support : Features or None
            The features that the classifier has read itself.
        """
        saved = from_json(_Saved, document, "shots.v1")
        own, views, data = split_tensors(tensors, ("support", "views", "pictures"))
        features = Features.from_tensors(own) if own else support
        if features is None:
            raise InputError("the features of the shots are missing.")
        n = len(features)
        saved.check(n, len(classes))
        found = _read_views(views, features, sum(saved.views))
        view_of = np.repeat(np.arange(n), saved.views)
        pictures = data.pop("data", np.empty(0, np.uint8))
        if data:
            raise InputError(f"tensor {next(iter(data))!r} is unexpected.")
        return cls(
            saved.names,
            np.repeat(classes, saved.counts),
            saved.hashes,
            features,
            found,
            view_of,
            tuple(each or None for each in split_bytes(pictures, saved.pictures)),
            saved.rule,
            tuple(c for c, n in zip(classes.tolist(), saved.counts, strict=True) if not n),
        )


@dataclass(frozen=True)
class _Saved:
    """The JSON object of the section `shots.v1`."""

    names: tuple[str, ...]
    hashes: tuple[str, ...]
    counts: tuple[int, ...]
    views: tuple[int, ...]
    pictures: tuple[int, ...]
    rule: ViewRule | None

    def check(self, shots: int, classes: int) -> None:
        for name in ("names", "hashes", "views", "pictures"):
            if len(getattr(self, name)) != shots:
                raise InputError(f"shots.v1.{name} does not fit {shots} shots.")
        if len(set(self.names)) != shots:
            raise InputError("shots.v1.names are not distinct.")
        if not all(map(_HASH.fullmatch, self.hashes)):
            raise InputError("shots.v1.hashes must be SHA-256 hashes.")
        if len(self.counts) != classes or sum(self.counts) != shots or min(self.counts) < 0:
            raise InputError(f"shots.v1.counts do not fit {classes} classes of {shots} shots.")
        if min((*self.views, *self.pictures), default=0) < 0:
            raise InputError("shots.v1 has a negative count.")
        if self.rule is not None and self.rule.per_image(1) > MAX_VIEWS:
            raise InputError(f"shots.v1.rule.threshold is too large: {self.rule.threshold}.")


def _read_views(
    views: Mapping[str, NDArray[Any]], features: Features, count: int
) -> Features | None:
    """Complete views by zeros for the blocks that no classifier looks at, which are not written."""
    if not views and not count:
        return None
    parts = dict(views)
    fits = {each.shape[:1] for each in parts.values()} == {(count,)}  # before memory is taken
    left_out = {name: each for name, each in features.tensors.items() if name not in parts}
    zeros = sum(count * math.prod(each.shape[1:]) * each.itemsize for each in left_out.values())
    if not fits or zeros > MAX_BYTES:
        raise InputError(f"the views do not fit the shots {features}, with {count} views.")
    for name, tensor in left_out.items():
        parts[name] = np.zeros((count, *tensor.shape[1:]), tensor.dtype)
    found = Features.from_tensors(parts)
    if found.layout != features.layout:
        raise InputError(f"the views {found} do not fit the shots {features}.")
    return found


def digests(features: Features) -> list[str]:
    """Return the SHA-256 of the features of each image.

    >>> a, b = digests(Features(np.eye(2)))
    >>> a == digests(Features(np.eye(2)[:1]))[0] != b
    True
    """
    arrays = list(features.tensors.values())
    found = []
    for row in range(len(features)):
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(np.ascontiguousarray(array[row]).data)
        found.append(digest.hexdigest())
    return found


def _about_twins(twins: Sequence[tuple[str, str]]) -> list[str]:
    """Say which images are not added again, because shots have the same content.

    >>> _about_twins([(f"new/{i}.jpg", f"cat/{i}.jpg") for i in range(5)])
    ["5 images have the same content as shots: 'new/0.jpg', 'new/1.jpg', 'new/2.jpg' and 2 more; \
they are not added again."]
    """
    if len(twins) > MAX_LISTED:
        listed = _listed(name for name, _ in twins)
        return [
            f"{len(twins)} images have the same content as shots: {listed}; they are not added "
            "again."
        ]
    return [
        f"{name} is a duplicate of {twin} (the same content): not added again."
        for name, twin in twins
    ]


def _distinct(names: Iterable[str], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """Add numbers to names that occur twice: `a/1.jpg`, `a/1 (2).jpg`.

    >>> _distinct(["1.jpg", "1.jpg"], taken=["1.jpg"])
    ('1 (2).jpg', '1 (3).jpg')
    """
    used = set(taken)
    found = []
    for name in names:
        stem, suffix = os.path.splitext(name)  # noqa: PTH122  # a name, not a path
        new, number = name, 2
        while new in used:
            new, number = f"{stem} ({number}){suffix}", number + 1
        used.add(new)
        found.append(new)
    return tuple(found)


def _listed(names: Iterable[str]) -> str:
    """List some names in a message."""
    all_names = [repr(name) for name in names]
    text = ", ".join(all_names[:MAX_LISTED])
    more = len(all_names) - MAX_LISTED
    return f"{text} and {more} more" if more > 0 else text
