"""A whole step of training with the compiled kernels, and which library is taken."""

import shutil

import pytest
import torch
from torch import nn

from mivhead.features import Block, Features
from mivhead.head.cap import Bags
from mivhead.head.head import MIVHead
from mivhead.head.pooling import prepare
from mivhead.head.recipe import RECIPES, Recipe, resolve_blocks
from mivhead.head.training import loss_and_gradients
from mivhead.kernels import library
from mivhead.kernels.projection import in_place, project
from mivhead.preset import BlockPreset
from tests.helpers.kernel_numbers import close, drawn

HEADS_TO_TRY = {
    "paper": Recipe(),
    "mivhead": RECIPES["mivhead"],
    "dot product": Recipe(attention="dot", self_mask=True),
    "no cross-attention": Recipe(cross_attention=False),
    "no skip": Recipe(skip=False),
    "no co-excitation": Recipe(co_excitation=False),
    "not centred": Recipe(centred=False),
    "means": Recipe(prototype="mean"),
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
        candidates = [
            prepare(block, layer.config, dtype)
            for block, layer in zip(blocks, head.layers, strict=True)
        ]
        hidden = sources if recipe.self_mask else None
        loss = loss_and_gradients(head, candidates, everything, bags, hidden)
        found.append((loss, [p.grad for p in head.parameters()]))
    (ours, gradients), (loss, expected) = found
    assert ours == pytest.approx(loss, rel=1e-5)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            close(mine, theirs)


def test_projections_leave_gradients_alone_unless_told():
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
    shutil.copy(library.PATH, copied)  # without the sources beside it
    monkeypatch.setattr(library, "PATH", copied)
    library.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Install mivhead again"):
            assert library.library() is None
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        monkeypatch.setattr(library, "PATH", broken)
        library.library.cache_clear()
        with pytest.warns(UserWarning, match="not of this version"):
            assert library.library() is None
    finally:
        library.library.cache_clear()
