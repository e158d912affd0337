"""The head trains as PyTorch does: autograd in double precision is its oracle."""

import weakref
from dataclasses import replace

import numpy as np
import pytest

from mivhead import BlockPreset, Features, Recipe
from mivhead._util.threads import set_threads
from mivhead.features import SupportSet
from mivhead.head.components import HeadBlock, bag_starts
from mivhead.head.formulas import combine
from mivhead.head.recipe import BlockConfig, resolve_blocks
from mivhead.head.train import Descent, HeadTask, Trainer, add_gradients

torch = pytest.importorskip("torch")
from mivhead_bench.head import training as formulas  # noqa: E402
from mivhead_bench.head.bags import Bags  # noqa: E402
from mivhead_bench.head.head import MIVHead  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels")

RECIPES = {
    "paper": Recipe.paper(),
    "mivhead": Recipe(),
    "temperature inside": Recipe.paper(temperature_order="inside"),
}
SHOTS = {"even": [0, 0, 1, 1, 2, 2], "uneven": [0, 0, 0, 1, 2, 2]}


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def support_set(shots: str, form: str) -> SupportSet:
    token = {"token": drawn(9, 24, seed=1)} if form == "vit" else {}
    blocks = [drawn(9, 16, 4, 4, seed=0), {"map": drawn(9, 24, 2, 2, seed=2), **token}]
    everything = Features(blocks)
    labels, views = np.array(SHOTS[shots]), np.array([0, 3, 3])
    return SupportSet(everything[:6], labels, everything[6:], views)


def settings(support: SupportSet, form: str):
    presets = (BlockPreset((3, 2), form=form, tau=3.0), BlockPreset(form=form, tau=3.0))
    return resolve_blocks(support.features, presets)


def initial(support: SupportSet, blocks, recipe: Recipe, seed: int):
    """A head before training."""
    return Trainer(support, blocks, replace(recipe, steps=0), seed).fit()[0].head


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shots", SHOTS)
@pytest.mark.parametrize("form", ["cnn", "vit"])
def test_a_step_equals_autograd_in_double_precision(recipe, shots, form) -> None:
    support = support_set(shots, form)
    blocks = settings(support, form)
    ours = initial(support, blocks, recipe, seed=0)
    for layer in ours.layers:  # away from the start, where many gradients vanish
        for name, value in layer.params.items():
            layer.params[name] = value + 0.2 * drawn(*value.shape, seed=7)
    theirs = MIVHead(blocks, recipe, generator=None)
    theirs.load_arrays(ours.params)
    theirs = theirs.double()
    task = HeadTask.of(support, recipe, None)
    descents = [Descent(layer.params, recipe) for layer in ours.layers]
    pairs = zip(ours.layers, support.everything.blocks, strict=True)
    candidates = [layer.prepare(block) for layer, block in pairs]
    loss = add_gradients(ours.layers, candidates, task, recipe, descents)
    expected = formulas.loss_and_gradients(
        theirs,
        theirs.prepare(support.everything),
        torch.as_tensor(support.labels[support.sources]),
        Bags.from_shots(support.shots, torch.device("cpu")),
        torch.as_tensor(support.sources) if recipe.self_mask else None,
    )
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, parameter in theirs.named_parameters():
        _, place, key = name.split(".", 2)
        found = descents[int(place)].velocity[key]
        wanted = np.zeros_like(found) if parameter.grad is None else parameter.grad.numpy()
        scale = max(0.1, float(np.abs(wanted).max()))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * scale, err_msg=name)


@pytest.mark.parametrize("recipe", ["paper", "mivhead"])
def test_prediction_equals_the_formulas(recipe) -> None:
    support = support_set("uneven", "vit")
    blocks, how = settings(support, "vit"), RECIPES[recipe]
    head, losses, _ = Trainer(support, blocks, how, seed=3).fit()[0]
    module, expected = formulas.fit_head(support, blocks, how, seed=3)
    assert losses == pytest.approx(expected, rel=2e-3)
    module.load_arrays(head.params)
    shots = [3, 1, 2]
    bags = Bags.from_shots(shots, torch.device("cpu"))
    with torch.no_grad():
        wanted = module.logits(support.views, support.features, bags)
    embedded = head.embed(support.features)
    cosines = head.cosines(embedded, bag_starts(shots), support.views)
    np.testing.assert_allclose(combine(cosines, how), wanted, atol=1e-4)


def test_a_random_start_is_that_of_pytorch() -> None:
    support = support_set("even", "cnn")
    blocks, recipe = settings(support, "cnn"), Recipe.paper()
    for seed in (0, 7, 2**31 - 2):
        ours = initial(support, blocks, recipe, seed).params
        theirs = MIVHead(blocks, recipe, torch.Generator().manual_seed(seed)).arrays()
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-7)


