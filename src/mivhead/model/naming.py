"""Vectors of class names for a model: from a text tower, or as given."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.backbones.base import Backbone
from mivhead.backbones.text import TEMPLATES, class_vectors
from mivhead.errors import InputError, MivError
from mivhead.features import FeatureTable

Vectors: TypeAlias = Mapping[Any, ArrayLike] | FeatureTable  # by class, or a table with labels

_log = logging.getLogger(__name__)


class NamedClasses(NamedTuple):
    """Vectors by class, and the sentences that they were embedded in; none if they were given."""

    vectors: dict[Any, NDArray[Any]]
    templates: tuple[str, ...] = ()


def name_classes(
    backbone: Backbone | None,
    seen: Sequence[Any],
    further: Sequence[Any] = (),
    given: Vectors | None = None,
    *,
    wanted: bool | None = None,
    templates: Sequence[str] | None = None,
) -> NamedClasses | None:
    """Find the vectors of all classes of a model that is fitted.

    Parameters
    ----------
    backbone : Backbone or None
        Where the features come from; None if it is not known, or the method cannot use names.
    seen, further : sequence
        The classes with and without images.
    given : mapping, FeatureTable or None, default=None
        Vectors, instead of those of the backbone's text tower.
    wanted : bool or None, default=None
        Whether to use names; None: if the backbone has a text tower that can be loaded.
    templates : sequence of str or None, default=None
        Sentences in which `{}` stands for the name; None: `mivhead.backbones.text.TEMPLATES`.

    Returns
    -------
    NamedClasses or None
        None if names are not used.

    Raises
    ------
    InputError
        If names are wanted, or needed for classes without images, and cannot be had; or if
        `templates` would not be used.
    """
    if twice := [name for name, count in Counter(further).items() if count > 1]:
        raise InputError(f"The class {twice[0]!r} is listed twice among the further classes.")
    every = sorted({*seen, *further})
    if templates is not None and (given is not None or wanted is False):
        raise InputError(
            "Templates are sentences for names that the backbone embeds: omit them (--template), "
            "or use its text tower."
        )
    if given is not None:
        if wanted is False:
            raise InputError("Names are switched off: omit the class vectors, or --no-names.")
        vectors = read_vectors(given)
        if missing := [name for name in every if name not in vectors]:
            raise InputError(
                f"class_vectors has no vector for the class {missing[0]!r}: every class needs one."
            )
        return NamedClasses(vectors)
    needed = bool(wanted) or bool(further) or templates is not None
    if wanted is False:
        if further:
            raise InputError(
                f"There are no images of {further[0]!r}, so its name is all that is known: "
                "allow the use of names (omit --no-names)."
            )
        return None
    if getattr(backbone, "embed_texts", None) is None:
        if not needed:
            return None
        raise InputError(
            "Names of classes need a text-and-image backbone on its own, such as clip_vitb32, "
            "siglip2_base or bioclip2, and the method miv with its default recipe; or give vectors "
            "of all classes (class_vectors, --class-vectors)."
        )
    assert backbone is not None
    sentences = TEMPLATES if templates is None else templates
    try:
        return NamedClasses(embed_classes(backbone, every, sentences), tuple(sentences))
    except MivError as error:
        if needed:
            raise
        _log.warning("The names of the classes are not used: %s", error)
        return None


def embed_classes(
    backbone: Backbone, classes: Sequence[Any], templates: Sequence[str]
) -> dict[Any, NDArray[Any]]:
    """Embed the names of classes with the text tower of a backbone."""
    vectors = class_vectors(backbone, [str(label) for label in classes], templates)
    return dict(zip(classes, vectors, strict=True))


def read_vectors(given: Vectors) -> dict[Any, NDArray[Any]]:
    """Read vectors by class, or those of a table with one row per class.

    >>> from mivhead.features import Features
    >>> table = FeatureTable(Features(np.eye(2)), ("1", "2"), ("cat", "dog"))
    >>> read_vectors(table)["dog"].tolist()
    [0.0, 1.0]
    """
    if not isinstance(given, FeatureTable):
        return {label: np.asarray(vector) for label, vector in given.items()}
    token = given.features.blocks[-1].token
    if token is None:
        raise InputError("A table of class vectors needs one vector per class, not patches.")
    labels = given.ids if given.labels is None else given.labels
    if twice := [name for name, count in Counter(labels).items() if count > 1]:
        raise InputError(f"The table of class vectors has several rows for {twice[0]!r}.")
    return dict(zip(labels, token, strict=True))
