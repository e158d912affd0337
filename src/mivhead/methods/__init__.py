"""The MIV-head's rivals and ablations, one file each, behind one registry.

To add a method, write a file like `ncc.py` and add a row to the table in `registry.py`.
"""

from mivhead.methods.registry import (
    METHODS,
    Method,
    get_method,
    list_methods,
    make_method,
    method_name,
    register_method,
)

__all__ = [
    "METHODS",
    "Method",
    "get_method",
    "list_methods",
    "make_method",
    "method_name",
    "register_method",
]
