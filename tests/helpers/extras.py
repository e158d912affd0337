"""Optional packages: skip the tests that need an absent one, or make one look absent."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # blocked
        return False


def needs(module: str, extra: str | None = None) -> pytest.MarkDecorator:
    """Skip a test, visibly, if the package of an extra is not installed."""
    reason = f"the extra {extra or module} is not installed"
    return pytest.mark.skipif(not _is_installed(module), reason=reason)


class Blocked:
    """An entry for `sys.meta_path` that makes packages look as if they were not installed."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: object) -> None:
        package = name.partition(".")[0]
        if package in self.packages:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def block(*packages: str) -> None:
    """Make packages look as if they were not installed, for the rest of the process."""
    assert not set(packages) & set(sys.modules), "blocked too late"
    sys.meta_path.insert(0, Blocked(*packages))
