"""The MIV-head's ablations: which setting each name stands for; and its path on a GPU."""

from typing import Any

import numpy as np
import pytest

from mivhead import BlockPreset, MIVClassifier, Preset, Recipe
from mivhead.errors import InputError
from mivhead.head.recipe import BlockConfig
from mivhead_bench.methods import METHODS, make_method
from mivhead_bench.methods.miv import DeviceMIVClassifier
from tests.helpers.few_shots import clusters, maps

PRESET = [BlockPreset(pool_sizes=(3, 2)), BlockPreset(pool_sizes=(1,))]


def fitted(name: str, **params: Any) -> Any:
    _, y = clusters([3, 2], 4)
    token = params.pop("token", False)
    params = {"preset": PRESET, "recipe": Recipe.paper(steps=3), "random_state": 0, **params}
    return make_method(name, **params).fit(maps(y, token=token), y)


def blocks(classifier: MIVClassifier) -> list[BlockConfig]:
    return list(classifier.blocks_)


def test_nothing_changed_is_the_head_itself() -> None:
    _, y = clusters([3, 2], 4)
    X, Q = maps(y), maps(y, 1)
    head = MIVClassifier(Recipe.paper(steps=3), PRESET, random_state=0).fit(X, y)
    np.testing.assert_array_equal(fitted("miv-ablation").logits(Q), head.logits(Q))


RECIPES = {
    "miv-mean": {"prototype": "mean"},
    "miv-no-attention": {"cross_attention": False},
    "miv-eta0": {"eta": 0.0},
    "miv-no-skip": {"skip": False},
    "miv-no-excitation": {"co_excitation": False},
}


@pytest.mark.parametrize("name", RECIPES)
def test_changes_of_the_recipe(name: str) -> None:
    Q = maps(clusters([3, 2], 4)[1], 1)
    changed = fitted("miv-ablation", **RECIPES[name])
    assert changed.recipe == fitted(name).recipe
    np.testing.assert_array_equal(fitted(name).logits(Q), changed.logits(Q))
    assert not np.array_equal(fitted(name).logits(Q), fitted("miv-ablation").logits(Q))


def test_eta0_and_no_attention_are_different_variants() -> None:
    assert "blocks.0.cap.key.weight" in fitted("miv-eta0").head_.params
    assert "blocks.0.cap.key.weight" not in fitted("miv-no-attention").head_.arrays()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("miv-d1", [((4, 4),), ((2, 2),)]),
        ("miv-d2", [((4, 4), (2, 2)), ((2, 2), (1, 1))]),
        ("miv-d4", [((4, 4), (3, 3), (2, 2)), ((2, 2), (1, 1))]),
        ("miv-gap", [((4, 4),), ((2, 2),)]),
    ],
)
def test_candidates_of_maps(name: str, sizes: list[Any]) -> None:
    classifier = fitted(name)
    assert [block.candidate_sizes for block in blocks(classifier)] == sizes
    tau = 0.0 if name == "miv-gap" else 500.0
    assert [block.tau for block in blocks(classifier)] == [tau, tau]


def test_other_sizes_than_the_presets() -> None:
    classifier = fitted("miv-ablation", pool_sizes=[[3, 2, 1], []])
    sizes = [block.candidate_sizes for block in blocks(classifier)]
    assert sizes == [((4, 4), (3, 3), (2, 2), (1, 1)), ((2, 2),)]


def test_wrong_sizes() -> None:
    with pytest.raises(InputError, match="blocks"):
        fitted("miv-ablation", pool_sizes=[[3]])


def test_candidates_with_a_token_begin_with_it() -> None:
    assert [b.candidate_sizes for b in blocks(fitted("miv-d1", token=True))] == [(), ()]
    assert [b.candidate_sizes for b in blocks(fitted("miv-d2", token=True))] == [
        ((4, 4),),
        ((2, 2),),
    ]


