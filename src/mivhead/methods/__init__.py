"""The MIV-head's rivals and ablations, one file each, behind one registry."""

from mivhead.methods.registry import (
    METHODS,
    Method,
    get_method,
    list_methods,
    make_method,
    method_name,
)

__all__ = ["METHODS", "Method", "get_method", "list_methods", "make_method", "method_name"]
