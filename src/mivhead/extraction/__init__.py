"""From images to features, each computed once: the pipeline and the feature cache.

`extract_table` and `iter_features` are the only path from images to features; every command, the
Python API and the benchmark use them. The names below are loaded on first use, because the
pipeline imports PyTorch and the cache does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mivhead.extraction.cache import CacheInfo, FeatureCache, open_cache
    from mivhead.extraction.pipeline import extract_table, iter_features

_HOMES = {
    "CacheInfo": "mivhead.extraction.cache",
    "FeatureCache": "mivhead.extraction.cache",
    "extract_table": "mivhead.extraction.pipeline",
    "iter_features": "mivhead.extraction.pipeline",
    "open_cache": "mivhead.extraction.cache",
}

__all__ = ["CacheInfo", "FeatureCache", "extract_table", "iter_features", "open_cache"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mivhead.extraction' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
