"""Packages whose public names are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mivhead._util.optional import explain_missing


def lazy(
    package: str, homes: Mapping[str, str], *, modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and the `__dir__` of a package.

    Importing the package then costs nothing, even if its modules import PyTorch. `homes` are
    modules of the package, such as `"pipeline"` (or of another one, by its full name), and the
    names in each, separated by spaces; `modules` are public themselves. For type checkers, the
    package imports the same names under `TYPE_CHECKING`.

    >>> get, names = lazy("mivhead.images", {"augmentation": "Augmentation ViewPlan"})
    >>> get("Augmentation").__module__, names()
    ('mivhead.images.augmentation', ['Augmentation', 'ViewPlan'])
    """
    home_of = {
        name: home if home.startswith("mivhead.") else f"{package}.{home}"
        for home, names in homes.items()
        for name in names.split()
    }

    def get(name: str) -> Any:
        if name in modules.split():
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(home_of[name]), name)
        except ModuleNotFoundError as error:
            raise explain_missing(error) or error from None

    return get, lambda: sorted({*home_of, *modules.split()})
