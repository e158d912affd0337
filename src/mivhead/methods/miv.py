"""The MIV-head as a method: its variants by name, and what it costs.

The estimator is `mivhead.MIVClassifier`; its variants are listed in `mivhead.methods.registry`.
`configure` is the one function that turns names and values, such as those of `--param eta=0.2`,
into a `Recipe` and a preset: an ablation is a recipe or a preset with fields replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np

from mivhead.backbones.preset import BlockPreset, Preset, ViewsRule, replace_in_blocks
from mivhead.classifier import MIVClassifier
from mivhead.ensemble.descriptors import COMPONENTS, ITERATIONS, OVERSAMPLING
from mivhead.ensemble.ridge import expected_shapes
from mivhead.ensemble.stacking import FOLDS
from mivhead.errors import check_one_of
from mivhead.features import Block, Features
from mivhead.head.blocks import BlockConfig, resolve_blocks, spans_of
from mivhead.head.recipe import DEFAULT_RECIPE, Recipe, resolve_recipe
from mivhead.methods.cost import BACKWARD, BackboneWork, TaskSize, Work
from mivhead.methods.registry import get_method

AnyPreset: TypeAlias = "Preset | Sequence[BlockPreset] | Mapping[str, Any] | None"

RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))
PRESET_FIELDS = ("tau", "pool_sizes", "candidates")  # that a parameter may replace in every block
HEAD_DEFAULTS = {  # of `MIVClassifier`
    "class_prior": "uniform",
    "random_state": None,
    "device": None,
    "verbose": False,
}


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
    ('few', None)
    >>> views_rule("miv", "paper", {"views_rule": "floor"})
    'floor'
    """
    own = recipe_of(method, recipe, params)
    if own is not None:
        return own.views_rule if own.use_views else None
    used = (params or {}).get("use_views", get_method(method).uses_views)
    return Recipe.paper().views_rule if used else None


def recipe_of(
    method: str, recipe: str | Recipe | None, params: Mapping[str, Any] | None
) -> Recipe | None:
    """Return the recipe of the MIV-head or one of its ablations; None for other methods.

    >>> recipe_of("miv-blocks1", None, {"eta": 0.2}).last_blocks
    1
    """
    entry = get_method(method)
    if not entry.has_recipe:
        return None
    given = {**entry.settings, **(params or {})}
    start = given.pop("recipe", None) if recipe is None else recipe
    changes = {name: value for name, value in given.items() if name in RECIPE_FIELDS}
    return configure(start, None, changes)[0]


