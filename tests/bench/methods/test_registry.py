"""Names, needs, hyperparameters, and classes of the user's own."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.base import clone

from mivhead import BlockPreset, Features, Recipe
from mivhead.errors import InputError
from mivhead.head.recipe import resolve_recipe
from mivhead_bench.head.recipe import Ablation
from mivhead_bench.methods import METHODS, get_method, list_methods, make_method
from tests.helpers.few_shots import ON_FEATURES, RIVALS, clusters, maps, quick

TUNERS = {"tsa", "ett", "ln-tune", "finetune"}


def test_names_of_the_contract_are_there() -> None:
    assert set(METHODS) >= {"miv", "miv-paper", *RIVALS, *TUNERS}
    assert {name for name, method in METHODS.items() if method.needs == "images"} == TUNERS
    assert [method.name for method in list_methods()] == list(METHODS)


def test_the_table_agrees_with_the_classes() -> None:
    for name, method in METHODS.items():
        assert method.summary, name
        assert method.paper, name
        made = make_method(name, random_state=3)
        assert (method.needs == "images") == hasattr(made, "attach"), name
        assert clone(made).get_params() == made.get_params(), name
        params, known = made.get_params(), method.hyperparameters()
        assert params["random_state"] == 3
        recipe = params.pop("recipe", None)
        uses = resolve_recipe(recipe).use_views if method.has_recipe else params["use_views"]
        assert uses == method.uses_views, name
        if not method.has_recipe:
            assert {key: params[key] for key in known} == known, name


def test_wrong_names_suggest_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'baseline\+\+'"):
        make_method("baselin++")
    with pytest.raises(InputError, match="'neighbours'"):
        make_method("knn", neighbors=3)
    with pytest.raises(InputError, match="'tau'"):
        make_method("miv", taus=3)
    with pytest.raises(InputError, match="recipe"):
        make_method("ncc", recipe="paper")


def test_preset_reaches_the_head_and_rivals_leave_it_aside() -> None:
    preset = [BlockPreset(tau=7.0)]
    assert make_method("miv", preset=preset).preset is preset
    assert make_method("miv-d1", preset=preset).preset == (BlockPreset(tau=7.0, candidates=1),)
    assert make_method("miv-d1").preset == {"candidates": 1}
    assert "preset" not in make_method("ncc", preset=preset).get_params()


@pytest.mark.parametrize("name", ["miv", "miv-paper", "miv-gap"])
def test_fields_of_recipe_and_preset_are_parameters(name: str) -> None:
    before = resolve_recipe(make_method(name).recipe)
    changed = make_method(name, eta=0.3, pool_sizes=[[2]])
    assert changed.recipe == replace(before, eta=0.3)
    assert changed.preset["pool_sizes"] == [[2]]
    known = METHODS[name].hyperparameters()
    assert {k: known[k] for k in ("eta", "steps")} == {"eta": before.eta, "steps": before.steps}


def test_a_given_recipe_has_fields_replaced_by_the_method_and_its_parameters() -> None:
    made = make_method("miv-eta0", recipe=Recipe.paper(steps=7, eta=0.5), skip=False)
    assert made.recipe == Ablation.paper(steps=7, eta=0.0, skip=False)


def test_the_rule_for_views() -> None:
    rules = {name: METHODS[name].views_rule(None, {}) for name in ("miv", "miv-paper", "ln-tune")}
    assert rules == {"miv": "few", "miv-paper": "ceil", "ln-tune": "ceil"}
    assert METHODS["miv-no-views"].views_rule(None, {}) is None
    assert METHODS["miv"].views_rule("paper", {"views_rule": "floor"}) == "floor"
    assert METHODS["ridge"].views_rule(None, {"use_views": True}) == "ceil"


@pytest.mark.parametrize("name", ON_FEATURES)
def test_views_matter_exactly_where_the_registry_says(name: str) -> None:
    _, y = clusters([3, 2], 4)
    X, views, queries = (maps(y, seed, spread=20.0) for seed in (1, 2, 3))

    def logits(**given: Any) -> NDArray[Any]:
        classifier = make_method(name, random_state=0, **quick(name))
        return classifier.fit(X, y, **given).logits(queries)

    with_views = logits(views=views, view_of=np.arange(len(y)))
    # The variant without anything to train has no use for views, though it is given them.
    trains = name not in ("miv-gap-mean", "miv-gap-mean-blocks1")
    same = np.array_equal(with_views, logits())
    assert same == (not METHODS[name].uses_views or not trains)


# A class of the user's own.

MY_MODULE = '''
import numpy as np


class MyHead:
    """Softmax of distances to the class means."""

    def __init__(self, scale=1.0, random_state=None):
        self.scale = scale
        self.random_state = random_state

    def fit(self, X, y):
        x, y = X.blocks[-1].token, np.asarray(y)
        self.means = np.stack([x[y == name].mean(axis=0) for name in np.unique(y)])
        return self

    def predict_proba(self, X):
        distances = np.linalg.norm(X.blocks[-1].token[:, None] - self.means, axis=2)
        scores = np.exp(-self.scale * distances)
        return scores / scores.sum(axis=1, keepdims=True)


class WithViews(MyHead):
    uses_views = True


class Mute:
    def fit(self, X, y):
        return self
'''


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder, which is not on the path yet."""
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield
    sys.modules.pop("my_module", None)


@pytest.mark.usefixtures("my_module")
def test_a_class_with_fit_and_predict_proba_is_a_method() -> None:
    method = get_method("my_module:MyHead")
    assert method.summary == "Softmax of distances to the class means"
    assert (method.needs, method.uses_views, method.has_recipe) == ("features", False, False)
    assert method.hyperparameters() == {"scale": 1.0}
    assert get_method("my_module:WithViews").uses_views
    X, y = clusters([3, 2, 3], 8)
    made = make_method("my_module:MyHead", scale=3.0, random_state=5, device="cpu", preset=None)
    assert (made.scale, made.random_state) == (3.0, 5)
    probabilities = made.fit(Features(X), y).predict_proba(Features(X))
    assert (probabilities.argmax(axis=1) == y).mean() > 0.8


@pytest.mark.usefixtures("my_module")
@pytest.mark.parametrize("name", ["nowhere:A", "my_module:B", "my_module:Mute", ":", ".a:B", "a:"])
def test_what_cannot_be_a_method_is_named(name: str) -> None:
    with pytest.raises(InputError, match=name):
        make_method(name)
