"""Vectors in columns of Arrow, as LanceDB tables and Parquet files hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mivhead._util.optional import need
from mivhead.stores.base import Array, Stacker


def is_vector(kind: Any) -> bool:
    """Return whether a type of Arrow is a list of floats, or of lists of floats."""
    types = need("pyarrow", "batch").types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return types.is_floating(kind.value_type) or is_vector(kind.value_type)
    return False


def to_arrow(part: Array) -> Any:
    """Return one part of the features, (n, ...), as flat lists of fixed size."""
    pa = need("pyarrow", "batch")
    flat = np.ascontiguousarray(part).reshape(len(part), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])


def from_arrow(column: Any, name: str, ids: Sequence[str], stacker: Stacker) -> Array:
    """Return vectors (n, width), or several per row (n, vectors, width)."""
    if is_flat(column.type) and not column.null_count:
        values: Array = column.flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(column), column.type.list_size)
    return stacker.stack(name, ids, [vector(row) for row in column])


def is_flat(kind: Any) -> bool:
    """Return whether a type is a list of a fixed number of floats."""
    types = need("pyarrow", "batch").types
    return bool(types.is_fixed_size_list(kind) and types.is_floating(kind.value_type))


def vector(row: Any) -> Array | None:
    """Return the vector of one row, (width,), or several, (vectors, width); None if it is null."""
    if not row.is_valid:
        return None
    values = row.values
    if hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        inner: Array = values.flatten().to_numpy(zero_copy_only=False)
        return inner.reshape(len(values), -1)
    numbers: Array = values.to_numpy(zero_copy_only=False)
    return numbers