def test_sizes_are_spread_over_the_range() -> None:
    preset = [BlockPreset(pool_sizes=(13, 11, 9, 8))]
    X = np.random.default_rng(0).random((4, 3, 14, 14), np.float32)
    recipe = Recipe.paper(steps=0)
    kept = {}
    for d in range(1, 7):
        classifier = make_method("miv-ablation", recipe=recipe, preset=preset, candidates=d).fit(
            X, [0, 0, 1, 1]
        )
        kept[d] = [size for size, _ in blocks(classifier)[0].candidate_sizes]
    assert kept == {
        1: [14],
        2: [14, 8],
        3: [14, 13, 8],
        4: [14, 13, 11, 8],
        5: [14, 13, 11, 9, 8],
        6: [14, 13, 11, 9, 8],
    }


def test_last_blocks_equal_the_head_on_those_features() -> None:
    _, y = clusters([3, 2], 4)
    X, Q = maps(y), maps(y, 1)
    head = MIVClassifier(Recipe.paper(steps=3), PRESET[1:], random_state=0)
    expected = head.fit([X.blocks[1]], y).logits([Q.blocks[1]])
    np.testing.assert_allclose(fitted("miv-blocks1").logits(Q), expected, atol=1e-4)
    preset = Preset(taps=("a", "b"), blocks=tuple(PRESET))
    found = fitted("miv-blocks1", preset=preset).logits(Q)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="last_blocks"):
        make_method("miv-blocks2").fit(np.ones((2, 4), np.float32), [0, 1])


def test_preset_of_another_backbone_is_refused() -> None:
    with pytest.raises(InputError, match="blocks"):
        fitted("miv-blocks1", preset=PRESET[:1])


def test_no_views_ignores_them() -> None:
    _, y = clusters([3, 2], 4)
    X, V, Q = maps(y), maps(y, 1), maps(y, 2)
    recipe = Recipe.paper(steps=3)
    given = {"views": V, "view_of": np.arange(5)}
    alone = make_method("miv", recipe=recipe, random_state=0).fit(X, y).logits(Q)
    without = make_method("miv-no-views", recipe=recipe, random_state=0).fit(X, y, **given)
    np.testing.assert_array_equal(without.logits(Q), alone)
    assert not METHODS["miv-no-views"].uses_views


@pytest.mark.parametrize("token", [False, True])
def test_averages_everywhere_on_the_last_block_are_ncc(token: bool) -> None:
    """The paper's NCC column equals its row of ablations without any component."""
    _, y = clusters([3, 1, 2], 4)
    X, Q = maps(y, token=token), maps(y, 1, token=token)
    ablation = make_method("miv-gap-mean-blocks1").fit(X, y)
    ncc = make_method("ncc").fit(X, y)
    np.testing.assert_allclose(ablation.logits(Q), ncc.logits(Q), rtol=1e-5)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("recipe", ["mivhead", "paper", "experts"])
def test_pytorch_trains_and_compares_as_the_product_does(recipe: str, token: bool) -> None:
    _, y = clusters([3, 1, 2], 4)
    X, views, Q = (maps(y, seed, token=token) for seed in range(3))
    given = {"views": views, "view_of": np.arange(len(y))}
    product = MIVClassifier(recipe, random_state=0).fit(X, y, **given)
    device = DeviceMIVClassifier(recipe, random_state=0, device="cpu").fit(X, y, **given)
    np.testing.assert_allclose(device.predict_proba(Q), product.predict_proba(Q), atol=1e-3)
    if product.losses_:
        np.testing.assert_allclose(device.losses_, product.losses_, rtol=1e-3)


def test_another_device_than_the_cpu_takes_pytorch() -> None:
    assert type(make_method("miv", device="cpu")) is MIVClassifier
    made = make_method("miv-eta0", device="cuda:1")
    assert isinstance(made, DeviceMIVClassifier)
    assert (made.device, made.recipe.eta) == ("cuda:1", 0.0)
