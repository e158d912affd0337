"""eTT and LN-Tune: the maths again on a small ViT, and a task that a trained one learns."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mivhead.backbones import load_backbone
from mivhead.errors import InputError
from mivhead_bench.methods import make_method
from mivhead_bench.methods.tuning.ett import (
    PrefixedAttention,
    Prefixes,
    Regulariser,
    attended,
    find_vit,
)
from mivhead_bench.methods.tuning.network import network_of
from tests.helpers.small_networks import backbone, digits, network, resnet, train_vit, vit


def loops_of_attention(inner, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one image with further keys and values (class, C), one head and token a time."""
    tokens, channels = x.shape
    d = channels // inner.num_heads
    weight, bias = inner.qkv.weight, inner.qkv.bias
    q, k, v = (x @ w.T + b for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True))
    k, v = torch.cat([keys, k]), torch.cat([values, v])
    result = torch.zeros(tokens, channels)
    for h in range(inner.num_heads):
        part = slice(h * d, (h + 1) * d)
        for t in range(tokens):
            scores = torch.tensor([float(q[t, part] @ key) for key in k[:, part]]) / math.sqrt(d)
            result[t, part] = torch.softmax(scores, dim=0) @ v[:, part]
    return result @ inner.proj.weight.T + inner.proj.bias


def test_prefixes_are_further_keys_and_values() -> None:
    torch.manual_seed(0)
    inner = vit().requires_grad_(False).blocks[1].attn
    prefixes = Prefixes(torch.randn(4, 48), depth=3)
    attention = PrefixedAttention(inner, prefixes, 1)
    x = torch.randn(2, 5, 48)
    prefixes.make()
    keys, values = prefixes.made[1].detach()
    expected = torch.stack([loops_of_attention(inner, image, keys, values) for image in x])
    torch.testing.assert_close(attention(x).detach(), expected, rtol=1e-4, atol=1e-5)


def test_maker_is_an_mlp_of_the_papers_size() -> None:
    prefixes = Prefixes(torch.randn(5, 384), depth=12)
    assert (
        sum(p.numel() for p in prefixes.project.parameters())
        == (384 + 1) * 192 + 193 * 12 * 2 * 384
    )
    prefixes.make()
    assert prefixes.made.shape == (12, 2, 5, 384)
    first, _, second = prefixes.project
    hidden = torch.tanh(prefixes.prefix[3] @ first.weight.T + first.bias)
    flat = hidden @ second.weight.T + second.bias
    torch.testing.assert_close(prefixes.made[7, 1, 3], flat[(7 * 2 + 1) * 384 :][:384])


def test_regulariser_is_the_cross_entropy_to_the_centred_teacher() -> None:
    torch.manual_seed(0)
    prototypes, prefix = torch.randn(3, 8), torch.randn(3, 8)
    regulariser = Regulariser(prototypes)
    centre = np.zeros(64)
    weight, bias = (p.detach().double().numpy() for p in regulariser.projector.parameters())
    for _ in range(2):
        found = regulariser(prefix).item()
        teacher, student = (
            x / np.linalg.norm(x, axis=1, keepdims=True) @ weight.T + bias  # not after it
            for x in (prototypes.double().numpy(), prefix.double().numpy())
        )
        student /= 0.1
        sharp = np.exp((teacher - centre) / 0.04)
        target = sharp / sharp.sum(axis=1, keepdims=True)
        log = student - np.log(np.exp(student).sum(axis=1, keepdims=True))
        assert found == pytest.approx(-(target * log).sum(axis=1).mean(), rel=1e-4)
        centre = 0.9 * centre + 0.1 * target.mean(axis=0)


def test_prototypes_are_patches_weighted_by_the_attention_of_cls() -> None:
    net = network(vit())
    model = find_vit(net)
    X, _ = digits(2)
    found = attended(net, model, X)
    x = net.batch(X[1:2])
    with torch.no_grad():
        patches = model.patch_embed(x)[0]  # (patch, C)
        tokens = torch.cat([model.cls_token[0], patches]) + model.pos_embed[0]
        for block in model.blocks[:2]:
            tokens = block(tokens[None])[0]
        last = model.blocks[2]
        q, k, _ = last.attn.qkv(last.norm1(tokens)).chunk(3, dim=1)
        embedded = patches + model.pos_embed[0, 1:]
        expected = torch.zeros(48)
        for h in range(4):
            part = slice(12 * h, 12 * h + 12)
            scores = k[1:, part] @ q[0, part] / math.sqrt(12)  # of the patches alone
            for weight, patch in zip(torch.softmax(scores, dim=0), embedded, strict=True):
                expected += weight * patch / 4  # whole vectors, averaged over heads
    torch.testing.assert_close(found[1], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("ett", {"steps": 0, "prefixes": False, "offsets": True}),
        ("ett", {"steps": 0, "prefixes": False, "offsets": False}),
        ("ln-tune", {"steps": 0}),
        ("finetune", {"steps": 0}),
    ],
)
def test_untouched_is_ncc_exactly(method: str, params: dict[str, bool]) -> None:
    frozen = backbone(vit())
    X, y = digits(2)
    Q, _ = digits(3, skip=10)
    ncc = make_method("ncc").fit(frozen.extract(list(X)), y).predict_proba(frozen.extract(list(Q)))
    tuner = make_method(method, **params).attach(network(vit())).fit(X, y)
    np.testing.assert_allclose(tuner.predict_proba(Q), ncc, atol=1e-6)


