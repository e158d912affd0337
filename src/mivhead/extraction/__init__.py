"""From images to features, each computed once: the pipeline and the feature cache.

`extract_table` and `iter_features` are the only path from images to features; every command, the
Python API and the benchmark use them.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.extraction.cache import CacheInfo as CacheInfo
    from mivhead.extraction.cache import FeatureCache as FeatureCache
    from mivhead.extraction.cache import open_cache as open_cache
    from mivhead.extraction.pipeline import extract_table as extract_table
    from mivhead.extraction.pipeline import iter_features as iter_features

__getattr__, __dir__ = lazy(
    __name__,
    {
        "cache": "CacheInfo FeatureCache open_cache",
        "pipeline": "extract_table iter_features",
    },
)
