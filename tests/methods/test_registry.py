"""Names, needs, hyperparameters, and what happens to wrong ones."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.base import clone

from mivhead import BlockPreset, Recipe
from mivhead.classifier import FeatureClassifier, MIVClassifier
from mivhead.errors import InputError
from mivhead.head.recipe import resolve_recipe
from mivhead.methods import METHODS, list_methods, make_method, method_name
from tests.helpers.few_shots import ON_FEATURES, RIVALS, clusters, maps, quick

CONTRACT = {"miv", *RIVALS}


def test_names_of_the_contract_are_there() -> None:
    assert set(METHODS) >= CONTRACT
    assert [method.name for method in list_methods()] == list(METHODS)


def test_every_entry_makes_a_cloneable_classifier_of_its_name() -> None:
    for name in ON_FEATURES:
        method = METHODS[name]
        assert method.summary, name
        assert method.paper, name
        classifier = make_method(name, random_state=3, device="cpu")
        assert isinstance(classifier, FeatureClassifier), name
        assert method_name(classifier) == method_name(classifier.copy_unfitted()) == name
        assert clone(classifier).get_params() == classifier.get_params()
        assert {"random_state", "device"} <= set(method.hyperparameters())
        assert classifier.get_params()["random_state"] == 3


def test_whether_there_are_unlabelled_images_is_not_a_property_of_the_estimator() -> None:
    method = METHODS["miv+unlabelled"]
    assert method.uses_unlabelled
    assert not METHODS["miv"].uses_unlabelled
    assert method_name(make_method("miv+unlabelled")) == "miv"


def test_listing_imports_neither_torch_nor_sklearn() -> None:
    code = (
        "import sys; from mivhead.methods import list_methods; list_methods(); "
        "print([m for m in ('torch', 'sklearn', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"got 'baselin\+\+'. Did you mean 'baseline\+\+'"):
        make_method("baselin++")


def test_unknown_parameter_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"parameter of knn must be .*'neighbors'\. Did you "):
        make_method("knn", neighbors=3)


def test_recipe_is_for_the_head_only() -> None:
    with pytest.raises(InputError, match="ncc has no recipe"):
        make_method("ncc", recipe="paper")
    assert make_method("miv", recipe=Recipe.paper(steps=3)).get_params()["recipe"].steps == 3


def test_preset_reaches_the_head_and_rivals_leave_it_aside() -> None:
    preset = [BlockPreset(tau=7.0)]
    assert make_method("miv", preset=preset).get_params()["preset"] is preset
    assert make_method("miv-d1", preset=preset).get_params()["preset"] == (
        BlockPreset(tau=7.0, candidates=1),
    )
    assert make_method("miv-d1").get_params()["preset"] == {"candidates": 1}
    assert "preset" not in make_method("ncc", preset=preset).get_params()


def test_the_table_agrees_with_the_classes() -> None:
    for name, method in METHODS.items():
        made = make_method(name)
        assert (method.needs == "images") == hasattr(made, "attach"), name
        params = made.get_params()
        has, recipe = method.has_recipe, params.pop("recipe", None)
        uses = resolve_recipe(recipe).use_views if has else params["use_views"]
        assert uses == method.uses_views, name
        params.pop("preset", None)
        known = method.hyperparameters()
        assert params == {key: known[key] for key in params}, name


def test_foreign_classifier_has_no_name() -> None:
    class Mine(type(make_method("ncc"))):  # type: ignore[misc]  # a class made at run time
        pass

    with pytest.raises(InputError, match="Mine is not a registered method"):
        method_name(Mine())


def test_an_estimator_that_no_method_made_has_the_name_of_its_class() -> None:
    assert method_name(MIVClassifier()) == "miv"
    assert method_name(MIVClassifier(Recipe.paper(eta=0.0))) == "miv-paper"
    assert method_name(clone(make_method("knn"))) == "knn"


@pytest.mark.parametrize("name", ["miv", "miv-paper", "miv-gap"])
def test_fields_of_recipe_and_preset_are_parameters(name: str) -> None:
    before = resolve_recipe(make_method(name).recipe)
    changed = make_method(name, eta=0.3, pool_sizes=[[2]])
    assert changed.recipe == replace(before, eta=0.3)
    assert changed.preset["pool_sizes"] == [[2]]
    known = METHODS[name].hyperparameters()
    assert {k: known[k] for k in ("eta", "steps")} == {"eta": before.eta, "steps": before.steps}
    with pytest.raises(InputError, match=f"parameter of {name} must be .*Did you mean 'tau'"):
        make_method(name, taus=3)


def test_a_given_recipe_has_fields_replaced_by_the_method_and_its_parameters() -> None:
    made = make_method("miv-eta0", recipe=Recipe.paper(steps=7, eta=0.5), skip=False)
    assert made.recipe == Recipe.paper(steps=7, eta=0.0, skip=False)


@pytest.mark.parametrize("name", ON_FEATURES)
def test_views_matter_exactly_where_the_registry_says(name: str) -> None:
    _, y = clusters([3, 2], 4)
    X, views, queries = (maps(y, seed, spread=20.0) for seed in (1, 2, 3))
    method = METHODS[name]

    def logits(**given: Any) -> NDArray[Any]:
        classifier = make_method(name, random_state=0, **quick(name))
        return classifier.fit(X, y, **given).logits(queries)

    with_views = logits(views=views, view_of=np.arange(len(y)))
    # The variant without anything to train has no use for views, though it is given them.
    trains = name not in ("miv-gap-mean", "miv-gap-mean-blocks1")
    same = np.array_equal(with_views, logits())
    assert same == (not method.uses_views or not trains)


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_can_be_given_views_as_more_images(name: str) -> None:
    X, y = clusters([3, 2], 6)
    V, _ = clusters([3, 2], 6, seed=1)
    Q, _ = clusters([3, 2], 6, seed=2)
    with_views = make_method(name, use_views=True, random_state=0, **quick(name)).fit(
        X, y, views=V, view_of=np.arange(5)
    )
    more = make_method(name, random_state=0, **quick(name)).fit(
        np.concatenate([X, V]), np.concatenate([y, y])
    )
    np.testing.assert_allclose(with_views.logits(Q), more.logits(Q), rtol=1e-4, atol=1e-5)