def test_random_weights_are_those_of_a_linear_layer_of_pytorch_to_the_last_digit() -> None:
    """Item 21 of docs/explanation/the-paper.md: 2^-27 with 96 channels, and equal with 64."""
    for channels, difference in ((64, 0), (96, 7.5e-9), (320, 7.5e-9)):
        block = BlockConfig(channels, 1, (2, 2), token=False)
        ours = HeadBlock.initial(block, Recipe.paper(), np.random.RandomState(3)).params
        torch.manual_seed(3)
        for layer in ("key", "value", "excitation"):
            theirs = torch.nn.Linear(channels, channels).state_dict()
            for name, value in theirs.items():
                found = ours[f"cap.{layer}.{name}"]
                np.testing.assert_allclose(found, value, rtol=0, atol=difference)


def test_small_chunks_change_nothing(monkeypatch) -> None:
    support = support_set("uneven", "cnn")
    blocks = settings(support, "cnn")
    for recipe in (Recipe(steps=3), Recipe.paper(steps=3)):
        _, whole, _ = Trainer(support, blocks, recipe, 0).fit()[0]
        with monkeypatch.context() as patch:
            patch.setattr("mivhead.head.formulas.CHUNK_VALUES", 20)
            _, parts, _ = Trainer(support, blocks, recipe, 0).fit()[0]
        assert parts == pytest.approx(whole, rel=1e-5)


def test_a_head_on_some_images_is_that_of_these_images_alone() -> None:
    support = support_set("uneven", "vit")
    blocks, recipe = settings(support, "vit"), Recipe(steps=4)
    kept = np.array([True, False, True, True, False, True])
    trainer = Trainer(support, blocks, recipe, 0)
    _, (part, losses, _) = trainer.fit([None, kept])
    alone, expected, _ = Trainer(support.take(kept), blocks, recipe, 0).fit()[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in alone.params.items():
        np.testing.assert_allclose(part.params[name], value, atol=1e-6)


def test_cosines_of_other_images_remain_without_the_heads() -> None:
    support = support_set("uneven", "vit")
    blocks, recipe = settings(support, "vit"), Recipe(steps=4)
    kept = np.array([True, False, True, True, False, True])
    trainer = Trainer(support, blocks, recipe, 0)
    whole, part = trainer.fit([None, kept])
    again, dropped = trainer.fit([None, kept], keep=False)
    assert (len(whole.head.layers), len(again.head.layers)) == (len(blocks), len(blocks))
    assert not dropped.head.layers
    assert whole.cosines.shape == (len(blocks), 0, 3)
    np.testing.assert_array_equal(dropped.cosines, part.cosines)
    embedded = part.head.embed(support.features[kept])
    shots = bag_starts(np.bincount(support.labels[kept], minlength=3))
    wanted = part.head.cosines(embedded, shots, support.features[~kept])
    np.testing.assert_allclose(part.cosines, wanted, atol=1e-5)


@pytest.mark.parametrize(("objective", "at_once"), [("blocks", 1), ("joint", 2)])
def test_large_candidates_exist_for_one_block_at_a_time(objective, at_once, monkeypatch) -> None:
    """Pooled candidates are larger than the features; a joint loss needs those of all blocks."""
    rng = np.random.default_rng(0)
    maps = [rng.normal(size=(6, 8, 6, 6)).astype(np.float16) for _ in range(2)]
    support = SupportSet(Features(maps), np.array(SHOTS["even"]), None, np.empty(0, np.int64))
    blocks = resolve_blocks(support.features, (BlockPreset((5, 4, 3)),) * 2)
    derived: list[weakref.ref] = []
    most, original = [0], HeadBlock.prepare

    def spy(layer, *parts):
        found = original(layer, *parts)
        derived.append(weakref.ref(found.maps[0]))
        most[0] = max(most[0], sum(each() is not None for each in derived))
        return found

    monkeypatch.setattr(HeadBlock, "prepare", spy)
    recipe = Recipe(steps=2, objective=objective)
    Trainer(support, blocks, recipe, 0).fit([None, np.arange(6) % 3 > 0])
    assert most[0] == at_once
    assert len(derived) == 2


def test_threads_change_nothing(threads) -> None:
    support = support_set("uneven", "cnn")
    blocks = settings(support, "cnn")
    heads = []
    for _ in range(2):
        heads.append(Trainer(support, blocks, Recipe(steps=3), 0).fit([None, None]))
        set_threads(1)
    for (several, *_), (alone, *_) in zip(*heads, strict=True):
        for name, value in alone.params.items():
            np.testing.assert_array_equal(several.params[name], value)


def test_images_that_look_the_same_do_not_end_in_nan() -> None:
    """The gradient of a cosine explodes where centred vectors are almost zero."""
    same = np.ones((6, 16, 4, 4), np.float32) + 1e-6 * drawn(6, 16, 4, 4, seed=0)
    support = SupportSet(Features([same]), np.array(SHOTS["even"]), None, np.empty(0, np.int64))
    blocks = resolve_blocks(support.features)
    head, losses, _ = Trainer(support, blocks, Recipe(), 0).fit()[0]
    assert np.isfinite(losses).all()
    assert all(np.isfinite(value).all() for value in head.params.values())