def head_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters that `make_head` takes, with their values in a variant of the head."""
    recipe = resolve_recipe(settings.get("recipe", DEFAULT_RECIPE))
    known = {name: getattr(recipe, name) for name in RECIPE_FIELDS}
    known |= dict.fromkeys(PRESET_FIELDS) | HEAD_DEFAULTS
    return known | {name: value for name, value in settings.items() if name != "recipe"}


# The cost, step by step through the three components and the ensemble. Every product is counted
# once forward, and once more for each factor that has a gradient. Bags are not padded, and nothing
# is computed twice. Each image is pooled and projected once per step, as a pseudo-query; the
# support is among them.

L1 = 3  # operations per pair of values: difference, absolute value, sum
PASSES = 3  # where both factors have a gradient


def work(classifier: Any, size: TaskSize, features: Features, backbone: BackboneWork) -> Work:
    """Count the work of fitting a `MIVClassifier` or one of its ablations."""
    recipe = resolve_recipe(classifier.recipe)
    blocks = resolve_blocks(features, classifier.preset)
    kept = recipe.last_blocks and recipe.last_blocks + blocks[-1].pooled
    own = blocks[-(kept or 0) :]
    found = miv_work(own, recipe, size)
    if recipe.vote != "logsumexp":
        return found  # the paper has no such head
    again = size.support * backbone.total  # shots pass as bags, and again as pseudo-queries
    return replace(found, authors=authors_work(own, recipe, size) + again)


def miv_work(blocks: Sequence[BlockConfig], recipe: Recipe, size: TaskSize) -> Work:
    """Count the head and, where the recipe has them, ridge experts and out-of-fold heads."""
    taken = [block for block in blocks if not block.pooled] or blocks
    if recipe.vote == "logsumexp":
        return _head_work(taken, recipe, size)
    own = [block for block in taken if not block.plain] or taken
    own = own if recipe.has_head else []
    total = _head_work(own, recipe, size) + experts_work(blocks, size)
    if recipe.stacks and max(size.shots) > 1:
        for fold in range(FOLDS):
            total += _head_work(own, recipe, size.without_fold(fold, FOLDS))
    return total


def _head_work(blocks: Sequence[BlockConfig], recipe: Recipe, size: TaskSize) -> Work:
    """Count all steps, and embedding the support once more for prediction."""
    step, embedding = Work(), 0.0
    for block in blocks:
        step += _pooling(block, size.images) + _projections(block, recipe, size.images)
        step += _attention(block, recipe, size) + _prototypes(block, recipe, size)
        step += _cosines(block, size)
        embedding += _pooling(block, 1).paper + _projections(block, recipe, 1).paper
    steps = recipe.steps
    return Work(
        steps * step.products + embedding * size.support,
        steps * step.others,
        BACKWARD * steps * step.paper,
    )


REPEATED = 512  # up to this many channels, the authors repeat the support for every query


def authors_work(blocks: Sequence[BlockConfig], recipe: Recipe, size: TaskSize) -> float:
    """Count the head as the paper's authors implemented and counted it, by the paper's rule.

    The support is pooled as bags and again as pseudo-queries, a query is projected once per class
    and, in blocks of up to 512 channels, the support once per query. Our own head does none of it
    twice, so its count is lower. The GFLOPs that the paper prints are this count.
    """
    total = 0.0
    for block in [each for each in blocks if not each.pooled] or blocks:
        total += _pooling(block, size.images + size.support).paper
        total += _attention(block, recipe, size).paper
        if recipe.prototype == "mean":
            total += _prototypes(block, recipe, size).paper
            continue
        square = block.channels**2
        keys = 1 + recipe.cross_attention
        copies = size.images if block.channels <= REPEATED else 1
        total += (keys + recipe.co_excitation) * size.ways * size.images * square
        total += keys * copies * size.support * square
        total += size.images * size.support * block.channels  # one sum of gated values and keys
    return BACKWARD * recipe.steps * total


def _pooling(block: BlockConfig, images: int) -> Work:
    """Component 1: scores and weighted sums of patches, then of candidates."""
    patches = sum(h * w for h, w in block.candidate_sizes) * images * block.channels
    stacked = block.candidates * images * block.channels if block.candidates > 1 else 0
    # Patches are frozen: only theta and the weights have gradients. Candidates depend on theta, so
    # their weighted sum has gradients of both factors.
    return Work(products=4 * patches + 5 * stacked, paper=2 * patches + 2 * stacked)


def _projections(block: BlockConfig, recipe: Recipe, images: int) -> Work:
    """Component 2: keys, values and gates."""
    if recipe.prototype == "mean":
        return Work()
    layers = 1 + recipe.cross_attention + recipe.co_excitation
    forward = layers * images * block.channels**2
    return Work(products=PASSES * forward, paper=forward)


def _attention(block: BlockConfig, recipe: Recipe, size: TaskSize) -> Work:
    """Component 2: scores of every pseudo-query with every shot."""
    if recipe.prototype == "mean" or not recipe.cross_attention:
        return Work()
    pairs = size.images * size.support * block.channels
    if recipe.attention == "l1":
        return Work(others=PASSES * L1 * pairs)  # the paper's rule does not count the distance
    return Work(products=PASSES * pairs, paper=pairs)


def _prototypes(block: BlockConfig, recipe: Recipe, size: TaskSize) -> Work:
    """Component 2: weighted sums of values and, for the skip connection, of keys."""
    shots = size.support * block.channels
    if recipe.prototype == "mean":
        return Work(products=2 * shots, paper=shots)
    sums = 1 + recipe.skip
    if not recipe.cross_attention:  # the weights are constants, the same for all queries
        return Work(products=2 * sums * shots, paper=sums * shots)
    forward = sums * size.images * shots
    return Work(products=PASSES * forward, paper=forward)


def _cosines(block: BlockConfig, size: TaskSize) -> Work:
    """Component 3: a dot product and a length for each query and class."""
    pairs = size.images * size.ways * block.channels
    return Work(others=PASSES * 2 * 2 * pairs)


def experts_work(blocks: Sequence[BlockConfig], size: TaskSize) -> Work:
    """Count the ridge experts: descriptors of the support images, and closed-form regressions."""
    images, products = size.support, 0.0
    for block in blocks:
        if block.grid is not None:
            patches = images * block.grid[0] * block.grid[1]
            products += _pca_products(block.channels, patches)
            directions = min(block.channels, COMPONENTS)
            if directions < block.channels:
                products += patches * block.channels * directions
            products += patches * directions**2  # covariances
    shapes = expected_shapes([_empty(block) for block in blocks], size.ways, spans_of(blocks))
    for length in (shape[0] for name, shape in shapes.items() if name.endswith(".coefficients")):
        smaller = min(images, length)
        products += images * length * smaller + smaller**3  # system and its inverse
        products += images * (length + smaller) * size.ways
    return Work.once(products)


def _pca_products(channels: int, patches: int) -> float:
    """Count a PCA of the patches by subspace iteration: their scatter, then products with it."""
    if channels <= COMPONENTS:
        return 0.0
    width = min(channels, COMPONENTS + OVERSAMPLING)
    iteration = channels**2 * width + 2 * channels * width**2  # the product, and a QR
    return float(patches * channels**2 + (ITERATIONS + 1) * iteration)


def _empty(block: BlockConfig) -> Block:
    """Make a block of this shape without images."""
    return Block(
        **{name: np.empty((0, *shape), np.float32) for name, shape in block.layout.items()}
    )
