"""Optional packages: imported on demand; an error names the extra if one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mivhead.errors import NotAvailableError

EXTRAS = {"torch": "torch", "sklearn": "bench", "scipy": "bench"}  # package -> what installs it


def need(module: str, extra: str) -> Any:
    """Import an optional package, or raise an error that says how to install it.

    Parameters
    ----------
    module : str
        The module to import.
    extra : str
        The extra of mivhead that installs it.

    Returns
    -------
    module

    Examples
    --------
    >>> need("json", "onnx").dumps(1)
    '1'
    >>> need("no_such_package", "onnx")
    Traceback (most recent call last):
        ...
    mivhead.errors.NotAvailableError: This needs the package no_such_package, which is not \
installed: run `pip install "mivhead[onnx]"`.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is installed, but something that it imports is missing
        raise _missing(error.name, extra) from None


def explain_missing(error: ModuleNotFoundError) -> NotAvailableError | None:
    """Return an error that says how to install a package that some parts need; None for others.

    >>> print(explain_missing(ModuleNotFoundError("No module named 'torch'", name="torch")))
    This needs the package torch, which is not installed: run `pip install "mivhead[torch]"`.
    """
    package = (error.name or "").partition(".")[0]
    return _missing(package, EXTRAS[package]) if package in EXTRAS else None


def _missing(package: str, extra: str) -> NotAvailableError:
    return NotAvailableError(
        f"This needs the package {package}, which is not installed: "
        f'run `pip install "mivhead[{extra}]"`.'
    )
