"""The MIV-head's rivals and ablations behind one registry.

A rival is a page: an estimator on `Features` (`base`) or, if it tunes the backbone, on images
(`tuning`), with its facts beside it. `registry` names them all, `cost` counts their FLOPs.
"""

from mivhead_bench.methods.registry import (
    METHODS,
    Method,
    get_method,
    list_methods,
    make_method,
)

__all__ = [
    "METHODS",
    "Method",
    "get_method",
    "list_methods",
    "make_method",
]
