"""The MIV-head's rivals and ablations, behind one registry."""

from mivhead.methods.registry import (
    METHODS,
    Method,
    list_methods,
    make_method,
    make_tuner,
    method_name,
)

__all__ = ["METHODS", "Method", "list_methods", "make_method", "make_tuner", "method_name"]
