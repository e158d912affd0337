"""Imports on demand: the public names of packages, and packages that may not be installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mivhead.errors import NotAvailableError

# What `pip install` takes, for packages that are called otherwise or need another one, and for
# those that are imported without `need`.
PACKAGES = {
    "open_clip": "open_clip_torch",
    "psycopg": '"psycopg[binary]" pgvector',
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "timm": "timm torchvision",
    "torch": "torch",
    "torchvision": "torchvision",
}


def lazy(
    package: str, homes: Mapping[str, str], *, modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and the `__dir__` of a package.

    `homes` are its modules, and the names in each, separated by spaces; `modules` are public
    themselves. For type checkers, the package imports the same names under `TYPE_CHECKING`.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in modules.split():
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return get, lambda: sorted({*home_of, *modules.split()})


def need(module: str) -> Any:
    """Import a module of an optional package, or raise an error that says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is installed, but something that it imports is missing
        raise missing(error.name) from None


def missing(package: str) -> NotAvailableError:
    """Make the error that says how to install a package."""
    return NotAvailableError(
        f"This needs the package {package}, which is not installed: run "
        f"`pip install {PACKAGES.get(package, package)}`."
    )
