"""The feature cache: what a backbone once said of an image is kept on disk.

The folder is the platform's cache folder (`~/.cache/mivhead`), or the one that the environment
variable `MIV_CACHE` names; `MIV_CACHE=off` switches the cache off. `MIV_CACHE_GB` is the size above
which the entries that were not used for the longest time are removed.
"""

from __future__ import annotations

from mivhead.cache.settings import open_cache
from mivhead.cache.store import CacheInfo, FeatureCache

__all__ = ["CacheInfo", "FeatureCache", "open_cache"]
