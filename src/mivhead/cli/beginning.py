"""The beginning of the process: settings that make it quicker and are not a library's to choose."""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# scikit-learn imports it for a function that we never call: most of a second.
UNUSED = ("scipy.stats",)
OBJECTS = 100_000  # new ones before Python looks for garbage: importing makes many, and no garbage
# The C library gives memory back to the system when so many bytes are free, and asks for pieces
# above a size one by one. By default both happen for every large tensor, whose pages the system
# then clears again and again.
_TRIM, _MMAP = (-1, 2**28), (-3, 2**25)


def begin() -> None:
    """Make importing quicker, and memory that was freed quick to use again."""
    gc.set_threshold(OBJECTS)
    for name in UNUSED:
        sys.modules.setdefault(name, _Later(name))
    with suppress(AttributeError, OSError, TypeError):  # not every system has glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_TRIM, _MMAP):
            mallopt(*option)


class _Later(ModuleType):
    """Stands for a module until something of it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # an import statement looks at it

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("__file__", "__warningregistry__"):  # asked of every module there is
            raise AttributeError(attribute)
        name = self.__name__
        if sys.modules.get(name) is self:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)
