"""`ModelInfo`: what a model file or an exported model says about itself.

Reading it needs neither PyTorch nor a backbone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.ensemble.balance import UNIFORM
from mivhead.errors import InputError
from mivhead.images.imageset import check_names

MAX_CLASSES = 100_000


@dataclass(frozen=True)
class ModelInfo:
    """What a model says about itself: the JSON document of its file."""

    format: int  # version of the file format
    method: str  # name of the method, such as `miv`
    # How the head was trained and combined; None for a method that has no recipe
    recipe: dict[str, Any] | None
    config: dict[str, Any]  # what else the method needs to be rebuilt: blocks, shots per class
    classes: list[Any]  # the labels: all strings, all integers, all other numbers, or all booleans
    # Identity of the backbone; None if the model was trained on features of unknown origin
    backbone: dict[str, Any] | None
    seed: int  # random seed of the initial weights
    library: str  # version of mivhead that wrote the file

    @property
    def class_prior(self) -> str | list[float]:
        """How frequent the classes are, as the model was fitted: a name, or a list."""
        prior = self.config.get("frequencies") or self.config.get("class_prior") or UNIFORM
        if not isinstance(prior, str | list):
            raise InputError("config.frequencies must be a list of numbers.")
        return prior


@dataclass(frozen=True)
class Estimate:
    """The accuracy to expect on new images, as cross-validation of the shots estimates it."""

    # Mean over classes, and its 95 % interval; None if fewer than two classes have several shots
    accuracy: float | None
    low: float | None
    high: float | None
    # How many shots were predicted by a model that had not seen them, and how many correctly
    tested: int
    right: int
    # The accuracy of each class, in their order; None for a class with one shot, which cannot be
    # tested
    per_class: tuple[float | None, ...]

    def check(self, classes: int) -> None:
        """Raise an error if the values of a file cannot be true."""
        shares = [self.accuracy, self.low, self.high]
        known = [each for each in (*shares, *self.per_class) if each is not None]
        if (
            len(self.per_class) != classes
            or not 0 <= self.right <= self.tested
            or not all(0 <= each <= 1 for each in known)
            or (None in shares and any(each is not None for each in shares))
        ):
            raise InputError("estimate.v1 does not fit the model.")


def plain_classes(classes: NDArray[Any]) -> list[Any]:
    """Return labels as plain values that a file can hold."""
    values: list[Any] = classes.tolist()
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {str, int, float, bool}:
        raise InputError(
            "Only classes that are all strings, all numbers or all booleans can be saved, "
            f"got {values[0]!r}: convert the labels to strings before fitting."
        )
    if kinds == {float} and not all(map(math.isfinite, values)):
        raise InputError("classes must be finite numbers.")
    check_names(value for value in values if isinstance(value, str))
    return values


def read_classes(values: list[Any]) -> NDArray[Any]:
    """Check the labels of a file: distinct, sorted, all of one type.

    >>> read_classes(["robin", "wren"])
    array(['robin', 'wren'], dtype='<U5')
    """
    if not 2 <= len(values) <= MAX_CLASSES:
        raise InputError(f"it has {len(values)} classes; 2 to {MAX_CLASSES:,} are allowed.")
    if not all(
        type(value) is str or abs(value) < 2**63 for value in values if type(value) in (str, int)
    ):
        raise InputError("its classes are integers of more than 64 bits.")
    plain = plain_classes(np.asarray(values, dtype=object))
    if sorted(set(plain)) != plain:
        raise InputError("its classes are not distinct and sorted.")
    return np.asarray(plain)
