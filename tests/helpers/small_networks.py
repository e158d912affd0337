"""Small networks that can be tuned, and images to tune them on."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from mivhead import Preprocessing
from mivhead.backbones import from_module
from mivhead.backbones.module import ModuleBackbone
from mivhead_bench.methods.tuning.network import Network, network_of

pytest.importorskip("timm", reason="the extra timm is not installed")

from timm.models.vision_transformer import VisionTransformer  # after the check
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

SIZE = 32
BIT = 16  # the digits' brightness goes from 0 to 16


def resnet(block: type[BasicBlock | Bottleneck] = BasicBlock, seed: int = 0) -> nn.Module:
    """A ResNet of torchvision with one block a layer and BatchNorms as if they were trained."""
    torch.manual_seed(seed)
    model = ResNet(block, [1, 1, 1, 1], num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(torch.as_tensor(module.running_mean), std=0.2)
            nn.init.uniform_(torch.as_tensor(module.running_var), 0.5, 1.5)
    return model


def vit(seed: int = 0, **settings: Any) -> VisionTransformer:
    """A ViT of timm with three blocks."""
    torch.manual_seed(seed)
    shape = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}
    return VisionTransformer(num_classes=0, **{**shape, **settings})


def backbone(model: nn.Module) -> ModuleBackbone:
    """A backbone of a small model, tapped at its end, not rounded."""
    taps = ["norm"] if isinstance(model, VisionTransformer) else ["layer4"]
    return from_module(
        model,
        taps,
        name="small",
        preprocessing=Preprocessing(size=SIZE),
        threshold=4,
        device="cpu",
        dtype="float32",
    )


def network(model: nn.Module) -> Network:
    """A copy of a small model to tune."""
    return network_of(backbone(model), "test")


def digits(shots: int, classes: int = 3, skip: int = 0) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Real images (image, 32, 32, 3) of handwritten digits, and their labels."""
    bunch = load_digits()
    rows = np.concatenate(
        [np.flatnonzero(bunch.target == c)[skip : skip + shots] for c in range(classes)]
    )
    grey = (bunch.images[rows] * (255 / BIT)).astype(np.uint8)
    large = grey.repeat(SIZE // 8, axis=1).repeat(SIZE // 8, axis=2)
    return np.stack([large] * 3, axis=3), bunch.target[rows]


def train_vit(model: VisionTransformer, steps: int = 150) -> VisionTransformer:
    """Teach a ViT the ten digits, in seconds."""
    X, y = digits(100, classes=10)
    nn.init.normal_(model.pos_embed, std=0.5)  # places matter from the start: it learns faster
    head = nn.Linear(model.embed_dim, 10)
    optimiser = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=2e-3)
    x, labels = network(model).batch(X), torch.as_tensor(y)
    generator = torch.Generator().manual_seed(0)
    model.train().requires_grad_()
    for _ in range(steps):
        rows = torch.randperm(len(x), generator=generator)[:64]
        loss = nn.functional.cross_entropy(head(model(x[rows])), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()
