"""From images to features, each computed once: the pipeline and the feature cache.

The functions of `pipeline` are the only path from images to features: `extract_table` and
`iter_features` for images that are listed, `extract_pictures` for a batch that is decoded already.
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
