"""TSA: the merged and folded form against separate branches, and what it does to real images."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.backbones import load_backbone
from mivhead.errors import InputError
from mivhead_bench.methods import make_method
from mivhead_bench.methods.tuning.network import network_of
from mivhead_bench.methods.tuning.tsa import TSA, AdaptedConv, _fold
from tests.helpers.small_networks import (
    BasicBlock,
    Bottleneck,
    backbone,
    digits,
    network,
    resnet,
    vit,
)


class Branches(nn.Module):
    """The paper's picture: a frozen 3x3 convolution, and a 1x1 one of the same stride beside it."""

    def __init__(self, conv: nn.Conv2d, alpha: Tensor) -> None:
        super().__init__()
        self.conv = conv
        self.alpha = nn.Parameter(alpha[:, :, None, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + F.conv2d(x, self.alpha, stride=self.conv.stride)


@pytest.mark.parametrize(("stride", "dilation", "scaled"), [(1, 1, False), (2, 1, True), (1, 2, 1)])
def test_adapted_convolution_is_two_branches(stride: int, dilation: int, scaled: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride, dilation, dilation).double().requires_grad_(False)
    scale = torch.rand(3, dtype=torch.double) if scaled else None
    ours = AdaptedConv(conv, scale)
    alpha = torch.randn(3, 2, dtype=torch.double)
    ours.alpha.data.copy_(alpha)
    x = torch.randn(2, 2, 4, 5, dtype=torch.double, requires_grad=True)
    factor = 1.0 if scale is None else scale[:, None, None]
    expected = conv(x) + factor * F.conv2d(x, alpha[:, :, None, None], stride=stride)
    torch.testing.assert_close(ours(x), expected)
    assert torch.autograd.gradcheck(ours, (x,))

    def of_alpha(value: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {"alpha": value}, (x.detach(),))

    assert torch.autograd.gradcheck(of_alpha, (alpha.requires_grad_(),))


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_gradients_of_a_network_are_those_of_separate_branches(
    block: type[BasicBlock | Bottleneck],
) -> None:
    model = resnet(block).eval().requires_grad_(False)
    X, _ = digits(2)
    ours = network(model)
    adapters = TSA()._attach(ours, X, torch.zeros(len(X), dtype=torch.long))
    x = ours.batch(X)
    generator = torch.Generator().manual_seed(1)
    plain, branches = deepcopy(model), {}
    for name, adapter in adapters.items():
        if name == "beta":
            continue
        adapter.data.add_(0.02 * torch.randn(adapter.shape, generator=generator))
        place = name.removesuffix(".alpha")
        conv = plain.get_submodule(place)
        assert isinstance(conv, nn.Conv2d)
        plain.set_submodule(place, Branches(conv, adapter.data))
        branches[name] = plain.get_submodule(place).alpha
    assert len(branches) == (8 if block is BasicBlock else 4)
    plain.fc = nn.Identity()
    loss = ours(x).square().mean()
    expected = plain(x).square().mean()
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [adapters[name] for name in branches])
    wanted = torch.autograd.grad(expected, list(branches.values()))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs[:, :, 0, 0], rtol=1e-3, atol=1e-6)


def test_a_training_step_is_adadeltas_on_separate_branches() -> None:
    """One step by hand: class means in a loop, Adadelta's formula written out."""
    model = resnet().eval().requires_grad_(False)
    X, y = digits(2)
    fitted = make_method("tsa", steps=1).attach(network(model)).fit(X, y)
    plain = deepcopy(model)
    plain.fc = nn.Identity()
    conv = plain.layer4[0].conv2
    branch = Branches(conv, 1e-4 * torch.eye(512))
    for layer in (plain.layer1, plain.layer2, plain.layer3, plain.layer4):
        for name in ("conv1", "conv2"):
            old = getattr(layer[0], name)
            start = 1e-4 * torch.eye(old.out_channels, old.in_channels)
            setattr(layer[0], name, branch if old is conv else Branches(old, start))
    z = plain(network(model).batch(X))  # beta is the identity
    means = torch.stack([z[torch.as_tensor(y == c)].mean(dim=0) for c in range(3)])
    loss = torch.zeros(())
    for row, label in zip(z, y, strict=True):
        logits = torch.stack([F.cosine_similarity(row, mean, dim=0) for mean in means]) / 0.1
        loss = loss - torch.log_softmax(logits, dim=0)[label] / len(z)
    (grad,) = torch.autograd.grad(loss, [branch.alpha])
    assert fitted.losses_[0] == pytest.approx(loss.item(), rel=1e-4)
    # The first step of Adadelta, with rho 0.9, eps 1e-6 and rate 0.5.
    change = -0.5 * (1e-6 / (0.1 * grad**2 + 1e-6)).sqrt() * grad
    expected = (branch.alpha + change)[:, :, 0, 0]
    found = fitted.adapters_["layer4.0.conv2.alpha"].detach()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


def test_folding_is_left_out_where_modules_run_in_another_order() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            nn.init.constant_(self.norm.weight, 3.0)
            nn.init.constant_(self.norm.bias, -2.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x).relu())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer4 = Odd()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer4(x)
            return out

    torch.manual_seed(0)
    net = network(Model())
    before = net(net.blank() + 1)
    assert _fold(net) == {}
    torch.testing.assert_close(net(net.blank() + 1), before, rtol=0, atol=0)


def test_adapters_off_are_ncc_and_the_start_is_near_it() -> None:
    frozen = backbone(resnet(Bottleneck))
    X, y = digits(3)
    Q, _ = digits(4, skip=10)
    ncc = make_method("ncc").fit(frozen.extract(list(X)), y).predict_proba(frozen.extract(list(Q)))
    net = network(resnet(Bottleneck))
    tuner = make_method("tsa", steps=0).attach(net).fit(X, y)
    np.testing.assert_allclose(tuner.predict_proba(Q), ncc, atol=0.01)
    for name, adapter in tuner.adapters_.items():
        if name != "beta":
            adapter.data.zero_()
    means = net(net.batch(X)).detach().view(3, 3, -1).mean(dim=1)
    tuner.means_ = means
    np.testing.assert_allclose(tuner.predict_proba(Q), ncc, atol=1e-5)


@pytest.mark.parametrize("name", ["timm:resnet26", "resnet18"])
def test_timms_resnets_start_from_unfolded_weights(name: str) -> None:
    quick = load_backbone(name, weights="random", device="cpu", dtype="float32")
    net = network_of(quick, "tsa")
    assert any(isinstance(m, nn.BatchNorm2d) for m in net.model.modules())
    image = np.full((1, net.size, net.size, 3), 128, np.uint8)
    with torch.no_grad():
        features = net(net.batch(image))
    expected = torch.as_tensor(quick.extract(list(image)).blocks[-1].map).mean(dim=(2, 3))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    TSA().check(net)


def test_only_plain_resnets_are_adapted() -> None:
    with pytest.raises(InputError, match="ResNet"):
        TSA().check(network(vit()))
    grouped = resnet()
    grouped.layer2[0].conv2 = nn.Conv2d(128, 128, 3, padding=1, groups=2)
    with pytest.raises(InputError, match="layer2"):
        TSA().check(network(grouped))
