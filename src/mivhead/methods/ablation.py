"""The MIV-head by name: its variants, as fields replaced in a recipe or a preset.

The variants are listed in `mivhead.methods.registry`. `configure` is the one function that turns
names and values, such as those of `--param eta=0.2`, into a `Recipe` and a preset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from mivhead.classifier import MIVClassifier
from mivhead.errors import check_one_of
from mivhead.head.recipe import DEFAULT_RECIPE, Recipe, ViewsRule, resolve_recipe
from mivhead.methods.registry import get_method
from mivhead.preset import BlockPreset, Preset, replace_in_blocks

AnyPreset: TypeAlias = "Preset | Sequence[BlockPreset] | Mapping[str, Any] | None"

RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))
PRESET_FIELDS = ("tau", "pool_sizes", "candidates")  # that a parameter may replace in every block


def make_head(settings: Mapping[str, Any]) -> MIVClassifier:
    """Make a classifier from its parameters and from fields of its recipe and preset.

    Parameters
    ----------
    settings : mapping
        Parameters of `MIVClassifier`, and values for `RECIPE_FIELDS` and `PRESET_FIELDS`.

    Examples
    --------
    >>> make_head({"recipe": "paper", "eta": 0.2}).recipe == Recipe.paper(eta=0.2)
    True
    """
    rest = dict(settings)
    recipe, preset = rest.pop("recipe", None), rest.pop("preset", None)
    changes = {name: rest.pop(name) for name in (*RECIPE_FIELDS, *PRESET_FIELDS) if name in rest}
    recipe, preset = configure(recipe, preset, changes)
    return MIVClassifier(recipe, preset, **rest)


def configure(
    recipe: str | Recipe | None, preset: AnyPreset, changes: Mapping[str, Any]
) -> tuple[Recipe, AnyPreset]:
    """Replace fields of a recipe or a preset by name.

    Parameters
    ----------
    recipe : str, Recipe or None
        What to start from; None is the default recipe.
    preset : Preset, sequence of BlockPreset, mapping or None
        As for `MIVClassifier`.
    changes : mapping
        New values by field name; None keeps the value of a preset's field.

    Returns
    -------
    recipe : Recipe
        The changed recipe.
    preset : Preset, tuple of BlockPreset, mapping or None
        The changed preset.

    Examples
    --------
    >>> configure("paper", None, {"eta": 0.2, "tau": 0.0})[1]
    {'tau': 0.0}
    >>> configure(None, None, {"eat": 0.2})
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: parameter must be one of ...; got 'eat'. Did you mean 'eta'?
    """
    for name in changes:
        check_one_of("parameter", name, (*RECIPE_FIELDS, *PRESET_FIELDS))
    start = resolve_recipe(DEFAULT_RECIPE if recipe is None else recipe)
    of_recipe = {name: value for name, value in changes.items() if name in RECIPE_FIELDS}
    of_preset = {
        name: value
        for name, value in changes.items()
        if name in PRESET_FIELDS and value is not None
    }
    if of_preset:
        preset = _change_preset(preset, of_preset)
    return replace(start, **of_recipe), preset


def _change_preset(preset: AnyPreset, changes: Mapping[str, Any]) -> AnyPreset:
    if preset is None or isinstance(preset, Mapping):
        sizes = changes.get("pool_sizes")
        blocks = len(sizes) if isinstance(sizes, list | tuple) else 1
        replace_in_blocks([BlockPreset()] * blocks, changes)  # only to check the values
        return {**(preset or {}), **changes}
    if isinstance(preset, Preset):
        return replace(preset, blocks=replace_in_blocks(preset.blocks, changes))
    return replace_in_blocks(preset, changes)


def views_rule(
    method: str, recipe: str | Recipe | None, params: Mapping[str, Any] | None
) -> ViewsRule | None:
    """Return the rule for the number of views that a method trains on, or None if it uses none.

    >>> views_rule("miv", None, None), views_rule("miv-no-views", None, None)
    ('ceil', None)
    >>> views_rule("miv", "paper", {"views_rule": "floor"})
    'floor'
    """
    entry, params = get_method(method), dict(params or {})
    if not entry.has_recipe:
        return Recipe().views_rule if params.get("use_views", entry.uses_views) else None
    chosen = {} if recipe is None else {"recipe": recipe}
    own = resolve_recipe(make_head({**entry.settings, **chosen, **params}).recipe)
    return own.views_rule if own.use_views else None


def head_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters that `make_head` takes, with their values in a variant of the head."""
    classifier = make_head(settings)
    params: dict[str, Any] = classifier.get_params(deep=False)
    recipe = resolve_recipe(params.pop("recipe"))
    preset = params.pop("preset") or {}
    own = {name: getattr(recipe, name) for name in RECIPE_FIELDS}
    return own | {name: preset.get(name) for name in PRESET_FIELDS} | params


def head_name(classifier: MIVClassifier, variants: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the variant that a classifier is.

    A recipe with ridge experts is `miv`. Otherwise it is the variant with the most replaced fields
    among those whose fields all have these values, `miv-paper` if nothing is replaced, and
    `miv-ablation` if something is that has no name of its own.
    """
    recipe = resolve_recipe(classifier.recipe)
    if recipe.has_experts:
        return "miv"
    fitting = [
        name
        for name, changes in variants.items()
        if changes and all(_has(classifier, recipe, *change) for change in changes.items())
    ]
    if fitting:
        return max(fitting, key=lambda name: len(variants[name]))
    unchanged = recipe == Recipe.paper() and not isinstance(classifier.preset, Mapping)
    return "miv-paper" if unchanged else "miv-ablation"


def _has(classifier: MIVClassifier, recipe: Recipe, name: str, value: Any) -> bool:
    if name in RECIPE_FIELDS:
        return bool(getattr(recipe, name) == value)
    preset = classifier.preset
    if preset is None or isinstance(preset, Mapping):
        return bool((preset or {}).get(name) == value)
    blocks = preset.blocks if isinstance(preset, Preset) else preset
    return all(getattr(block, name) == value for block in blocks)
