"""`FeatureTable`: features of images together with their labels, ids and augmented views."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mivhead.errors import InputError, ModelFileError
from mivhead.features import Features, read_features_file, write_features_file

_VIEWS = "views."
_VIEW_OF = "view_of"


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """What `miv extract` writes and `miv fit` takes.

    Parameters
    ----------
    features
        One row per image.
    ids
        A name per image, such as its relative path.
    labels
        A label per image, or None.
    views, view_of
        Features of augmented images, and for each the row of the image it was made from.
    backbone
        Identity of the backbone as JSON, or None if it is not known.

    Examples
    --------
    >>> import numpy as np
    >>> table = FeatureTable(Features(np.ones((2, 8))), ids=("a.jpg", "b.jpg"))
    >>> len(table)
    2
    """

    features: Features
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    views: Features | None = None
    view_of: NDArray[np.int64] | None = None
    backbone: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, column in (("ids", self.ids), ("labels", self.labels)):
            if column is not None and len(column) != len(self.features):
                raise InputError(f"{len(self.features)} images, but {len(column)} {name}.")
        if (self.views is None) != (self.view_of is None):
            raise InputError("views and view_of belong together: give both or none.")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def nbytes(self) -> int:
        """Size in memory, views included."""
        return self.features.nbytes + (0 if self.views is None else self.views.nbytes)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        tensors = dict(self.features.tensors)
        if self.views is not None and self.view_of is not None:
            tensors |= {_VIEWS + name: tensor for name, tensor in self.views.tensors.items()}
            tensors[_VIEW_OF] = torch.as_tensor(self.view_of)
        meta = {"ids": self.ids, "labels": self.labels, "backbone": self.backbone}
        write_features_file(path, tensors, meta)

    @classmethod
    def load(cls, path: str | Path) -> FeatureTable:
        """Read a file written by `save`; runs no code from it."""
        tensors, meta = read_features_file(path)
        try:
            view_of = tensors.pop(_VIEW_OF, None)
            views = {k.removeprefix(_VIEWS): tensors.pop(k) for k in list(tensors) if _VIEWS in k}
            features = Features.from_tensors(tensors)
            default_ids = [str(row) for row in range(len(features))]
            return cls(
                features,
                _texts(meta.get("ids", default_ids), "ids"),
                None if meta.get("labels") is None else _texts(meta["labels"], "labels"),
                Features.from_tensors(views) if views else None,
                None if view_of is None else _rows(view_of, len(features)),
                meta.get("backbone"),
            )
        except InputError as error:
            raise ModelFileError(f"{path} is damaged: {error}") from error


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InputError(f"{name} must be a list of texts.")
    return tuple(value)


def _rows(view_of: torch.Tensor, images: int) -> NDArray[np.int64]:
    rows = view_of.numpy()
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise InputError("view_of must be a list of whole numbers.")
    if len(rows) and not (rows.min() >= 0 and rows.max() < images):
        raise InputError(f"view_of must hold rows 0 to {images - 1}.")
    return rows
