"""The beginning of the process: settings that make it quicker and are not a library's to choose."""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

OBJECTS = 100_000  # new ones before Python looks for garbage: importing makes many, and no garbage
# The C library gives memory back to the system when so many bytes are free, and asks for pieces
# above a size one by one. By default both happen for every large tensor, whose pages the system
# then clears again and again.
_TRIM, _MMAP = (-1, 2**28), (-3, 2**25)


def begin() -> None:
    """Make importing quicker, and memory that was freed quick to use again."""
    gc.set_threshold(OBJECTS)
    sys.meta_path.insert(0, _WithoutStatistics())
    with suppress(AttributeError, OSError, TypeError):  # not every system has glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_TRIM, _MMAP):
            mallopt(*option)


class _WithoutStatistics(MetaPathFinder):
    """Keeps scikit-learn from importing `scipy.stats`: most of a second, for one function.

    That function finds the module where SciPy itself imports it, when it is called.
    """

    def find_spec(self, fullname: str, *_: Any, **__: Any) -> None:
        """Find nothing, but be ready when scikit-learn is about to be imported."""
        if fullname == "sklearn":
            sys.meta_path.remove(self)
            sys.modules.setdefault("scipy.stats", _Once("scipy.stats"))


class _Once(ModuleType):
    """Stands for a module in the next import statement, and is gone."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.__spec__  # an import statement asks for it, and can do without

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__file__":  # asked of every module there is
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)
        if attribute == "__spec__":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)
