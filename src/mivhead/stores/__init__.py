"""Features with labels and ids in a file or a database.

To add a store, subclass `Store` or `DatabaseStore` and add a line to the table in `uri.py`.
"""

from __future__ import annotations

from mivhead.features import FeatureTable
from mivhead.stores.base import Store
from mivhead.stores.uri import is_store
from mivhead.stores.uri import open_store as open  # noqa: A004  # read as `stores.open`

__all__ = ["FeatureTable", "Store", "is_store", "open"]
