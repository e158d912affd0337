"""The docstrings of the public API are complete: every parameter with its type, every result."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

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


def test_docstrings_are_complete() -> None:
    found = {name: gaps for name in sorted(CALLABLES) if (gaps := [*gaps_of(name)])}
    assert not found, "\n".join(f"{name}: {', '.join(gaps)}" for name, gaps in found.items())


def gaps_of(name: str) -> Iterator[str]:
    """Yield what the docstring of a public function or class lacks."""
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
    given = parameters(function, bound=is_method and not isinstance(thing, staticmethod))
    expected = {stars.get(each.kind, "") + each.name: each for each in given}
    for label, each in expected.items():
        if label not in named:
            yield f"{label} is not in Parameters"
        elif each.default is not each.empty and not re.search("default|optional", named[label]):
            yield f"the default of {label} is missing"
    yield from (f"{label} is not a parameter" for label in named.keys() - expected.keys())
    result = getattr(function, "__annotations__", {}).get("return", "None")
    returns = not isinstance(thing, type) and result not in ("None", None, "Never")
    if returns and not found.keys() & {"Returns", "Yields"}:
        yield f"returns {result}, but has no Returns section"
