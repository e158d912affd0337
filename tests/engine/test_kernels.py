"""A whole step of training with the compiled kernels, and which library is taken."""

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from mivhead.backbones.preset import BlockPreset
from mivhead.features import Block, Features
from mivhead.head.blocks import resolve_blocks
from mivhead.head.cap import Bags
from mivhead.head.head import FORMULAS, MIVHead
from mivhead.head.recipe import Recipe
from mivhead.head.training import loss_and_gradients
from mivhead.kernels import library
from mivhead.kernels.backend import COMPILED
from mivhead.kernels.gradients import in_place, project
from tests.helpers.kernel_numbers import close, drawn

HEADS_TO_TRY = {
    "paper": Recipe.paper(),
    "mivhead": Recipe(),
    "dot product": Recipe.paper(attention="dot", self_mask=True),
    "no cross-attention": Recipe.paper(cross_attention=False),
    "no skip": Recipe.paper(skip=False),
    "no co-excitation": Recipe.paper(co_excitation=False),
    "not centred": Recipe.paper(centred=False),
    "means": Recipe.paper(prototype="mean"),
}


@pytest.mark.parametrize("recipe", HEADS_TO_TRY.values(), ids=HEADS_TO_TRY)
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 0, 2]], ids=["even", "uneven"])
@pytest.mark.parametrize("form", ["cnn", "vit"])
def test_a_step_equals_that_in_double_precision(recipe, labels, form):
    token = drawn(9, 24, seed=1) if form == "vit" else None
    blocks = (Block(drawn(9, 16, 4, 4, seed=0)), Block(drawn(9, 24, 2, 2, seed=2), token))
    features = Features(blocks)
    presets = (BlockPreset((3, 2), form=form, tau=3.0), BlockPreset(form=form, tau=3.0))
    configs = resolve_blocks(features, presets)
    bags = Bags.from_labels(torch.tensor(labels), 3)
    sources = torch.tensor([*range(6), 0, 3, 3])
    everything = torch.tensor(labels)[sources]
    found = []
    for dtype in (torch.float32, torch.float64):
        head = MIVHead(configs, recipe, torch.Generator().manual_seed(0)).to(dtype)
        for layer in head.layers:
            for name in ("theta", "mu"):
                if (vector := getattr(layer.pooling, name)) is not None:
                    vector.data = drawn(len(vector), seed=7).to(dtype)
        assert head.operations is (COMPILED if dtype == torch.float32 else FORMULAS)
        candidates = head.prepare(features)
        hidden = sources if recipe.self_mask else None
        loss = loss_and_gradients(head, candidates, everything, bags, hidden)
        found.append((loss, [p.grad for p in head.parameters()]))
    (ours, gradients), (loss, expected) = found
    assert ours == pytest.approx(loss, rel=1e-5)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            close(mine, theirs)


def test_projections_leave_gradients_alone_unless_in_place():
    norm, layer = nn.LayerNorm(5), nn.Linear(5, 5)
    x = drawn(3, 5, seed=0).requires_grad_()
    project(norm, [layer], x)[1].sum().backward()
    before = layer.weight.grad.clone()
    (again,) = torch.autograd.grad(project(norm, [layer], x)[1].sum(), layer.weight)
    assert torch.equal(again, before)
    assert torch.equal(layer.weight.grad, before)
    with in_place():
        project(norm, [layer], x)[1].sum().backward()
    torch.testing.assert_close(layer.weight.grad, 2 * before)


def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path):
    copied = tmp_path / "libkernels.so"
    shutil.copy(library.PATH, copied)  # without the sources in its folder
    monkeypatch.setattr(library, "PATH", copied)
    library.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Install mivhead again"):
            assert library.library() is None
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        monkeypatch.setattr(library, "PATH", broken)
        library.library.cache_clear()
        with pytest.warns(UserWarning, match="belong to another version"):
            assert library.library() is None
    finally:
        library.library.cache_clear()


def test_operations_are_chosen_when_a_head_is_built_moved_or_unpickled(kernels):
    blocks = resolve_blocks(Features(drawn(2, 4, 2, 2, seed=0)))
    expected = COMPILED if kernels else FORMULAS
    head = MIVHead(blocks, Recipe(), torch.Generator().manual_seed(0))
    assert head.operations is expected
    assert head.double().operations is FORMULAS
    assert {layer.operations for layer in head.layers} == {FORMULAS}
    assert head.float().operations is expected
    assert pickle.loads(pickle.dumps(head)).operations == expected
    assert copy.deepcopy(head.double()).operations == FORMULAS


def test_a_pickled_head_runs_where_there_are_no_kernels(monkeypatch):
    features = Features(drawn(4, 8, 2, 2, seed=0))
    head = MIVHead(resolve_blocks(features), Recipe(), torch.Generator().manual_seed(0))
    bags = Bags.from_labels(torch.tensor([0, 0, 1, 1]), 2)
    with torch.no_grad():
        embedded = head.embed(head.prepare(features))
        expected = head(embedded, embedded, bags)
    data = pickle.dumps(head)
    monkeypatch.setattr(library, "PATH", Path("not-built.so"))
    library.library.cache_clear()
    try:
        again = pickle.loads(data)
        assert again.operations is FORMULAS
        with torch.no_grad():
            embedded = again.embed(again.prepare(features))
            torch.testing.assert_close(again(embedded, embedded, bags), expected)
    finally:
        library.library.cache_clear()


def test_a_head_without_parameters_follows_its_device_and_type():
    blocks = resolve_blocks(Features(drawn(2, 4, seed=0)))
    head = MIVHead(blocks, Recipe.paper(prototype="mean"), None)
    assert not list(head.parameters())
    assert head.operations is COMPILED
    assert head.double().operations is FORMULAS
    assert head.float().to("meta").operations is FORMULAS
