"""From images to features, each computed once: the pipeline and the feature cache."""

from typing import TYPE_CHECKING

from mivhead._util.imports import lazy

if TYPE_CHECKING:
    from mivhead.extraction.cache import FeatureCache as FeatureCache
    from mivhead.extraction.cache import open_cache as open_cache
    from mivhead.extraction.pipeline import extract_table as extract_table
    from mivhead.extraction.pipeline import iter_features as iter_features

__getattr__, __dir__ = lazy(
    __name__,
    {
        "cache": "FeatureCache open_cache",
        "pipeline": "extract_table iter_features",
    },
)
