"""The docstrings of the public API are complete: every parameter with its type, every result."""

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.docs.test_site import documented

SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.MULTILINE)
ENTRY = re.compile(r"^([\w*, ]+?) : (\S.*)$", re.MULTILINE)


def public_callables() -> dict[str, Any]:
    """Functions and classes of the API reference, and the public methods of those classes."""
    found: dict[str, Any] = {}
    for module, names in documented().items():
        for name in sorted(names):
            thing = getattr(importlib.import_module(module), name)
            found[f"{thing.__module__}.{name}"] = thing
            for owner in thing.__mro__ if isinstance(thing, type) else ():
                if owner.__module__.startswith("mivhead."):
                    found |= {
                        f"{owner.__module__}.{owner.__name__}.{each}": value
                        for each, value in vars(owner).items()
                        if not each.startswith("_") and _is_method(value)
                    }
    return found


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)


CALLABLES = public_callables()


def sections(docstring: str) -> dict[str, str]:
    """Split a docstring in numpydoc's form into its sections."""
    _, *parts = SECTION.split(inspect.cleandoc(docstring))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def parameters(thing: Callable[..., Any], *, bound: bool) -> list[inspect.Parameter]:
    """List the parameters that a caller can give."""
    try:
        found = [*inspect.signature(thing).parameters.values()]
    except ValueError:  # a class without a constructor of its own
        return []
    return found[1:] if bound else found


def test_there_are_many_public_callables() -> None:
    assert len(CALLABLES) > 150
    assert "mivhead.features.Features.concat" in CALLABLES
    assert "mivhead.classifier.FeatureClassifier.predict_proba" in CALLABLES  # inherited


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_docstring_is_complete(name: str) -> None:
    thing = CALLABLES[name]
    function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    found = sections(function.__doc__ or "")
    if isinstance(thing, type) and (
        issubclass(thing, Exception) or getattr(thing, "_is_protocol", False)
    ):
        return  # raised and implemented by callers, not made by them
    named = {
        each.strip(): what
        for names, what in ENTRY.findall(found.get("Parameters", ""))
        for each in names.split(",")
    }
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    is_method = inspect.isfunction(function) and "." in name.removeprefix(f"{function.__module__}.")
    expected = parameters(function, bound=is_method and not isinstance(thing, staticmethod))
    for each in expected:
        label = stars.get(each.kind, "") + each.name
        assert label in named, f"{label} is not in Parameters"
        if each.default is not inspect.Parameter.empty:
            assert re.search("default|optional", named[label]), f"the default of {label} is missing"
    assert set(named) == {stars.get(each.kind, "") + each.name for each in expected}
    result = getattr(function, "__annotations__", {}).get("return", "None")
    if not isinstance(thing, type) and result not in ("None", None, "Never"):
        assert found.keys() & {"Returns", "Yields"}, f"returns {result}, but has no Returns section"
