"""Images to features, once each: the pipeline and the cache."""