def test_ln_tune_changes_layernorms_and_nothing_else() -> None:
    X, y = digits(2)
    before = {name: p.detach().clone() for name, p in vit().named_parameters()}
    fitted = make_method("ln-tune", steps=2, use_views=False).attach(network(vit())).fit(X, y)
    changed = set(fitted.adapters_)
    assert len(changed) == 2 * (2 * 3 + 1)
    assert all("norm" in name for name in changed)
    for name, parameter in fitted.network_.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in changed)


def test_views_are_queries_and_class_means_are_of_the_images_alone() -> None:
    X, y = digits(2)
    rows = np.array([0, 1, 4])
    views = X[rows][:, :, ::-1].copy()
    given = {"views": views, "view_of": rows}
    off, on = (
        make_method("ln-tune", steps=1, use_views=use).attach(network(vit())).fit(X, y, **given)
        for use in (False, True)
    )
    assert off.losses_ != on.losses_
    net = network(vit())
    z, extra = (net(net.batch(each)).detach() for each in (X, views))
    means = z.view(3, 2, -1).mean(dim=1)
    both, labels = torch.cat([z, extra]), torch.as_tensor([*y, *y[rows]])
    logits = torch.cosine_similarity(both[:, None], means[None], dim=2) / 0.1
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert on.losses_[0] == pytest.approx(loss.item(), rel=1e-4)


def test_a_trained_vit_learns_a_new_task() -> None:
    """Mirrored digits, with a ViT that has seen them the right way round only.

    It shows that both learn, and measures nothing: the ViT is a toy, LN-Tune has a rate to suit it.
    """
    model = train_vit(vit())

    def accuracy(method: str, **params: Any) -> float:
        X, y = digits(5, classes=10, skip=110)
        Q, truth = digits(20, classes=10, skip=130)
        tuner = make_method(method, random_state=0, **params)
        tuner.attach(network(model)).fit(X[:, :, ::-1].copy(), y)
        assert not tuner.losses_ or tuner.losses_[-1] < 0.8 * tuner.losses_[0]
        return float((tuner.predict(Q[:, :, ::-1].copy()) == truth).mean())

    plain = accuracy("finetune", steps=0)
    assert accuracy("ett") > plain
    assert accuracy("ln-tune", use_views=False, learning_rate=0.01, steps=40) > plain


@pytest.mark.parametrize("method", ["ett", "ln-tune"])
def test_shapes_at_the_size_of_vit_s(method: str) -> None:
    small = load_backbone("deit_small", weights="random", device="cpu")
    X = np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8)
    tuner = make_method(method, steps=1).attach(network_of(small, method)).fit(X, ["a", "b"])
    shapes = {name: tuple(p.shape) for name, p in tuner.adapters_.items()}
    assert tuner.means_.shape == (2, 384)
    if method == "ett":
        assert shapes["map"] == (384, 384)
        assert shapes["prefix"] == (2, 384)
        assert sum(name.endswith("offset") for name in shapes) == 24
    else:
        assert len(shapes) == 2 * (2 * 12 + 1)
        assert set(shapes.values()) == {(384,)}


def test_the_seed_decides() -> None:
    X, y = digits(2)
    one, same, other = (
        make_method("ett", steps=2, random_state=seed).attach(network(vit())).fit(X, y).losses_
        for seed in (0, 0, 1)
    )
    assert one == same != other


@pytest.mark.parametrize("method", ["ett", "ln-tune"])
def test_convolutional_networks_are_refused(method: str) -> None:
    with pytest.raises(InputError, match="small"):
        make_method(method).check(network(resnet()))


def test_vits_that_ett_cannot_use_are_refused() -> None:
    odd = vit()
    odd.blocks[1].attn.gate = torch.nn.Linear(48, 48)
    with pytest.raises(InputError, match="standard blocks"):
        make_method("ett").check(network(odd))
    headless = vit(class_token=False, global_pool="avg")
    with pytest.raises(InputError, match="CLS"):
        make_method("ett").check(network(headless))
    make_method("ett", prefixes=False).check(network(headless))
