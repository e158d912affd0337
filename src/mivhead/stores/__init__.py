"""Features with labels and ids, on disk."""

from __future__ import annotations

from mivhead.stores.table import FeatureTable

__all__ = ["FeatureTable"]
